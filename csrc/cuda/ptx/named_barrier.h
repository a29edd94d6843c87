// The numbered barriers of a block, among some of its warps.
#pragma once

namespace fastinfer::cuda::ptx {

// Numbered barriers (0 is __syncthreads): `threads` count those that arrive and those that wait.
__device__ inline void named_barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ inline void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

}  // namespace fastinfer::cuda::ptx
