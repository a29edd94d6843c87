// FlashAttention for long queries on Hopper: one warpgroup copies, the others compute.
//
// A block is persistent and takes tiles: kM rows, which are query tokens of one sequence times the
// query heads that share a KV head (row r: token r / group, head r % group), against all keys they
// see, in blocks of kN from the last to the first. The producer keeps kStages blocks of K and of V
// in flight through TMA. Each consumer warpgroup owns 64 rows. It overlaps the softmax of a block
// with the product P V of the one before, and takes turns with the others, so that one's softmax
// hides behind another's products.
//
// Shah et al., "FlashAttention-3: fast and accurate attention with asynchrony and low-precision",
// 2024.
#pragma once

#include <cfloat>
#include <cstdint>

#include "../ptx/mbarrier.h"
#include "../ptx/named_barrier.h"
#include "../ptx/setmaxnreg.h"
#include "../ptx/tma.h"
#include "../ptx/wgmma.h"
#include "prefill_params.h"
#include "prefill_rows.cuh"

namespace fastinfer::cuda {

using namespace ptx;

template <class T, int kHeadDim_, int kValueDim_, int kM_, int kN_, int kQueryStages_,
          bool kSoftcap_>
struct PrefillTraits {
  using Element = T;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kValueDim = kValueDim_;
  static constexpr int kM = kM_;
  static constexpr int kN = kN_;
  static constexpr bool kSoftcap = kSoftcap_;
  static constexpr int kStages = 2;
  static constexpr int kQueryStages = kQueryStages_;  // 2: the next tile's Q is there in time
  static constexpr int kConsumers = kM / 64;
  static constexpr int kThreads = 128 * (kConsumers + 1);
  // 64 K registers of an SM, as setmaxnreg shares them out.
  static constexpr int kProducerRegisters = kConsumers == 2 ? 24 : 32;
  static constexpr int kConsumerRegisters = kConsumers == 2 ? 240 : 160;

  static_assert(kM % 64 == 0 && (kConsumers == 2 || kConsumers == 3));
  static_assert(kN % 16 == 0, "P's registers are A operands of 16 keys");
  static_assert(kHeadDim % 64 == 0 && kValueDim % 64 == 0, "columns of 128 bytes");
  static_assert(kHeadDim <= 256 && kValueDim <= 256, "wgmma's largest N");
};

// Matrices are stored 64 columns (128 bytes) wide, one such slab after the other.
constexpr int kSlab = 64;

template <class Traits>
struct PrefillShared {
  using T = typename Traits::Element;
  alignas(1024) T q[Traits::kQueryStages][Traits::kM * Traits::kHeadDim];
  alignas(1024) T k[Traits::kStages][Traits::kN * Traits::kHeadDim];
  alignas(1024) T v[Traits::kStages][Traits::kN * Traits::kValueDim];
  // What each Q belongs to, and what the one before them belonged to: rows are finished after Q.
  PrefillTile tiles[Traits::kQueryStages + 1];
  Mbarrier q_full[Traits::kQueryStages], q_empty[Traits::kQueryStages];
  Mbarrier k_full[Traits::kStages], k_empty[Traits::kStages];
  Mbarrier v_full[Traits::kStages], v_empty[Traits::kStages];
};

// A place in a ring of buffers, and the parity of its barriers' phase.
template <int kCount>
struct Ring {
  int index = 0;
  uint32_t phase = 0;

