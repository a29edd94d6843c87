// plan_attention on Hopper, and what a step's tiles are.
#pragma once

#include <cuda_runtime.h>

#include "../../checks/attention.h"
#include "../runtime.h"

namespace fastinfer::cuda {

// How many query tokens a tile of a step has. A sequence is narrow if its query tokens times the
// heads of a group are at most narrow_rows; `wide` is 0 where no sequence of the step can be wide.
struct AttentionTiles {
  int64_t narrow_rows;  // 16, 32 or 64
  int64_t narrow;
  int64_t wide;
};

constexpr int64_t kNarrowRows[] = {16, 32, 64};
constexpr int64_t kWideRows = 128;

// From what is declared about a step. With batch_invariant the border between narrow and wide does
// not depend on other sequences.
inline AttentionTiles choose_attention_tiles(int64_t max_seqlen_q, int64_t group,
                                             bool batch_invariant) {
  const int64_t rows = max_seqlen_q * group;
  const bool all_narrow = rows <= (batch_invariant ? kNarrowRows[0] : kNarrowRows[2]);
  int64_t narrow_rows = kNarrowRows[0];
  while (all_narrow && narrow_rows < rows) narrow_rows *= 2;
  return {narrow_rows, std::max<int64_t>(1, narrow_rows / group),
          all_narrow ? 0 : std::max<int64_t>(1, kWideRows / group)};
}

// Whether the kernel takes the problem: the bounds of all sequences lie in shared memory.
bool plan_supports(const AttentionProblem& p);

// Writes a plan of `rows` rows, as csrc/checks/attention_plan.h and
// triton_kernels/attention_plan.py describe it, on the current device.
void run_plan(const AttentionProblem& p, int32_t* plan, int64_t rows, int32_t device_index,
              cudaStream_t stream);

}  // namespace fastinfer::cuda
