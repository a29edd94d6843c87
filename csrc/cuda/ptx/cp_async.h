// cp.async: copies from global to shared memory that do not pass through registers.
#pragma once

#include <cstdint>

namespace fastinfer::cuda::ptx {

__device__ inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// 16 bytes, past L1; zeros, and nothing is read, if `ignore`.
__device__ inline void cp_async_16(uint32_t to, const void* from, bool ignore) {
  asm volatile(
      "{\n"
      ".reg .pred ignore;\n"
      "setp.ne.u32 ignore, %2, 0;\n"
      "cp.async.cg.shared.global [%0], [%1], 16, ignore;\n"
      "}\n" ::"r"(to),
      "l"(from), "r"(static_cast<uint32_t>(ignore))
      : "memory");
}

// 4 bytes, likewise.
__device__ inline void cp_async_4(uint32_t to, const void* from, bool ignore) {
  asm volatile(
      "{\n"
      ".reg .pred ignore;\n"
      "setp.ne.u32 ignore, %2, 0;\n"
      "cp.async.ca.shared.global [%0], [%1], 4, ignore;\n"
      "}\n" ::"r"(to),
      "l"(from), "r"(static_cast<uint32_t>(ignore))
      : "memory");
}

__device__ inline void cp_async_commit() {
  asm volatile("cp.async.commit_group;\n" ::: "memory");
}

// Waits until at most kPending of this thread's latest groups are under way.
template <int kPending>
__device__ inline void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(kPending) : "memory");
}

}  // namespace fastinfer::cuda::ptx