  __device__ void next() {
    if (++index == kCount) {
      index = 0;
      phase ^= 1;
    }
  }
};

// The blocks of keys that a tile's rows see: [begin, end), and those of them that need no mask.
struct KeyBlocks {
  int32_t begin, end, full_begin, full_end;
};

template <int kN>
__device__ inline KeyBlocks key_blocks(const PrefillParams& p, const PrefillTile& tile) {
  const int32_t last = min(tile.token_begin + p.tile_tokens, tile.seqlen_q) - 1;
  const int32_t shift = tile.seqlen_k - tile.seqlen_q;
  int32_t low = 0, high = tile.seqlen_k, all_low = 0, all_high = tile.seqlen_k;
  if (p.window_left >= 0) {
    low = max(0, tile.token_begin + shift - p.window_left);
    all_low = max(0, last + shift - p.window_left);
  }
  if (p.window_right >= 0) {
    high = min(high, last + shift + p.window_right + 1);
    all_high = min(all_high, tile.token_begin + shift + p.window_right + 1);
  }
  high = max(high, 0);
  if (low >= high) return {0, 0, 0, 0};
  KeyBlocks blocks{low / kN, (high + kN - 1) / kN, (all_low + kN - 1) / kN, max(all_high, 0) / kN};
  return blocks;
}

// -------------------------------------------------------------------------------------- schedule

// The tile of an index, by which blocks take them: first their own number, then the next one that
// nobody has. Sequences and heads come in sections whose keys and values fit the L2 cache together,
// and in a section the tiles that see most keys come first, so that blocks end together. Run by a
// whole warp.
__device__ inline void find_tile(const PrefillParams& p, int64_t index, PrefillTile* tile) {
  tile->valid = false;
  if (p.cu_seqlens_q == nullptr) {
    if (index >= p.num_tiles) return;
    const int pairs = p.num_sequences * p.num_kv_heads;
    const int tiles = p.tiles_per_sequence;
    const int section = static_cast<int>(index / (int64_t{p.section_pairs} * tiles));
    const int rest = static_cast<int>(index - int64_t{section} * p.section_pairs * tiles);
    const int in_section = min(p.section_pairs, pairs - section * p.section_pairs);
    const int pair = section * p.section_pairs + rest % in_section;
    tile->sequence = pair / p.num_kv_heads;
    tile->kv_head = pair % p.num_kv_heads;
    tile->token_begin = (tiles - 1 - rest / in_section) * p.tile_tokens;
    tile->seqlen_q = p.seqlen_q;
    tile->seqlen_k = p.seqlen_k;
    tile->first_query = tile->first_key = 0;
    tile->valid = true;
    return;
  }
  // Ragged queries: the sequence whose tiles include this one.
  const int warp_lane = threadIdx.x % 32;
  int64_t before = 0;
  for (int first = 0; first < p.num_sequences; first += 32) {
    const int sequence = first + warp_lane;
    int32_t begin = 0, count = 0;
    if (sequence < p.num_sequences) {
      begin = p.cu_seqlens_q[sequence];
      count = p.cu_seqlens_q[sequence + 1] - begin;
    }
    if (count * p.group <= p.narrow_rows) count = 0;
    int32_t tiles = (count + p.tile_tokens - 1) / p.tile_tokens * p.num_kv_heads;
    int32_t sum = tiles;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int32_t other = __shfl_up_sync(~0u, sum, step);
      if (warp_lane >= step) sum += other;
    }
    const uint32_t found = __ballot_sync(~0u, before + sum > index);
    if (found != 0) {
      const int owner = __ffs(found) - 1;
      const int rest = static_cast<int>(index - before) - __shfl_sync(~0u, sum - tiles, owner);
      tiles = __shfl_sync(~0u, tiles, owner) / p.num_kv_heads;
      tile->sequence = first + owner;
      tile->first_query = __shfl_sync(~0u, begin, owner);
      tile->seqlen_q = __shfl_sync(~0u, count, owner);
      tile->first_key = p.seq_lens != nullptr ? 0 : p.cu_seqlens_k[tile->sequence];
      tile->seqlen_k = p.seq_lens != nullptr ? p.seq_lens[tile->sequence]
                                             : p.cu_seqlens_k[tile->sequence + 1] - tile->first_key;
      tile->kv_head = rest % p.num_kv_heads;
      tile->token_begin = (tiles - 1 - rest / p.num_kv_heads) * p.tile_tokens;
      tile->valid = true;
      return;
    }
    before += __shfl_sync(~0u, sum, 31);
  }
}

// -------------------------------------------------------------------------------------- producer

template <class Traits>
struct Producer {
  const PrefillParams& p;
  const CUtensorMap* q_map;
  const CUtensorMap* k_map;
  const CUtensorMap* v_map;
  PrefillShared<Traits>& shared;
  Ring<Traits::kQueryStages> query = {};
  Ring<Traits::kQueryStages + 1> slot = {};
  Ring<Traits::kStages> stage = {};

