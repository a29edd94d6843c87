// The prefill kernel for the ops that call it: long queries over 16-bit elements in any layout.
#pragma once

#include <cuda_runtime.h>

#include "../../checks/attention.h"

namespace fastinfer::cuda {

// Whether the kernel takes the problem; from shapes, strides, alignment and options alone.
bool prefill_supports(const AttentionProblem& p, int num_sms);

// Scratch that e4m3 values are rearranged into; 0 for other problems.
int64_t prefill_image_bytes(const AttentionProblem& p);

struct PrefillLaunch {
  int num_sms;
  uint32_t* counter;  // scratch of the launch
  uint8_t* value_images;  // likewise, of prefill_image_bytes
  cudaStream_t stream;
  int32_t narrow_rows = 0;  // of a paged step: sequences of at most so many rows are left out
};

// Launches it on the current device.
void run_prefill(const AttentionProblem& p, const PrefillLaunch& launch);

}  // namespace fastinfer::cuda
