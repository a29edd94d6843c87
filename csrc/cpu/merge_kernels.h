#pragma once

#include <cstdint>

#include "isa.h"

namespace fastinfer::cpu {

// Results of `splits` disjoint sets of keys, and where their merged rows go. A row is one query
// token and head of a sequence. Strides are in elements.
struct MergeArgs {
  const void* outs;    // [splits, sequences, tokens, heads, value_dim]
  const float* lses;   // [splits, sequences, heads, tokens]
  void* out;           // [sequences, tokens, heads, value_dim]
  float* lse;          // [sequences, heads, tokens]
  const float* sinks;  // [heads] or null
  int64_t splits, tokens, heads, value_dim;
  int64_t outs_split, outs_sequence, outs_token, outs_head;
  int64_t lses_split, lses_sequence, lses_token, lses_head;
  int64_t out_sequence, out_token, out_head;
  int64_t lse_sequence, lse_token, lse_head;
};

// Rows [begin, end), counted over sequences, tokens, heads.
using MergeFunction = void (*)(const MergeArgs& args, int64_t begin, int64_t end);

// Indexed by the merged row's element type: fp32, bf16, fp16.
struct MergeKernels {
  MergeFunction from_same[3];  // from results of the same type
  MergeFunction from_fp32[3];
};

FI_ISA_TABLE(MergeKernels, merge_kernels)

}  // namespace fastinfer::cpu
