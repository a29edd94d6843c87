// %laneid: a thread's number in its warp.
#pragma once

namespace fastinfer::cuda::ptx {

// Volatile: what follows from it is computed where it is used, and takes no registers elsewhere.
__device__ inline int lane_id() {
  int lane;
  asm volatile("mov.u32 %0, %%laneid;\n" : "=r"(lane));
  return lane;
}

}  // namespace fastinfer::cuda::ptx
