// The decode and the extend kernel for the op that calls them: attention of a plan's narrow items,
// or of wide ones.
#pragma once

#include <cuda_runtime.h>

#include "../../checks/attention.h"

namespace fastinfer::cuda {

// Whether they take the problem's narrow items, and whether it takes the wide ones. It
// depends on shapes, strides and alignment alone.
bool decode_supports(const AttentionProblem& p);
bool decode_supports_wide(const AttentionProblem& p);

// Attends to the wide or to the narrow items of a plan, on the current device. What the plan cut
// goes to the workspace (plan_workspace_floats) and is left to run_split_merge.
void run_decode(const AttentionProblem& p, const int32_t* plan, int64_t plan_rows, float* workspace,
                bool wide, int32_t device_index, cudaStream_t stream);

}  // namespace fastinfer::cuda
