// CPU: the contents of an attention problem (lengths, block tables), and its plan.
#pragma once

#include <vector>

#include "../checks/attention.h"

namespace fastinfer::cpu {

// The lengths of every sequence, read from wherever the problem keeps them, and checked.
struct AttentionLengths {
  std::vector<int32_t> q_begin;  // [B + 1]
  std::vector<int32_t> keys;     // [B]

  int64_t count() const { return static_cast<int64_t>(keys.size()); }
  int64_t queries(int64_t b) const { return q_begin[b + 1] - q_begin[b]; }
};

// Both refuse, with ValueError, contents that disagree with the shapes or exceed the declared
// maxima.
AttentionLengths read_lengths(const AttentionProblem& p);
void check_block_table(const AttentionProblem& p, const AttentionLengths& lengths);

struct AttentionPlan {
  PlanHeader header;
  std::vector<PlanItem> items;
};

// A header without the counts that planning finds.
PlanHeader plan_header(const AttentionProblem& p, const AttentionLengths& lengths);

// Fills the header's counts. Pieces are cut so that `threads` threads get about equal work.
AttentionPlan make_plan(const PlanHeader& header, const AttentionLengths& lengths, int64_t threads);

// `rows` is the tensor [plan_rows, 8].
void write_plan(const AttentionPlan& plan, int32_t* rows, int64_t num_rows);
// Refuses a plan that was not made for the problem `expected` describes.
AttentionPlan read_plan(const char* op, const PlanHeader& expected, const AttentionLengths& lengths,
                        const int32_t* rows, int64_t num_rows);

}  // namespace fastinfer::cpu
