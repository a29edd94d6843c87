// Results of scaled products.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "low_bit_scales.cuh"
#include "scaled_mm.h"

namespace fastinfer::cuda {

__device__ inline void store_result(const ScaledMmParams& p, float value, int64_t row, int32_t n) {
  if (p.bias != nullptr) value += load_scalar(p.bias, p.bias_format, n);
  const int64_t at = row * p.out_row_stride + n;
  switch (p.out_format) {
    case ScaleFormat::kFloat: static_cast<float*>(p.out)[at] = value; break;
    case ScaleFormat::kBf16:
      static_cast<__nv_bfloat16*>(p.out)[at] = __float2bfloat16(value);
      break;
    default: static_cast<__half*>(p.out)[at] = __float2half(value); break;
  }
}

}  // namespace fastinfer::cuda
