// How an attention plan is laid out: which pieces of which sequence's keys are attended to
// together, for all layers of a step.
//
// A plan is an int32 tensor [rows, 8]. Rows 0 and 1 are the header, the next `num_items` rows are
// work items, the rest is zero:
//
//   row 0: magic, num_items, num_partial_rows, num_sequences, total_q, num_heads, num_kv_heads,
//     batch_invariant
//   row 1: max_seqlen_q, max_seqlen_k, window_left, window_right (0 when causal), lengths digest
//     (low, high), and on a GPU the number of wide items and of tiles that are cut
//   item: sequence, q_begin, q_count, k_begin, k_end, partial_row, split, num_splits
//
// An item is `q_count` query tokens of one sequence, from its token `q_begin` on, against its keys
// [k_begin, k_end), for every KV head. The key range covers what the tokens can see and may be
// larger. With num_splits > 1 the item leaves an unmerged result for its tokens in rows
// [partial_row, partial_row + q_count) of the scratch space, and the rows of split 1, 2, ... follow
// those of split 0, so that whoever merges needs only the item of split 0. With num_splits == 1
// partial_row is -1.
//
// Every size here is a function of shapes and declared maxima, never of the lengths: a captured
// step keeps its plan buffer. fastinfer/ops/attention.py computes the same sizes.
#pragma once

#include <algorithm>
#include <cstdint>

namespace fastinfer {

constexpr int32_t kPlanMagic = 0x46493031;  // "FI01": the layout above
constexpr int64_t kPlanColumns = 8;
constexpr int64_t kPlanHeaderRows = 2;

// A tile is the query tokens of an item times the query heads that share a KV head; no planner
// makes tiles of fewer rows.
constexpr int64_t kPlanMinTileRows = 16;
// No planner cuts keys into pieces shorter than this, except for the first and last piece of a
// range...
constexpr int64_t kPlanMinSplit = 256;
// ... and none leaves more unmerged token rows than this.
constexpr int64_t kPlanMaxPartialRows = 1024;

struct PlanHeader {
  int32_t magic, num_items, num_partial_rows, num_sequences, total_q, num_heads, num_kv_heads,
      batch_invariant;
  int32_t max_seqlen_q, max_seqlen_k, window_left, window_right, lengths_low, lengths_high,
      reserved[2];
};
static_assert(sizeof(PlanHeader) == kPlanHeaderRows * kPlanColumns * sizeof(int32_t));

struct PlanItem {
  int32_t sequence, q_begin, q_count, k_begin, k_end, partial_row, split, num_splits;
};
static_assert(sizeof(PlanItem) == kPlanColumns * sizeof(int32_t));

// The most token rows that a plan leaves unmerged.
inline int64_t plan_partial_rows(int64_t total_q, int64_t max_seqlen_k) {
  const int64_t splits = (max_seqlen_k + kPlanMinSplit - 1) / kPlanMinSplit;
  return std::min(kPlanMaxPartialRows, total_q * splits);
}

// Rows of the plan tensor.
inline int64_t plan_rows(int64_t num_sequences, int64_t total_q, int64_t num_heads,
                         int64_t num_kv_heads, int64_t max_seqlen_k) {
  const int64_t tile_tokens = std::max<int64_t>(1, kPlanMinTileRows / (num_heads / num_kv_heads));
  return kPlanHeaderRows + total_q / tile_tokens + num_sequences +
         plan_partial_rows(total_q, max_seqlen_k);
}

// Floats that unmerged results take: out [rows, H, Dv], then lse [rows, H].
inline int64_t plan_workspace_floats(int64_t partial_rows, int64_t num_heads, int64_t value_dim) {
  return partial_rows * num_heads * (value_dim + 1);
}

}  // namespace fastinfer
