// %laneid: a thread's number in its warp.
#pragma once

namespace fastinfer::cuda::ptx {

// Volatile: what follows from it is computed where it is used, and takes no registers elsewhere.
__device__ inline int lane_id() {
  int lane;
  asm volatile("mov.u32 %0, %%laneid;\n" : "=r"(lane));
  return lane;
}

// What all lanes of a warp name alike. A reduction's result is known to be that, so that what is
// made of it costs no vector instructions.
__device__ inline uint32_t same_in_warp(uint32_t value) {
  return __reduce_or_sync(~0u, value);
}

}  // namespace fastinfer::cuda::ptx
