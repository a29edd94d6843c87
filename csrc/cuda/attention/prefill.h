// The prefill kernel for the ops that call it: long queries over 16-bit elements in any layout, or
// over e4m3 without pages.
#pragma once

#include <cuda_runtime.h>

#include "../../checks/attention.h"

namespace fastinfer::cuda {

// Whether the kernel takes the problem; from shapes, strides, alignment and options alone.
bool prefill_supports(const AttentionProblem& p, int num_sms);

// Tiles of so many rows that a problem has; of a ragged one, an upper bound: each sequence ends
// with a partial tile.
inline int64_t prefill_tiles(const AttentionProblem& p, int64_t tile_rows) {
  const int64_t tokens = tile_rows / (p.num_heads / p.num_kv_heads);
  const int64_t tiles = p.layout == AttentionLayout::kDense
                            ? (p.max_seqlen_q + tokens - 1) / tokens * p.num_sequences
                            : p.total_q / tokens + p.num_sequences;
  return tiles * p.num_kv_heads;
}

// Scratch of a launch, in words of 4 bytes.
int64_t prefill_scratch_words(const AttentionProblem& p);

// Scratch for e4m3 values as bf16, in elements; 0 for other problems.
int64_t prefill_value_elements(const AttentionProblem& p);

struct PrefillLaunch {
  int32_t device;  // the current one
  int num_sms;
  uint32_t* scratch;  // of prefill_scratch_words
  void* values;       // of prefill_value_elements
  cudaStream_t stream;
  int32_t narrow_rows = 0;  // of a paged step: sequences of at most so many rows are left out
};

void run_prefill(const AttentionProblem& p, const PrefillLaunch& launch);

}  // namespace fastinfer::cuda
