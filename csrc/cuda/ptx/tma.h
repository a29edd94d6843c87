// TMA: tiles of a tensor copied to shared memory by the copy engine.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "mbarrier.h"

namespace fastinfer::cuda::ptx {

__device__ inline void prefetch_tensor_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(reinterpret_cast<uint64_t>(map)) : "memory");
}

// The box at the coordinates c0 (innermost) to c3; the barrier counts its bytes. What lies outside
// the tensor arrives as zeros and counts as well.
__device__ inline void tma_load(void* target, const CUtensorMap* map, Mbarrier* barrier, int32_t c0,
                                int32_t c1, int32_t c2, int32_t c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(shared_address(target)),
      "l"(reinterpret_cast<uint64_t>(map)), "r"(shared_address(&barrier->state)), "r"(c0), "r"(c1),
      "r"(c2), "r"(c3)
      : "memory");
}

// Brings the box into L2.
__device__ inline void tma_prefetch_l2(const CUtensorMap* map, int32_t c0, int32_t c1, int32_t c2,
                                       int32_t c3) {
  asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global.tile [%0, {%1, %2, %3, %4}];" ::"l"(
                   reinterpret_cast<uint64_t>(map)),
               "r"(c0), "r"(c1), "r"(c2), "r"(c3)
               : "memory");
}

// As tma_load, to two blocks of a cluster, 0 and 1: to the same place in the memory of each,
// counted by the barrier there.
__device__ inline void tma_load_to_both(void* target, const CUtensorMap* map, Mbarrier* barrier,
                                        int32_t c0, int32_t c1, int32_t c2, int32_t c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(shared_address(target)),
      "l"(reinterpret_cast<uint64_t>(map)), "r"(shared_address(&barrier->state)), "r"(c0), "r"(c1),
      "r"(c2), "r"(c3), "h"(static_cast<uint16_t>(3))
      : "memory");
}

// Bytes that follow one another: a multiple of 16, from and to multiples of 16.
__device__ inline void bulk_load(void* target, const void* from, uint32_t bytes,
                                 Mbarrier* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared_address(target)),
      "l"(from), "r"(bytes), "r"(shared_address(&barrier->state))
      : "memory");
}

}  // namespace fastinfer::cuda::ptx
