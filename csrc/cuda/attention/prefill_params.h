// What the prefill kernel is told. Strides in elements.
#pragma once

#include <cstdint>

namespace fastinfer::cuda {

struct PrefillStrides {
  int64_t outer;  // sequences, or blocks of pages; 0 in ragged tensors
  int64_t token;
  int64_t head;
};

struct PrefillParams {
  // The matrices themselves, for rows that are computed one by one (prefill_isolated.cuh).
  const void* q;  // [B, Sq, H, D] or [total_q, H, D]
  const void* k;  // [B, Sk, Hk, D], [total_k, Hk, D] or [num_blocks, Hk, block_size, D]
  const void* v;  // as k, with Dv
  void* out;      // [B, Sq, H, Dv] or [total_q, H, Dv]
  float* lse;     // [B, H, Sq] or [H, total_q]
  PrefillStrides q_strides, k_strides, v_strides, out_strides;
  int64_t lse_outer, lse_head;

  const int32_t* cu_seqlens_q;  // [B + 1], or null: dense
  const int32_t* cu_seqlens_k;  // [B + 1], or null: not ragged
  const int32_t* seq_lens;      // [B], or null: not paged
  const int32_t* block_table;   // [B, max_blocks], or null
  int64_t table_sequence, table_block;
  const float* sinks;                        // [H] or null
  const float *q_scale, *k_scale, *v_scale;  // of e4m3: [H], [Hk] and [Hk], or null: 1

  int32_t num_sequences;
  int32_t num_kv_heads;
  int32_t group;        // query heads of a KV head
  int32_t tile_tokens;  // query tokens of a tile: kM / group
  int32_t head_dim;
  int32_t value_dim;
  int32_t window_left;   // -1: unlimited
  int32_t window_right;  // -1: unlimited; 0 when causal

  // Pages.
  int32_t num_blocks, block_size;
  int32_t page_tokens;  // keys of a page that are copied at once: they lie in one block
  int32_t narrow_rows;  // sequences of at most so many rows are another kernel's; 0: none

  // Dense problems; num_tiles is an upper bound for ragged ones.
  int32_t seqlen_q, seqlen_k;
  int32_t tiles_per_sequence;
  int32_t section_pairs;  // (sequence, KV head) pairs whose keys and values share the cache
  int64_t num_tiles;
  uint32_t* tiles_taken;  // beyond each block's first; starts at 0
  int32_t* next_failed;   // [num_tiles]: of a block's tiles to be computed again, as a list

  float scale_log2;    // of a score in the exponent of 2: scale * log2(e); 1 with softcap
  float softcap_log2;  // softcap * log2(e)
  float cap_scale;     // scale / softcap
};

}  // namespace fastinfer::cuda
