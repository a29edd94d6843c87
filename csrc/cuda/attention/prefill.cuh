// FlashAttention for long queries on Hopper: one warpgroup copies, the others compute.
//
// A block is persistent and takes tiles: kM rows, which are query tokens of one sequence times the
// query heads that share a KV head (row r: token r / group, head r % group), against all keys they
// see, in blocks of kN from the last to the first. The producer keeps kStages blocks of K and of V
// in flight through TMA. Each consumer warpgroup owns 64 rows.
//
// Shah et al., "FlashAttention-3: fast and accurate attention with asynchrony and low-precision",
// 2024.
#pragma once

#include <cstdint>

#include "../ptx/setmaxnreg.h"
#include "prefill_consumer.cuh"
#include "prefill_producer.cuh"

namespace fastinfer::cuda {

template <class Traits>
__global__ __launch_bounds__(Traits::kThreads,
                             1) void prefill_kernel(const __grid_constant__ PrefillParams p,
                                                    const __grid_constant__ CUtensorMap q_map,
                                                    const __grid_constant__ CUtensorMap k_map,
                                                    const __grid_constant__ CUtensorMap v_map) {
  extern __shared__ uint8_t raw[];
  auto& shared = *reinterpret_cast<PrefillShared<Traits>*>(
      (reinterpret_cast<uintptr_t>(raw) + 1023) & ~uintptr_t{1023});
  if (threadIdx.x == 0) {
    prefetch_tensor_map(&q_map);
    prefetch_tensor_map(&k_map);
    prefetch_tensor_map(&v_map);
    constexpr int kConsumerWarps = 4 * Traits::kConsumers;
#pragma unroll
    for (int i = 0; i < Traits::kQueryStages; ++i) {
      shared.q_full[i].init(1);
      shared.q_empty[i].init(kConsumerWarps);
    }
#pragma unroll
    for (int i = 0; i < Traits::kStages; ++i) {
      shared.k_full[i].init(1);
      shared.v_full[i].init(1);
      shared.k_empty[i].init(kConsumerWarps);
      shared.v_empty[i].init(kConsumerWarps);
    }
    for (int32_t& failed : shared.failed) failed = 0;
    fence_mbarrier_init();
  }
  __syncthreads();
  if (threadIdx.x < 128) {
    registers_decrease<Traits::kProducerRegisters>();
    if (threadIdx.x < 32) Producer<Traits>{p, &q_map, &k_map, &v_map, shared}.run();
  } else {
    registers_increase<Traits::kConsumerRegisters>();
    consume<Traits>(p, shared);
  }
}

}  // namespace fastinfer::cuda