  // Copies one tile's Q, K and V, or tells the consumers that there is no more work.
  __device__ void copy(const PrefillTile& tile) {
    constexpr int kN = Traits::kN;
    const bool leader = threadIdx.x == 0;
    auto& q_full = shared.q_full[query.index];
    shared.q_empty[query.index].wait(query.phase ^ 1);
    if (leader) shared.tiles[slot.index] = tile;
    if (!tile.valid) {
      if (leader) q_full.arrive();
      return;
    }
    if (leader) {
      q_full.arrive_expect(p.tile_tokens * p.group * Traits::kHeadDim *
                           sizeof(typename Traits::Element));
      const int outer = p.cu_seqlens_q != nullptr ? 0 : tile.sequence;
#pragma unroll
      for (int slab = 0; slab < Traits::kHeadDim / kSlab; ++slab) {
        tma_load(shared.q[query.index] + slab * Traits::kM * kSlab, q_map, &q_full, slab * kSlab,
                 tile.kv_head * p.group, tile.first_query + tile.token_begin, outer);
      }
    }
    query.next();
    slot.next();
    const KeyBlocks blocks = key_blocks<kN>(p, tile);
    for (int block = blocks.end - 1; block >= blocks.begin; --block) {
      const Place place = find(tile, block * kN);
      const int i = stage.index;
      shared.k_empty[i].wait(stage.phase ^ 1);
      if (leader) shared.k_full[i].arrive_expect(sizeof(shared.k[0]));
      __syncwarp();
      copy_keys<Traits::kHeadDim>(k_map, shared.k[i], &shared.k_full[i], tile, place);
      shared.v_empty[i].wait(stage.phase ^ 1);
      if (leader) shared.v_full[i].arrive_expect(sizeof(shared.v[0]));
      __syncwarp();
      copy_keys<Traits::kValueDim>(v_map, shared.v[i], &shared.v_full[i], tile, place);
      stage.next();
    }
  }

  // What a lane copies of a block of keys: all of it, a page of it, or nothing.
  struct Place {
    int row;           // of the block of keys; negative: nothing
    int token, outer;  // in the tensor
  };

  __device__ Place find(const PrefillTile& tile, int key) const {
    const int lane = threadIdx.x;
    if (p.block_table == nullptr) {
      const int outer = p.cu_seqlens_q != nullptr ? 0 : tile.sequence;
      return {lane == 0 ? 0 : -1, tile.first_key + key, outer};
    }
    const int row = lane * p.page_tokens;
    if (row >= Traits::kN) return {-1, 0, 0};
    key += row;
    // Beyond the sequence the table may hold anything: a block that does not exist reads as zeros.
    int block = p.num_blocks;
    const int entry = key / p.block_size;
    if (key < tile.seqlen_k) {
      block = p.block_table[tile.sequence * p.table_sequence + entry * p.table_block];
    }
    return {row, key - entry * p.block_size, block};
  }

  template <int kDim>
  __device__ void copy_keys(const CUtensorMap* map, typename Traits::Element* to, Mbarrier* full,
                            const PrefillTile& tile, const Place& place) {
    if (place.row < 0) return;
#pragma unroll
    for (int slab = 0; slab < kDim / kSlab; ++slab) {
      tma_load(to + (slab * Traits::kN + place.row) * kSlab, map, full, slab * kSlab, place.token,
               tile.kv_head, place.outer);
    }
  }

  __device__ void run() {
    int64_t index = blockIdx.x;
    while (true) {
      PrefillTile tile;
      find_tile(p, index, &tile);
      // Asked for early: the answer takes a while.
      uint32_t taken = 0;
      if (threadIdx.x == 0 && tile.valid) taken = atomicAdd(p.tiles_taken, 1);
      copy(tile);
      if (!tile.valid) return;
      index = int64_t{gridDim.x} + __shfl_sync(~0u, taken, 0);
    }
  }
};

// -------------------------------------------------------------------------------------- consumer

