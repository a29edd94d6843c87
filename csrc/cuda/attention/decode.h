// The decode kernel for the op that calls it: attention of a plan's narrow items.
#pragma once

#include <cuda_runtime.h>

#include "../../checks/attention.h"

namespace fastinfer::cuda {

// Whether the kernel takes the problem. It depends on shapes, strides and alignment alone.
bool decode_supports(const AttentionProblem& p);

// Attends to the narrow items of a plan, on the current device. What the plan cut goes to the
// workspace (plan_workspace_floats) and is left to run_split_merge.
void run_decode(const AttentionProblem& p, const int32_t* plan, int64_t plan_rows, float* workspace,
                int32_t device_index, cudaStream_t stream);

}  // namespace fastinfer::cuda
