// Elements whose float type is known at run time.
#pragma once

#include <cuda_fp16.h>

#include "result.h"

namespace fastinfer::cuda {

__device__ inline float half_to_float(uint16_t bits, FloatFormat format) {
  return format == FloatFormat::kBf16 ? __uint_as_float(uint32_t{bits} << 16)
                                      : __half2float(__ushort_as_half(bits));
}

__device__ inline float load_scalar(const void* values, FloatFormat format, int64_t i) {
  return format == FloatFormat::kFloat
             ? static_cast<const float*>(values)[i]
             : half_to_float(static_cast<const uint16_t*>(values)[i], format);
}

}  // namespace fastinfer::cuda
