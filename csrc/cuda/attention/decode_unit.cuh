// Units of work over pages, as the decode and the extend kernel take them, and how their tiles lie
// in shared memory.
#pragma once

#include "../../checks/attention_plan.h"
#include "../ptx/named_barrier.h"
#include "decode_params.cuh"

namespace fastinfer::cuda {

constexpr int kMaxSharedBytes = 227 * 1024;  // of a block, on compute capability 9.0

constexpr bool is_byte(KvFormat format) {
  return format == KvFormat::kInt8 || format == KvFormat::kFp8;
}

// Bytes that a row of `dim` elements takes in shared memory: whole 128-byte segments.
constexpr int row_pitch(int dim, KvFormat format) {
  return (dim * (is_byte(format) ? 1 : 2) + 127) / 128 * 128;
}

// Where 16-byte chunk `chunk` of row `row` lies: eight rows of one chunk fall into eight different
// groups of banks, which is what ldmatrix reads at once.
template <int kPitch>
__host__ __device__ constexpr int swizzled(int row, int chunk) {
  return row * kPitch + (chunk & ~7) * 16 + ((chunk ^ row) & 7) * 16;
}

// The address of chunk `first + chunk` of a row, from that of chunk `first` (0 or 1); `chunk` is
// even or `first` is 0. Rows lie on multiples of 128 bytes.
__device__ inline uint32_t chunk_address(uint32_t first, int chunk) {
  return (first ^ (chunk & 7) * 16) + (chunk & ~7) * 16;
}

// One piece of work: a plan's item, or some tokens of it, for one KV head.
struct DecodeUnit {
  const unsigned char *k, *v;      // the pages, at the unit's head
  const float *k_scale, *v_scale;  // likewise
  const int32_t* pages;            // the sequence's row of the block table
  int kv_head;
  int first_token, token_begin, token_count;  // of the sequence; of the unit, counted from it
  int partial_row;                            // -1: the result is final
  int step_begin;                             // position of the step's first token, may be < 0
  int low, high;                              // keys that some row sees
  int all_low, all_high;                      // keys that all rows see
};

// What the masks and the epilogue need of one row.
struct DecodeRow {
  int low, high;            // positions of the keys that windows let it see
  unsigned long long tree;  // bit j: it sees token j of its step
  int64_t out_at;           // element of out, or of partial_out
  int64_t lse_at;
  int head;  // -1: no such row
};

// Unit `index` of the items from `first_item` on: by item, then by part, then by KV head. The last
// parts of an item may have no tokens, and then no keys.
__device__ inline DecodeUnit read_unit(const DecodeParams& p, int first_item, int index) {
  DecodeUnit unit;
  const int part_of_item = index / p.num_kv_heads;
  unit.kv_head = index - part_of_item * p.num_kv_heads;
  unit.k = p.k.data + unit.kv_head * p.k.head;
  unit.v = p.v.data + unit.kv_head * p.v.head;
  unit.k_scale = p.k.scale + unit.kv_head * p.k.scale_head;
  unit.v_scale = p.v.scale + unit.kv_head * p.v.scale_head;
  const int64_t row = kPlanHeaderRows + first_item + part_of_item / p.parts;
  const int32_t* item = p.plan + row * kPlanColumns;
  const int sequence = item[0];
  unit.pages = p.block_table + sequence * p.table_sequence;
  const int skipped = part_of_item % p.parts * p.unit_tokens;  // of the item's tokens
  unit.token_begin = item[1] + skipped;
  unit.token_count = min(item[2] - skipped, p.unit_tokens);
  const int key_begin = item[3], key_end = item[4];
  unit.partial_row = item[5] < 0 ? -1 : item[5] + skipped;
  const int keys = p.seq_lens[sequence];
  unit.first_token = p.cu_seqlens_q[sequence];
  const int queries = p.cu_seqlens_q[sequence + 1] - unit.first_token;

  unit.step_begin = keys - queries;
  int low = key_begin, high = min(key_end, keys);
  // A tree's tokens stand anywhere between its first and its last, or one before with an empty
  // mask.
  const bool tree = p.tree_mask != nullptr;
  const int first_position = unit.step_begin + (tree ? -1 : unit.token_begin);
  const int last_position =
      unit.step_begin + (tree ? queries : unit.token_begin + unit.token_count) - 1;
  int all_low = low, all_high = tree ? min(high, unit.step_begin) : high;
  if (p.window_left >= 0) {
    low = max(low, first_position - p.window_left);
    all_low = max(low, last_position - p.window_left);
  }
  if (p.window_right >= 0) {
    high = min(high, last_position + p.window_right + 1);
    all_high = min(all_high, first_position + p.window_right + 1);
  }
  unit.low = max(low, 0);
  unit.high = high;
  // Nothing to see must be no tile either: a table has no entry beyond its sequence.
  if (unit.token_count <= 0 || unit.low >= high) unit.low = unit.high = 0;
  unit.all_low = max(all_low, unit.low);
  unit.all_high = min(all_high, unit.high);
  return unit;
}

// The units of a block: every gridDim.x-th, from its own number on.
struct BlockUnits {
  int first_item;  // of the plan
  int count;

  __device__ DecodeUnit read(const DecodeParams& p, int i) const {
    return read_unit(p, first_item, static_cast<int>(blockIdx.x + i * gridDim.x));
  }
};

__device__ inline BlockUnits block_units(const DecodeParams& p) {
  const int num_wide = p.plan[14], num_items = p.wide ? num_wide : p.plan[1] - num_wide;
  const int num_units = num_items * p.parts * p.num_kv_heads;
  const int block = blockIdx.x, blocks = gridDim.x;
  return {p.wide ? 0 : num_wide, block < num_units ? (num_units - 1 - block) / blocks + 1 : 0};
}

// The first key of the first tile of a group.
template <class T>
__device__ inline int first_tile(const DecodeUnit& unit, int group) {
  return (static_cast<unsigned>(unit.low) / T::kKeys + group) * T::kKeys;
}

// For the warps that take a tile together.
template <class T>
__device__ inline void group_barrier(int group) {
  if constexpr (T::kGroupWarps == 1) {
    __syncwarp();
  } else {
    ptx::named_barrier_sync(1 + group, T::kGroupWarps * 32);
  }
}

// For all warps that compute. Those that copy are no part of it.
template <class T>
__device__ inline void block_barrier() {
  if constexpr (T::kByWarpgroup) {
    ptx::named_barrier_sync(1 + T::kKeyGroups, T::kThreads);
  } else {
    __syncthreads();
  }
}

}  // namespace fastinfer::cuda
