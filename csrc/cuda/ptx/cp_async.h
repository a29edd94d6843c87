// cp.async: copies from global to shared memory that do not pass through registers.
#pragma once

#include <cstdint>

#include "mbarrier.h"

namespace fastinfer::cuda::ptx {

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

// The same if `wanted`, without a branch.
__device__ inline void cp_async_16_if(bool wanted, uint32_t to, const void* from, bool ignore) {
  asm volatile(
      "{\n"
      ".reg .pred ignore, wanted;\n"
      "setp.ne.u32 ignore, %2, 0;\n"
      "setp.ne.u32 wanted, %3, 0;\n"
      "@wanted cp.async.cg.shared.global [%0], [%1], 16, ignore;\n"
      "}\n" ::"r"(to),
      "l"(from), "r"(static_cast<uint32_t>(ignore)), "r"(static_cast<uint32_t>(wanted))
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

// Into L2 alone, a multiple of 16 bytes from an aligned address: changes nothing but when they
// arrive.
__device__ inline void prefetch_l2(const void* from, uint32_t bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;\n" ::"l"(from), "r"(bytes) : "memory");
}

__device__ inline void cp_async_commit() {
  asm volatile("cp.async.commit_group;\n" ::: "memory");
}

// Waits until at most kPending of this thread's latest groups are under way.
template <int kPending>
__device__ inline void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(kPending) : "memory");
}

// One of the arrivals that the barrier expects, when this thread's copies up to here are done.
__device__ inline void cp_async_arrive(Mbarrier& barrier) {
  asm volatile(
      "cp.async.mbarrier.arrive.noinc.shared.b64 [%0];\n" ::"r"(shared_address(&barrier.state))
      : "memory");
}

}  // namespace fastinfer::cuda::ptx
