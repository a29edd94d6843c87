// The decode kernel's loads: which keys a group of warps takes next, and their way into its ring.
#pragma once

#include "decode_copy.cuh"
#include "decode_traits.cuh"

namespace fastinfer::cuda {

// The tiles of a group of warps, over all units of the block. Loads run up to kStages - 1 tiles
// ahead of computation, across the border between units, so that memory has work while a unit is
// being finished. All warps of a group hold the same state.
template <class T>
struct KeyStream {
  int unit = -1;            // the block's number of the unit of the next tile
  int begin = 0, high = 0;  // the next tile's first key and the unit's end; begin >= high: no tile
  KeyRun run;               // of this lane in the next tile
  int ahead = 0;            // tiles that were asked for and not yet computed
  int fill = 0;             // stage of the next tile

  // To the first tile in units [unit, last].
  __device__ void seek(const DecodeParams& p, const DecodeSmem<T>& smem, int group, int last) {
    while (begin >= high && unit < last) {
      ++unit;
      const DecodeUnit& next = smem.units[unit & 3];
      begin = first_tile<T>(next, group);
      high = next.high;
    }
    if (begin < high) run = look_up_run<T::kKeys>(p, smem.units[unit & 3], begin);
  }

  __device__ void load(const DecodeParams& p, DecodeSmem<T>& smem, int group, int row_group,
                       int last) {
    const uint32_t keys = ptx::shared_address(smem.tiles[group][fill]);
    copy_keys<T, T::kKeys, T::kGroupWarps>(p, smem.units[unit & 3], run, begin, keys,
                                           keys + T::kKeys * T::kKPitch, smem.scales[group][fill],
                                           0, row_group);
    ptx::cp_async_commit();
    fill = fill + 1 == T::kStages ? 0 : fill + 1;
    ++ahead;
    begin += T::kKeys * T::kKeyGroups;
    seek(p, smem, group, last);
  }

  // Asks for tiles until `most` are ahead.
  __device__ void load_up_to(int most, const DecodeParams& p, DecodeSmem<T>& smem, int group,
                             int row_group, int last) {
    while (ahead < most && begin < high) load(p, smem, group, row_group, last);
  }

  // Waits for the oldest tile, then for the warps that share it.
  __device__ void wait(int group) const {
    if (ahead >= T::kStages - 1) {
      ptx::cp_async_wait<T::kStages - 2>();
    } else {
      ptx::cp_async_wait<0>();
    }
    group_barrier<T>(group);
  }
};

}  // namespace fastinfer::cuda
