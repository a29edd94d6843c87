// Attention of many query rows over a paged cache of bytes: verifying a draft, and the chunks of
// prompts beside which others decode.
//
// Units, their rows and the split of their keys among groups are as in the decode kernel. A group
// is a warpgroup, and two warps of its own copy its tiles.
#pragma once

#include "../ptx/cp_async.h"
#include "../ptx/grid_dependency.h"
#include "../ptx/lane_id.h"
#include "../ptx/setmaxnreg.h"
#include "decode_copy.cuh"
#include "decode_result.cuh"
#include "extend_consumer.cuh"

namespace fastinfer::cuda {

// A warp that copies half of each tile of a group.
template <class T>
__device__ inline void copy_tiles(const DecodeParams& p, ExtendSmem<T>& smem,
                                  const BlockUnits& units, int group, int half) {
  constexpr int kHalf = T::kKeys / 2, kStep = T::kKeys * T::kKeyGroups;
  const int skipped = half * kHalf;
  Ring<T::kStages> stage;
  for (int u = 0; u < units.count; ++u) {
    const DecodeUnit unit = units.read(p, u);
    int begin = first_tile<T>(unit, group) + skipped;
    KeyRun run = look_up_run<kHalf>(p, unit, begin);
    for (; begin - skipped < unit.high; begin += kStep) {
      smem.empty[group][stage.index].wait(stage.phase ^ 1);
      const uint32_t keys = ptx::shared_address(smem.tiles[group][stage.index]);
      const uint32_t values = keys + T::kKeys * T::kKPitch;
      copy_keys<T, kHalf, 1>(p, unit, run, begin, keys + skipped * T::kKPitch,
                             values + skipped * T::kVPitch, smem.scales[group][stage.index],
                             skipped, 0);
      ptx::cp_async_arrive(smem.full[group][stage.index]);
      stage.next();
      run = look_up_run<kHalf>(p, unit, begin + kStep);
    }
  }
  ptx::cp_async_commit();
  ptx::cp_async_wait<0>();
}

// A warp of the groups that compute.
template <class T>
__device__ inline void compute_units(const DecodeParams& p, ExtendSmem<T>& smem,
                                     const BlockUnits& units, int group, int member) {
  if (threadIdx.x == 0 && units.count > 0) smem.units[0] = units.read(p, 0);
  block_barrier<T>();
  Ring<T::kStages> stage;
  for (int u = 0; u < units.count; ++u) {
    const DecodeUnit& unit = smem.units[u & 1];
    prepare_rows<T>(p, smem, unit);
    block_barrier<T>();
    // Read by others after the barriers of this unit's end; nobody needs the entry it replaces.
    if (threadIdx.x == 0 && u + 1 < units.count) smem.units[(u + 1) & 1] = units.read(p, u + 1);
    __syncwarp();
    WarpgroupState<T> state(group, member, ptx::lane_id());
    state.take_tiles(p, smem, unit, stage);
    finish_unit<T>(p, smem, unit, state);
  }
}

template <class T>
__global__ void __launch_bounds__(T::kBlockThreads, 1)
    extend_kernel(const __grid_constant__ DecodeParams p) {
  extern __shared__ __align__(1024) unsigned char shared[];
  ExtendSmem<T>& smem = *reinterpret_cast<ExtendSmem<T>*>(shared);
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x / 32), 0);
  if (threadIdx.x == 0) {
    for (auto& ring : smem.full) {
      for (ptx::Mbarrier& barrier : ring) barrier.init(64);  // lanes that copy
    }
    for (auto& ring : smem.empty) {
      for (ptx::Mbarrier& barrier : ring) barrier.init(T::kGroupWarps);
    }
  }
  __syncthreads();
  ptx::grid_dependency_wait();
  ptx::grid_dependency_launch();
  const BlockUnits units = block_units(p);
  if (warp >= T::kWarps) {
    ptx::registers_decrease<T::kCopyingRegisters>();
    const int copying = warp - T::kWarps;
    copy_tiles<T>(p, smem, units, copying / 2, copying % 2);
  } else {
    ptx::registers_increase<T::kComputingRegisters>();
    compute_units<T>(p, smem, units, warp / T::kGroupWarps, warp % T::kGroupWarps);
  }
}

}  // namespace fastinfer::cuda
