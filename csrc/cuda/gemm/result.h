// The result of a product, as kernels are told of it.
#pragma once

#include <cstdint>

#include "../../activation.h"

namespace fastinfer::cuda {

enum class FloatFormat : int { kFloat, kBf16, kFp16 };
enum class OutFormat : int { kFloat, kBf16, kFp16, kFp8, kInt8 };

struct ResultParams {
  const void* bias;  // [N] or null
  FloatFormat bias_format;
  Activation activation;
  bool gated;            // out = act(y[:, :columns]) * y[:, columns:]
  const void* residual;  // [M, columns] or null; may be out
  FloatFormat residual_format;
  int64_t residual_row_stride;
  const float* out_scale;  // of results in 8 bits
  void* out;               // [M, columns]
  int64_t out_row_stride;
  OutFormat out_format;
  int32_t columns;     // N, or N / 2 if gated
  bool plain;          // y itself, in 16 bits
  bool light;          // in 16 bits, without a residual and without the gelu of erf
  bool out_in_eights;  // columns a multiple of 8 and rows of out aligned to 16 bytes
};

}  // namespace fastinfer::cuda
