// What a launch must have asked the driver for.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>

namespace fastinfer::cuda {

// Lets blocks of a kernel have kBytes of dynamic shared memory on `device`, the current one. The
// driver is asked once for each device: later calls, from any thread, cost one load. A kernel has
// one number of bytes, since a smaller one would take back the larger.
template <auto kKernel, int kBytes>
cudaError_t allow_shared_memory(int device) {
  constexpr int kRemembered = 64;  // devices; of any others the driver is asked each time
  static constinit std::atomic<uint64_t> allowed{0};
  const uint64_t bit = device < kRemembered ? uint64_t{1} << device : 0;
  if ((allowed.load(std::memory_order_acquire) & bit) != 0) return cudaSuccess;
  // Threads that come here at once ask for the same.
  const cudaError_t error =
      cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (error == cudaSuccess) allowed.fetch_or(bit, std::memory_order_release);
  return error;
}

}  // namespace fastinfer::cuda
