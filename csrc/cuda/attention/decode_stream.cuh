// The decode kernel's loads: which keys a group of warps takes next, and their way into its ring.
#pragma once

#include "../../checks/attention_plan.h"
#include "../ptx/cp_async.h"
#include "../ptx/named_barrier.h"
#include "decode_traits.cuh"

namespace fastinfer::cuda {

// Unit `index` of the plan's narrow items: item index / Hk, KV head index % Hk.
__device__ inline DecodeUnit read_unit(const DecodeParams& p, int first_item, int index) {
  DecodeUnit unit;
  unit.kv_head = index % p.num_kv_heads;
  unit.k = p.k.data + unit.kv_head * p.k.head;
  unit.v = p.v.data + unit.kv_head * p.v.head;
  unit.k_scale = p.k.scale + unit.kv_head * p.k.scale_head;
  unit.v_scale = p.v.scale + unit.kv_head * p.v.scale_head;
  const int64_t row = kPlanHeaderRows + first_item + index / p.num_kv_heads;
  const int32_t* item = p.plan + row * kPlanColumns;
  unit.sequence = item[0];
  unit.token_begin = item[1];
  unit.token_count = item[2];
  const int key_begin = item[3], key_end = item[4];
  unit.partial_row = item[5];
  const int keys = p.seq_lens[unit.sequence];
  unit.first_token = p.cu_seqlens_q[unit.sequence];
  const int queries = p.cu_seqlens_q[unit.sequence + 1] - unit.first_token;

  unit.step_begin = keys - queries;
  int low = key_begin, high = min(key_end, keys);
  // A tree's tokens stand anywhere between its first and its last, or one before with an empty
  // mask.
  const bool tree = p.tree_mask != nullptr;
  const int first_position = unit.step_begin + (tree ? -1 : unit.token_begin);
  const int last_position =
      unit.step_begin + (tree ? queries : unit.token_begin + unit.token_count) - 1;
  int all_low = low, all_high = tree ? min(high, unit.step_begin) : high;
  if (p.window_left >= 0) {
    low = max(low, first_position - p.window_left);
    all_low = max(low, last_position - p.window_left);
  }
  if (p.window_right >= 0) {
    high = min(high, last_position + p.window_right + 1);
    all_high = min(all_high, first_position + p.window_right + 1);
  }
  unit.low = max(low, 0);
  unit.high = max(high, unit.low);
  unit.all_low = max(all_low, unit.low);
  unit.all_high = min(all_high, unit.high);
  return unit;
}

// The first key of the first tile of a group.
template <class T>
__device__ inline int first_tile(const DecodeUnit& unit, int group) {
  return (unit.low / T::kKeys + group) * T::kKeys;
}

template <class T>
__device__ inline void group_barrier(int group) {
  if constexpr (T::kRowGroups == 1) {
    __syncwarp();
  } else {
    ptx::named_barrier_sync(1 + group, T::kRowGroups * 32);
  }
}

// The tiles of a group of warps, over all units of the block. Loads run up to kStages - 1 tiles
// ahead of computation, across the border between units, so that memory has work while a unit is
// being finished. All warps of a group hold the same state.
template <class T>
struct KeyStream {
  int unit = -1;            // the block's number of the unit of the next tile
  int begin = 0, high = 0;  // the next tile's first key and the unit's end; begin >= high: no tile
  int page, inside;         // of this lane's key in the next tile
  int ahead = 0;            // tiles that were asked for and not yet computed
  int fill = 0;             // stage of the next tile

  // To the first tile in units [unit, last].
  __device__ void seek(const DecodeParams& p, const DecodeSmem<T>& smem, int group, int last) {
    while (begin >= high && unit < last) {
      ++unit;
      const DecodeUnit& next = smem.units[unit % 4];
      begin = first_tile<T>(next, group);
      high = next.high;
    }
    if (begin < high) look_up(p, smem);
  }

  // Pages are looked up a tile ahead, so that no load of keys waits for its page. Entries of keys
  // that are not loaded may hold anything and are not read.
  __device__ void look_up(const DecodeParams& p, const DecodeSmem<T>& smem) {
    const DecodeUnit& now = smem.units[unit % 4];
    const int key = begin + threadIdx.x % T::kKeys;
    const int entry = p.block_shift >= 0 ? key >> p.block_shift : key / p.block_size;
    inside = key - entry * p.block_size;
    page = -1;
    if (key >= now.low && key < high) {
      page = p.block_table[now.sequence * p.table_sequence + entry * p.table_block];
    }
  }

  __device__ void load(const DecodeParams& p, DecodeSmem<T>& smem, int group, int row_group,
                       int last) {
    const int lane = threadIdx.x % 32;
    const DecodeUnit& now = smem.units[unit % 4];
    const uint32_t stage = ptx::shared_address(smem.tiles[group][fill]);
    const uint32_t present = __ballot_sync(0xffffffffu, page >= 0);  // bit: key of the tile
    // What is not loaded has an address all the same, in block 0.
    const int64_t block = max(page, 0);
    const auto token = static_cast<int64_t>(inside);
    copy_rows<T::kKPitch>(p.k, now.k + block * p.k.outer + token * p.k.token, present, stage,
                          row_group);
    copy_rows<T::kVPitch>(p.v, now.v + block * p.v.outer + token * p.v.token, present,
                          stage + T::kKeys * T::kKPitch, row_group);
    if (lane < T::kKeys && row_group == 0) {
      if constexpr (T::kByteK) {
        ptx::cp_async_4(ptx::shared_address(&smem.scales[group][fill][0][lane]),
                        now.k_scale + block * p.k.scale_outer + token * p.k.scale_token, page < 0);
      }
      if constexpr (T::kByteV) {
        ptx::cp_async_4(ptx::shared_address(&smem.scales[group][fill][1][lane]),
                        now.v_scale + block * p.v.scale_outer + token * p.v.scale_token, page < 0);
      }
    }
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

 private:
  // A warp copies four rows by a 128-byte segment at once. `start` is that of the lane's key.
  template <int kPitch>
  __device__ static void copy_rows(const DecodeKv& kv, const unsigned char* start, uint32_t present,
                                   uint32_t to, int row_group) {
    constexpr int kSegments = kPitch / 128;
    const int lane = threadIdx.x % 32, chunk = lane % 8;
    uint32_t wanted[kSegments];  // bit 4 i: the chunk in row 4 i + lane / 8
#pragma unroll
    for (int s = 0; s < kSegments; ++s) {
      wanted[s] = (s * 8 + chunk) * 16 < kv.row_bytes ? present >> lane / 8 : 0;
    }
#pragma unroll
    for (int i = 0; i < T::kKeys / 4 / T::kRowGroups; ++i) {
      const int four = i * T::kRowGroups + row_group, row = four * 4 + lane / 8;
      const unsigned char* from =
          reinterpret_cast<const unsigned char*>(
              __shfl_sync(0xffffffffu, reinterpret_cast<unsigned long long>(start), row)) +
          chunk * 16;
#pragma unroll
      for (int s = 0; s < kSegments; ++s) {
        ptx::cp_async_16(to + swizzled<kPitch>(row, s * 8 + chunk), from + s * 128,
                         (wanted[s] >> four * 4 & 1) == 0);
      }
    }
  }
};

}  // namespace fastinfer::cuda
