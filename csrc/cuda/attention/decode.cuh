// Attention of few query rows over a paged cache, as in decoding and in verifying a draft: the
// narrow items of a plan. (Many rows over bytes are the extend kernel's.)
//
// A persistent block takes units (an item for one KV head) in a fixed stride. The rows of a unit
// are its query tokens times the heads that share the KV head, so that keys and values are read
// once. Warps split the unit's keys: tile t is the work of group t % kKeyGroups, which has its own
// ring in shared memory, its own running softmax, and never waits for the others before the unit's
// end.
//
// Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018; Dao et al.,
// "Flash-Decoding for long-context inference", 2023.
#pragma once

#include "../ptx/grid_dependency.h"
#include "decode_result.cuh"
#include "decode_stream.cuh"
#include "decode_tile.cuh"

namespace fastinfer::cuda {

template <class T>
__global__ void __launch_bounds__(T::kThreads, 1)
    decode_kernel(const __grid_constant__ DecodeParams p) {
  extern __shared__ __align__(1024) unsigned char shared[];
  DecodeSmem<T>& smem = *reinterpret_cast<DecodeSmem<T>*>(shared);
  const int warp = threadIdx.x / 32;
  const int group = warp / T::kGroupWarps, member = warp % T::kGroupWarps;

  ptx::grid_dependency_wait();
  ptx::grid_dependency_launch();
  {
    const BlockUnits units = block_units(p);
    if (units.count == 0) return;
    if (threadIdx.x == 0) smem.block = units;
    if (threadIdx.x < 3 && threadIdx.x < units.count) {
      smem.units[threadIdx.x] = units.read(p, threadIdx.x);
    }
  }
  __syncthreads();

  KeyStream<T> stream;
  stream.seek(p, smem, group, min(2, smem.block.count - 1));
  int stage = 0;  // of the next tile to compute
  for (int u = 0; u < smem.block.count; ++u) {
    const DecodeUnit& unit = smem.units[u & 3];
    const int last = min(u + 2, smem.block.count - 1);  // the last unit whose entry is there
    if (stream.begin >= stream.high) stream.seek(p, smem, group, last);
    stream.load_up_to(T::kStages - 1, p, smem, group, member, last);
    prepare_rows<T>(p, smem, unit);
    __syncthreads();
    // Read by others after the barriers of this unit's end; nobody needs the entry it replaces.
    if (threadIdx.x == 0 && u + 3 < smem.block.count) {
      smem.units[(u + 3) & 3] = smem.block.read(p, u + 3);
    }
    __syncwarp();

    WarpState<T> state(smem, group, member);
    for (int begin = first_tile<T>(unit, group); begin < unit.high;
         begin += T::kKeys * T::kKeyGroups) {
      stream.wait(group);
      // All warps of the group are done with the tile before this one: its stage is free.
      stream.load_up_to(T::kStages, p, smem, group, member, last);
      state.take_tile(p, smem, unit, stage, begin);
      --stream.ahead;
      stage = stage + 1 == T::kStages ? 0 : stage + 1;
    }
    finish_unit<T>(p, smem, unit, state);
  }
}

}  // namespace fastinfer::cuda
