// CPU: runs a checked attention problem. Shared by the dense, the ragged and the paged op.
#pragma once

#include "attention_plan.h"

namespace fastinfer::cpu {

// `workspace` holds plan.header.num_partial_rows unmerged rows; it may be null if there are none.
void run_attention(const AttentionProblem& p, const AttentionLengths& lengths,
                   const AttentionPlan& plan, float* workspace);

}  // namespace fastinfer::cpu
