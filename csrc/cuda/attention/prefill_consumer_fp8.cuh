// A computing warpgroup of the prefill kernel, on e4m3 elements.
//
// Tensor cores add e4m3 products with 14 bits, too few for the sum over a long sequence: P V of a
// block of keys begins at zero, and fp32 registers add up the blocks. That takes the registers which
// overlapping a block's softmax with products would need, so the warpgroups hide each other's.
#pragma once

#include <cstdint>

#include "../ptx/wgmma.h"
#include "prefill_rows.cuh"
#include "prefill_schedule.cuh"
#include "prefill_traits.cuh"

namespace fastinfer::cuda {

// Probabilities are rounded relative to the row's maximum, which becomes 2^8: e4m3 reaches 448.
constexpr float kFp8Shift = 8.f;

// Scores of the accumulator's layout as A operands of 32 keys each. A thread has keys 2 t and
// 2 t + 1 of every eight where the operand wants 4 t to 4 t + 3 of every sixteen: the values'
// images have their keys in that order.
template <int kN>
__device__ inline void pack_fp8_probabilities(const float (&s)[kN / 2],
                                              uint32_t (&p)[kN / 32][4]) {
#pragma unroll
  for (int i = 0; i < kN / 32; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int at = 16 * i + 8 * (j / 2) + 2 * (j % 2);
      p[i][j] = ptx::pack_e4m3(s[at], s[at + 1], s[at + 4], s[at + 5]);
      asm volatile("" : "+r"(p[i][j])::"memory");
    }
  }
}

template <class Traits>
__device__ void consume_fp8(const PrefillParams& p, PrefillShared<Traits>& shared) {
  using T = typename Traits::Element;
  constexpr int kM = Traits::kM, kN = Traits::kN;
  constexpr int kHeadDim = Traits::kHeadDim, kValueDim = Traits::kValueDim;
  const int group_index = uniform(threadIdx.x / 128) - 1;  // of the consumer warpgroups
  const ThreadRows mine(p, group_index * 64 + threadIdx.x / 32 % 4 * 16);
  const bool signals = mine.lane == 0;

  const uint64_t q_first = k_major_descriptor(shared_address(shared.q) + group_index * 64 * 128);
  const uint64_t k_first = k_major_descriptor(shared_address(shared.k));
  const uint64_t v_first = brick_descriptor(shared_address(shared.v), 128, kValueDim * 16);
  constexpr int kKeyStep = sizeof(shared.k[0]) / 16, kValueStep = sizeof(shared.v[0]) / 16;
  Ring<Traits::kQueryStages> query;
  Ring<Traits::kQueryStages + 1> slot;
  Ring<Traits::kStages> stage;

  for (;; query.next(), slot.next()) {
    shared.q_full[query.index].wait(query.phase);
    const PrefillTile& tile = shared.tiles[slot.index];
    if (!uniform(tile.valid)) break;
    KeyBlocks blocks = key_blocks<kN>(p, tile);
    blocks.begin = uniform(blocks.begin);
    blocks.end = uniform(blocks.end);
    RowState<kValueDim> rows;
    rows.start();

    const auto factor = [&](int r) {
      const int head = tile.kv_head * p.group + (mine.row + 8 * r) % p.group;
      return score_factor(p, tile.kv_head, head);
    };
    RowScales scales{{factor(0), factor(1)}, 1.f, kFp8Shift};
    if (p.v_scale != nullptr) scales.value = p.v_scale[tile.kv_head];
    const auto usual = [](float x) { return x > 0.f && x < INFINITY; };
    // Any other factor is applied before the mask and the maximum.
    const bool unusual = __any_sync(~0u, !usual(scales.log2[0]) || !usual(scales.log2[1]));
    if (unusual) scales.log2[0] = scales.log2[1] = 1.f;

    const uint64_t q = q_first + uniform(query.index) * int{sizeof(shared.q[0]) / 16};
    for (int block = blocks.end - 1; block >= blocks.begin; --block) {
      float s[kN / 2];
      shared.k_full[stage.index].wait(stage.phase);
      wgmma_fence();
      multiply_q_k<T, kN, kM, kHeadDim>(s, q, k_first + stage.index * kKeyStep);
      wgmma_commit();
      wgmma_wait<0>();
      wgmma_pin(s);
      if (signals) shared.k_empty[stage.index].arrive();
      if (unusual) {
        const float factors[2] = {factor(0), factor(1)};
#pragma unroll
        for (int i = 0; i < kN / 2; ++i) s[i] *= factors[i / 2 % 2];
      }
      if (block < blocks.full_begin || block >= blocks.full_end) {
        rows.template mask<kN>(s, p, tile, mine, block * kN);
      }
      rows.template softmax<kN>(s, scales);
      uint32_t probabilities[kN / 32][4];
      pack_fp8_probabilities<kN>(s, probabilities);

      float product[kValueDim / 2];
      shared.v_full[stage.index].wait(stage.phase);
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < kN / 32; ++step) {
        Wgmma<T, kValueDim>::registers_k_major(
            product, probabilities[step],
            v_first + stage.index * kValueStep + step * 2 * kValueDim, step > 0);
      }
      wgmma_commit();
      wgmma_wait<0>();
      wgmma_pin(product);
      if (signals) shared.v_empty[stage.index].arrive();
      rows.add(product);
      stage.next();
    }
    if (signals) shared.q_empty[query.index].arrive();
    const bool masked = blocks.begin < blocks.full_begin || blocks.end > blocks.full_end;
    rows.template finish<T, typename Traits::Out>(p, tile, mine, scales, masked);
  }
}

}  // namespace fastinfer::cuda