// q and k are descriptors of the first 16 columns.
template <class T, int kN, int kM, int kHeadDim>
__device__ inline void multiply_q_k(float (&s)[kN / 2], uint64_t q, uint64_t k) {
#pragma unroll
  for (int step = 0; step < kHeadDim / 16; ++step) {
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
__device__ inline void clear_values(typename Traits::Element* v, int first, int barrier) {
  for (int i = first * 8 + threadIdx.x % 128; i < Traits::kN * 8; i += 128) {
#pragma unroll
    for (int slab = 0; slab < Traits::kValueDim / kSlab; ++slab) {
      *reinterpret_cast<uint4*>(v + slab * Traits::kN * kSlab + i * 8) = make_uint4(0, 0, 0, 0);
    }
  }
  fence_async_proxy();
  named_barrier_sync(barrier, 128);
}

// The same in all threads of a warp, and known to be.
__device__ inline int uniform(int x) {
  return __shfl_sync(~0u, x, 0);
}

template <class Traits>
__device__ void consume(const PrefillParams& p, PrefillShared<Traits>& shared) {
  using T = typename Traits::Element;
  constexpr int kM = Traits::kM, kN = Traits::kN;
  constexpr int kHeadDim = Traits::kHeadDim, kValueDim = Traits::kValueDim;
  const int group_index = uniform(threadIdx.x / 128) - 1;  // of the consumer warpgroups
  const ThreadRows mine(p, group_index * 64 + threadIdx.x / 32 % 4 * 16);
  const bool signals = mine.lane == 0;
  // Turns: barrier 1 + i lets warpgroup i issue its products.
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

  for (;; query.next(), slot.next()) {
    shared.q_full[query.index].wait(query.phase);
    // Read again where it is needed: registers are scarce.
    const PrefillTile& tile = shared.tiles[slot.index];
    if (!uniform(tile.valid)) break;
    KeyBlocks blocks = key_blocks<kN>(p, tile);
    blocks.begin = uniform(blocks.begin);
    blocks.end = uniform(blocks.end);
    RowState<kValueDim> rows;
    rows.start();

    auto& q_empty = shared.q_empty[query.index];
    if (blocks.begin >= blocks.end) {
      if (signals) q_empty.arrive();
    } else {
      float s[kN / 2];
      uint32_t probabilities[kN / 16][4];
      const uint64_t q = q_first + uniform(query.index) * int{sizeof(shared.q[0]) / 16};
      const auto softmax = [&](int block) {
        if constexpr (Traits::kSoftcap) rows.template cap<kN>(s, p);
        if (block < blocks.full_begin || block >= blocks.full_end) {
          rows.template mask<kN>(s, p, tile, mine, block * kN);
        }
        rows.template softmax<kN>(s, p.scale_log2);
      };
      int block = blocks.end - 1;
      shared.k_full[stage.index].wait(stage.phase);
      wgmma_fence();
      multiply_q_k<T, kN, kM, kHeadDim>(s, q, k_first + stage.index * kKeyStep);
      wgmma_commit();
      wgmma_wait<0>();
      wgmma_pin(s);
      if (signals) shared.k_empty[stage.index].arrive();
      softmax(block);
      shared.v_full[stage.index].wait(stage.phase);
      // Keys beyond a dense tensor's end arrive as zeros.
      if (p.cu_seqlens_q != nullptr && blocks.end * kN > uniform(tile.seqlen_k)) {
        clear_values<Traits>(shared.v[stage.index], tile.seqlen_k - block * kN,
                             1 + Traits::kConsumers + group_index);
      }
      pack_probabilities<T, kN>(s, probabilities);

      for (--block; block >= blocks.begin; --block) {
        const int value_stage = stage.index;
        stage.next();
        shared.k_full[stage.index].wait(stage.phase);
        named_barrier_sync(my_turn, 256);
        wgmma_pin(s);
        wgmma_pin(rows.o);
        wgmma_fence();
        multiply_q_k<T, kN, kM, kHeadDim>(s, q, k_first + stage.index * kKeyStep);
        wgmma_commit();
        multiply_p_v<T, kN, kValueDim>(rows.o, probabilities, v_first + value_stage * kValueStep);
        wgmma_commit();
        named_barrier_arrive(next_turn, 256);
        wgmma_wait<1>();
        wgmma_pin(s);
        if (signals) shared.k_empty[stage.index].arrive();
        softmax(block);
        // Values for the next product are waited for here, since this loop also keeps the
        // assembler from moving the softmax behind the wait for P V, where it would overlap with
        // nothing.
        wgmma_pin(s);
        shared.v_full[stage.index].wait(stage.phase);
        wgmma_wait<0>();
        wgmma_pin(rows.o);
        if (signals) shared.v_empty[value_stage].arrive();
        rows.rescale();
        pack_probabilities<T, kN>(s, probabilities);
      }
      if (signals) q_empty.arrive();
      wgmma_pin(rows.o);
      wgmma_fence();
      multiply_p_v<T, kN, kValueDim>(rows.o, probabilities, v_first + stage.index * kValueStep);
      wgmma_commit();
      wgmma_wait<0>();
      wgmma_pin(rows.o);
      if (signals) shared.v_empty[stage.index].arrive();
      stage.next();
    }
    const bool masked = blocks.begin < blocks.full_begin || blocks.end > blocks.full_end;
    rows.template finish<T>(p, tile, mine, masked);
  }
  // The turn that nobody takes: every arrival needs its match before the block ends.
  if (group_index == 0) named_barrier_sync(my_turn, 256);
}

// ---------------------------------------------------------------------------------------- kernel

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
