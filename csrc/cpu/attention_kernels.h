#pragma once

#include <cstdint>

#include "isa.h"

namespace fastinfer::cpu {

// Keys of one step of the online softmax. Steps begin at multiples of it, counted from a sequence's
// key 0, so that a row's arithmetic is the same wherever its piece of keys begins.
constexpr int64_t kKeyTile = 128;
// With batch_invariant every row is cut at multiples of this many keys, and the parts are merged in
// order.
constexpr int64_t kInvariantSplit = 512;

// Query tokens of a tile, which packs the `group` query heads of a KV head: its rows share the
// packed keys and values. More rows mean less packing, until they leave the second-level cache.
constexpr int64_t kMaxTileRows = 192;
constexpr int64_t attention_tile_tokens(int64_t group) {
  return group >= kMaxTileRows ? 1 : kMaxTileRows / group;
}

// Formats of keys and values. Queries have all but int8, outputs the first three.
enum ElementFormat { kFp32, kBf16, kFp16, kInt8, kFp8E4m3, kNumFormats };

// Strides are in elements, and offsets 64-bit.
struct KvSource {
  const void* data;
  int format;            // ElementFormat
  int64_t outer_stride;  // from block to block
  int64_t token_stride;
  int64_t head_stride;
  const float* scale;  // value = scale * stored; null: 1
  int64_t scale_outer_stride;
  int64_t scale_token_stride;
  int64_t scale_head_stride;
};

// What all work items of a call share.
struct AttentionArgs {
  int64_t group;
  int64_t num_heads;
  int64_t head_dim;
  int64_t value_dim;
  float scale;
  float softcap;         // 0: off
  int64_t window_left;   // -1: unlimited
  int64_t window_right;  // -1: unlimited; 0 when causal
  bool batch_invariant;
  int64_t q_token_stride;
  int64_t q_head_stride;
  int q_format;          // ElementFormat
  const float* q_scale;  // [num_heads] or null
  KvSource k;
  KvSource v;
  int64_t block_size;  // 0: a sequence's tokens are token_stride apart throughout
  int64_t block_table_stride;
  int64_t out_token_stride;
  int64_t out_head_stride;
  int64_t lse_head_stride;  // tokens are 1 apart
  const float* sinks;       // [num_heads] or null
};

// Query tokens [q_begin, q_begin + q_count) of a sequence and the heads of one KV head, against
// keys [k_begin, k_end).
struct AttentionWork {
  int64_t num_queries;  // of the sequence
  int64_t num_keys;
  int64_t q_begin;
  int64_t q_count;
  int64_t k_begin;
  int64_t k_end;
  int64_t kv_head;
  const void* q;     // the sequence's token 0, head 0
  int64_t k_offset;  // of the sequence's key 0, if there are no blocks
  int64_t v_offset;
  const int32_t* block_table;  // the sequence's blocks, or null
  const int64_t* tree_mask;    // of the sequence's token 0, or null
  // Either the result, at the sequence's token 0 ...
  void* out;
  float* lse;
  // ... or, if not null, where to leave an unmerged one: [q_count, num_heads, value_dim] and
  // [q_count, num_heads].
  float* partial_out;
  float* partial_lse;
};

struct AttentionKernels {
  // Indexed by the element type of out: fp32, bf16, fp16.
  void (*attend[3])(const AttentionArgs& args, const AttentionWork& work, float* scratch);
  // How many floats of scratch space, aligned to 64 bytes, a work item of a call needs.
  int64_t (*scratch_floats)(const AttentionArgs& args);
};

FI_ISA_TABLE(AttentionKernels, attention_kernels)

}  // namespace fastinfer::cpu
