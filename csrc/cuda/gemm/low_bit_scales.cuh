// Scales, zeros and biases of any float type.
#pragma once

#include <cuda_fp16.h>

#include "low_bit_gemm.h"

namespace fastinfer::cuda {

// Four scales, or zeros, of neighbouring features, as they are stored.
struct FourScales {
  uint32_t words[4];
};

// `valid`: how many of them there are; `aligned`: whether four are one load.
__device__ inline FourScales load_four_scales(const void* scales, ScaleFormat format, int64_t first,
                                              int valid, bool aligned) {
  FourScales four = {};
  const bool wide = format == ScaleFormat::kFloat;
  const char* from = static_cast<const char*>(scales) + first * (wide ? 4 : 2);
  if (aligned && valid >= 4) {
    if (wide) {
      const uint4 words = *reinterpret_cast<const uint4*>(from);
      four = {words.x, words.y, words.z, words.w};
    } else {
      const uint2 words = *reinterpret_cast<const uint2*>(from);
      four = {words.x, words.y};
    }
    return four;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (i >= valid) continue;
    if (wide) {
      four.words[i] = reinterpret_cast<const uint32_t*>(from)[i];
    } else {
      four.words[i / 2] |= uint32_t{reinterpret_cast<const uint16_t*>(from)[i]} << 16 * (i % 2);
    }
  }
  return four;
}

__device__ inline float half_to_float(uint16_t bits, ScaleFormat format) {
  return format == ScaleFormat::kBf16 ? __uint_as_float(uint32_t{bits} << 16)
                                      : __half2float(__ushort_as_half(bits));
}

__device__ inline void to_floats(const FourScales& four, ScaleFormat format, float (&values)[4]) {
  const auto each = [&](auto value) {
#pragma unroll
    for (int i = 0; i < 4; ++i) values[i] = value(i);
  };
  const auto half = [&](int i) { return static_cast<uint16_t>(four.words[i / 2] >> 16 * (i % 2)); };
  switch (format) {
    case ScaleFormat::kFloat: return each([&](int i) { return __uint_as_float(four.words[i]); });
    case ScaleFormat::kBf16:
      return each([&](int i) { return half_to_float(half(i), ScaleFormat::kBf16); });
    default: return each([&](int i) { return half_to_float(half(i), ScaleFormat::kFp16); });
  }
}

// One as it is stored, in `size` bytes.
__device__ inline void copy_scalar(void* to, const void* from, int i, int size) {
  if (size == 4) {
    static_cast<uint32_t*>(to)[i] = static_cast<const uint32_t*>(from)[i];
  } else {
    static_cast<uint16_t*>(to)[i] = static_cast<const uint16_t*>(from)[i];
  }
}

__device__ inline float load_scalar(const void* values, ScaleFormat format, int64_t i) {
  return format == ScaleFormat::kFloat
             ? static_cast<const float*>(values)[i]
             : half_to_float(static_cast<const uint16_t*>(values)[i], format);
}

}  // namespace fastinfer::cuda
