// Which tiles a block of the prefill kernel takes, and which keys they need.
#pragma once

#include <cstdint>

#include "prefill_isolated.cuh"
#include "prefill_params.h"

namespace fastinfer::cuda {

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

// The same in all threads of a warp, and known to be.
__device__ inline int uniform(int x) {
  return __shfl_sync(~0u, x, 0);
}

// The tile of an index, by which blocks take them: first their own number, then the next one that
// nobody has. Sequences and heads come in sections whose keys and values fit the L2 cache together,
// and in a section the tiles that see most keys come first, so that blocks end together. Run by a
// whole warp.
__device__ inline void find_tile(const PrefillParams& p, int64_t index, PrefillTile* tile) {
  tile->index = static_cast<int32_t>(index);
  tile->careful = false;
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
    if (int64_t{count} * p.group <= p.narrow_rows) count = 0;
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

}  // namespace fastinfer::cuda
