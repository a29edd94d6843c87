// The last step of split-KV: merging what a plan cut.
#pragma once

#include <cuda_runtime.h>

#include "../../checks/attention.h"

namespace fastinfer::cuda {

// Merges the unmerged results in the workspace into out and lse, on the current device, for bf16
// and fp16.
void run_split_merge(const AttentionProblem& p, const int32_t* plan, int64_t plan_rows,
                     const float* workspace, int32_t device_index, cudaStream_t stream);

}  // namespace fastinfer::cuda
