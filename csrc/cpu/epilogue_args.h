#pragma once

#include <cstdint>

#include "../activation.h"

namespace fastinfer::cpu {

// Types of results: those of elements (fp32, bf16, fp16), and codes under a scale.
constexpr int kInt8Result = 3;
constexpr int kFp8Result = 4;

// out = act(y) + residual, or act(gate) * up + residual, [M, width].
struct EpilogueArgs {
  Activation activation;
  bool gated;            // y is [gate, up]
  int64_t width;         // of out
  const void* residual;  // [M, width] or null; may be out
  int residual_type;
  int64_t residual_row_stride;
  const float* out_scale;  // of codes
  void* out;
  int out_type;
  int64_t out_row_stride;
};

}  // namespace fastinfer::cpu
