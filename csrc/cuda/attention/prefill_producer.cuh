// The prefill kernel's first warp: it copies what the others compute with.
#pragma once

#include <cstdint>

#include "../ptx/tma.h"
#include "../ring.cuh"
#include "prefill_schedule.cuh"
#include "prefill_traits.cuh"

namespace fastinfer::cuda {

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
  int32_t first_failed = -1;

  // Notes the slot's tile for a second time if rows of it failed. Run by the leader.
  __device__ void collect(int i) {
    if (shared.failed[i] == 0) return;
    shared.failed[i] = 0;
    const int32_t index = shared.tiles[i].index;
    p.next_failed[index] = first_failed;
    first_failed = index;
  }

  // Copies one tile's Q, K and V, or tells the consumers that there is no more work.
  __device__ void copy(const PrefillTile& tile) {
    constexpr int kN = Traits::kN;
    const bool leader = threadIdx.x == 0;
    auto& q_full = shared.q_full[query.index];
    shared.q_empty[query.index].wait(query.phase ^ 1);
    if (leader) {
      collect(slot.index);
      shared.tiles[slot.index] = tile;
      if (!tile.valid) q_full.arrive();
    }
    if (leader && tile.valid) {
      q_full.arrive_expect(p.tile_tokens * p.group * Traits::kKeySlabs * 128);
      const int outer = p.cu_seqlens_q != nullptr ? 0 : tile.sequence;
#pragma unroll
      for (int slab = 0; slab < Traits::kKeySlabs; ++slab) {
        tma_load(shared.q[query.index] + slab * Traits::kM * Traits::kKeySlab, q_map, &q_full,
                 slab * Traits::kKeySlab, tile.kv_head * p.group,
                 tile.first_query + tile.token_begin, outer);
      }
    }
    query.next();
    slot.next();
    if (!tile.valid) return;
    const KeyBlocks blocks = key_blocks<kN>(p, tile);
    for (int block = blocks.end - 1; block >= blocks.begin; --block) {
      const Place place = find(tile, block * kN);
      const int i = stage.index;
      shared.k_empty[i].wait(stage.phase ^ 1);
      if (leader) shared.k_full[i].arrive_expect(sizeof(shared.k[0]));
      __syncwarp();
      copy_keys<Traits::kKeySlabs>(k_map, shared.k[i], &shared.k_full[i], tile, place);
      shared.v_empty[i].wait(stage.phase ^ 1);
      if (leader) shared.v_full[i].arrive_expect(sizeof(shared.v[0]));
      __syncwarp();
      copy_keys<Traits::kValueSlabs>(v_map, shared.v[i], &shared.v_full[i], tile, place);
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

  template <int kSlabs, class T>
  __device__ void copy_keys(const CUtensorMap* map, T* to, Mbarrier* full, const PrefillTile& tile,
                            const Place& place) {
    constexpr int kSlab = 128 / sizeof(T);
    if (place.row < 0) return;
#pragma unroll
    for (int slab = 0; slab < kSlabs; ++slab) {
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
      if (!tile.valid) break;
      copy(tile);
      index = int64_t{gridDim.x} + __shfl_sync(~0u, taken, 0);
    }
    run_failed();
  }

  // Once more, carefully, the tiles that failed.
  __device__ void run_failed() {
    // The consumers give back what stands for the end when they are done with all tiles before it.
    auto& drained = shared.q_empty[query.index];
    const uint32_t phase = query.phase;
    copy({});
    drained.wait(phase);
    if (threadIdx.x == 0) {
      for (int i = 0; i <= Traits::kQueryStages; ++i) collect(i);
    }
    for (int32_t index = uniform(first_failed); index >= 0;) {
      PrefillTile tile;
      find_tile(p, index, &tile);
      tile.careful = true;
      copy(tile);
      int32_t next = 0;
      if (threadIdx.x == 0) next = p.next_failed[index];
      index = uniform(next);
    }
    copy({});
  }
};

}  // namespace fastinfer::cuda
