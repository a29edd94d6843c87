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
// Waits likewise, and says whether any of the threads gave true.
__device__ inline bool named_barrier_any(int id, int threads, bool predicate) {
  int any;
  asm volatile(
      "{\n.reg .pred given, any;\nsetp.ne.b32 given, %3, 0;\n"
      "barrier.red.or.pred any, %1, %2, given;\nselp.b32 %0, 1, 0, any;\n}\n"
      : "=r"(any)
      : "r"(id), "r"(threads), "r"(static_cast<int>(predicate))
      : "memory");
  return any != 0;
}

}  // namespace fastinfer::cuda::ptx
