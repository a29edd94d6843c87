// A computing warpgroup of the prefill kernel. It overlaps the softmax of a block with the product
// P V of the one before, and takes turns with the others, so that one's softmax hides behind
// another's products.
#pragma once

#include <cstdint>

#include "../ptx/async_proxy.h"
#include "../ptx/named_barrier.h"
#include "../ptx/wgmma.h"
#include "../ring.cuh"
#include "prefill_rows.cuh"
#include "prefill_schedule.cuh"
#include "prefill_traits.cuh"

namespace fastinfer::cuda {

// q and k are descriptors of the first 32 bytes of columns.
template <class T, int kN, int kM, int kHeadDim>
__device__ inline void multiply_q_k(float (&s)[kN / 2], uint64_t q, uint64_t k) {
#pragma unroll
  for (int step = 0; step < kHeadDim * int{sizeof(T)} / 32; ++step) {
    const int slab = step / 4, inside = step % 4 * 32;
    Wgmma<T, kN>::shared_k_major(s, q + (slab * kM * 128 + inside) / 16,
                                 k + (slab * kN * 128 + inside) / 16, step > 0);
  }
}

// v is the descriptor of the first 16 keys.
template <class T, int kN, int kValueDim>
__device__ inline void multiply_p_v(float (&o)[kValueDim / 2], const uint32_t (&p)[kN / 16][4],
                                    uint64_t v) {
#pragma unroll
  for (int step = 0; step < kN / 16; ++step) {
    Wgmma<T, kValueDim>::registers_mn_major(o, p[step], v + step * 2048 / 16, 1);
  }
}

// Zeros the values of a block from row `first` on, whatever the page or the next sequence holds
// there: 0 * NaN would send the tile to prefill_isolated.cuh, whose sums are ordered otherwise.
// Each consumer warpgroup does it for itself.
template <class Traits>
__device__ inline void clear_values(typename Traits::Value* v, int first, int barrier) {
  for (int i = first * 8 + threadIdx.x % 128; i < Traits::kN * 8; i += 128) {
#pragma unroll
    for (int slab = 0; slab < Traits::kValueSlabs; ++slab) {
      *reinterpret_cast<uint4*>(v + slab * Traits::kN * Traits::kValueSlab + i * 8) =
          make_uint4(0, 0, 0, 0);
    }
  }
  fence_async_proxy();
  named_barrier_sync(barrier, 128);
}

template <class Traits>
__device__ void consume(const PrefillParams& p, PrefillShared<Traits>& shared) {
  using Element = typename Traits::Element;
  using Value = typename Traits::Value;
  constexpr int kM = Traits::kM, kN = Traits::kN;
  constexpr int kHeadDim = Traits::kHeadDim, kValueDim = Traits::kValueDim;
  const int group_index = uniform(threadIdx.x / 128) - 1;  // of the consumer warpgroups
  const ThreadRows mine(p, group_index * 64 + threadIdx.x / 32 % 4 * 16);
  const bool signals = mine.lane == 0;
  // All lanes are done with this tile's Q, and with what there is to know about the tile before.
  const auto give_back = [signals](Mbarrier& empty) {
    __syncwarp();
    if (signals) empty.arrive();
  };
  // Named barriers: 1 + i lets warpgroup i issue its products; the next kConsumers are each one's
  // own.
  const int my_turn = 1 + group_index;
  const int next_turn = 1 + (group_index + 1) % Traits::kConsumers;
  if (group_index == Traits::kConsumers - 1) named_barrier_arrive(next_turn, 256);

  const uint64_t q_first = k_major_descriptor(shared_address(shared.q) + group_index * 64 * 128);
  const uint64_t k_first = k_major_descriptor(shared_address(shared.k));
  const uint64_t v_first = mn_major_descriptor(shared_address(shared.v), kN * 128);
  constexpr int kKeyStep = sizeof(shared.k[0]) / 16, kValueStep = sizeof(shared.v[0]) / 16;
  Ring<Traits::kQueryStages> query;
  Ring<Traits::kQueryStages + 1> slot;
  Ring<Traits::kStages> stage;
  bool drained = false;

  for (;; query.next(), slot.next()) {
    shared.q_full[query.index].wait(query.phase);
    // Read again where it is needed: registers are scarce.
    const PrefillTile& tile = shared.tiles[slot.index];
    if (!uniform(tile.valid)) {
      if (drained) break;
      // The producer sees which tiles failed, and sends them again, or the end.
      drained = true;
      give_back(shared.q_empty[query.index]);
      continue;
    }
    KeyBlocks blocks = key_blocks<kN>(p, tile);
    blocks.begin = uniform(blocks.begin);
    blocks.end = uniform(blocks.end);
    RowState<kValueDim> rows;
    rows.start(p, tile, mine);
    RowScales scales{{p.scale_log2, p.scale_log2}, 1.f};
    [[maybe_unused]] bool unusual = false;
    if constexpr (Traits::kFp8) unusual = rows.read_scales(p, tile, mine, &scales);

    const bool may_be_fast = !uniform(tile.careful);
    auto& q_empty = shared.q_empty[query.index];
    if (blocks.begin >= blocks.end) {
      give_back(q_empty);
    } else {
      float s[kN / 2];
      uint32_t probabilities[kN / 16][4];
      const uint64_t q = q_first + uniform(query.index) * int{sizeof(shared.q[0]) / 16};
      const auto scale_and_mask = [&](int block) {
        if constexpr (Traits::kFp8) {
          if (unusual) rows.template scale<kN>(s, p, tile, mine);
        }
        if constexpr (Traits::kSoftcap) rows.template cap<kN>(s, p);
        if (block < blocks.full_begin || block >= blocks.full_end) {
          rows.template mask<kN>(s, p, tile, mine, block * kN);
        }
      };
      int block = blocks.end - 1;
      shared.k_full[stage.index].wait(stage.phase);
      wgmma_fence();
      multiply_q_k<Element, kN, kM, kHeadDim>(s, q, k_first + stage.index * kKeyStep);
      wgmma_commit();
      wgmma_wait<0>();
      wgmma_pin(s);
      if (signals) shared.k_empty[stage.index].arrive();
      scale_and_mask(block);
      rows.template softmax<kN>(s, scales, may_be_fast);
      // Whether all rows have seen a key. It follows from positions, so that it does not depend on
      // what other rows hold, and is the same in all warps of the group.
      const auto all_started = [&](int block) {
        const int32_t token = tile.token_begin + group_index * 64 / p.group;
        return uniform(seen_keys(p, tile, token).end) > block * kN;
      };
      bool fast = may_be_fast && all_started(block);
      shared.v_full[stage.index].wait(stage.phase);
      // Keys beyond a dense tensor's end arrive as zeros.
      if (p.cu_seqlens_q != nullptr && blocks.end * kN > uniform(tile.seqlen_k)) {
        clear_values<Traits>(shared.v[stage.index], tile.seqlen_k - block * kN,
                             1 + Traits::kConsumers + group_index);
      }
      pack_probabilities<Value, kN>(s, probabilities);

      for (--block; block >= blocks.begin; --block) {
        const int value_stage = stage.index;
        stage.next();
        shared.k_full[stage.index].wait(stage.phase);
        named_barrier_sync(my_turn, 256);
        wgmma_pin(s);
        wgmma_pin(rows.o);
        wgmma_fence();
        multiply_q_k<Element, kN, kM, kHeadDim>(s, q, k_first + stage.index * kKeyStep);
        wgmma_commit();
        multiply_p_v<Value, kN, kValueDim>(rows.o, probabilities,
                                           v_first + value_stage * kValueStep);
        wgmma_commit();
        named_barrier_arrive(next_turn, 256);
        wgmma_wait<1>();
        wgmma_pin(s);
        if (signals) shared.k_empty[stage.index].arrive();
        scale_and_mask(block);
        // Values for the next product are waited for here, since this loop also keeps the
        // assembler from moving what is before it behind the wait for P V, where it would overlap
        // with nothing. Sums are never below 0, but the assembler does not know.
        const auto wait_for_p_v = [&] {
          const uint32_t sums = rows.sum[0] + rows.sum[1] < 0.f;
          shared.v_full[stage.index].wait(stage.phase ^ sums);
          wgmma_wait<0>();
          wgmma_pin(rows.o);
          if (signals) shared.v_empty[value_stage].arrive();
        };
        if (fast) {
          // The other half leaves room for rounding the first.
          rows.template exponentials<0, kN / 4>(s, scales);
          wait_for_p_v();
          rows.template exponentials<kN / 4, kN / 2>(s, scales);
          pack_probabilities<Value, kN>(s, probabilities);
          if constexpr (Traits::kRecenters) rows.recenter(probabilities);
        } else {
          rows.template softmax<kN>(s, scales, may_be_fast);
          wait_for_p_v();
          rows.rescale();
          pack_probabilities<Value, kN>(s, probabilities);
          fast = may_be_fast && all_started(block);
        }
      }
      give_back(q_empty);
      wgmma_pin(rows.o);
      wgmma_fence();
      multiply_p_v<Value, kN, kValueDim>(rows.o, probabilities, v_first + stage.index * kValueStep);
      wgmma_commit();
      wgmma_wait<0>();
      wgmma_pin(rows.o);
      if (signals) shared.v_empty[stage.index].arrive();
      stage.next();
    }
    const bool masked = blocks.begin < blocks.full_begin || blocks.end > blocks.full_end;
    const bool failed = rows.template finish<Element, typename Traits::Out>(p, tile, mine, scales,
                                                                            masked, may_be_fast);
    if (failed && signals) shared.failed[slot.index] = 1;
  }
  // The turn that nobody takes: every arrival needs its match before the block ends.
  if (group_index == 0) named_barrier_sync(my_turn, 256);
}

}  // namespace fastinfer::cuda
