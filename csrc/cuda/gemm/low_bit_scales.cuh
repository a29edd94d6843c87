// Scales and zeros of any float type.
#pragma once

#include <cuda_fp16.h>

#include "floats.cuh"
#include "low_bit_gemm.h"

namespace fastinfer::cuda {

// Four scales, or zeros, of neighbouring features, as they are stored.
struct FourScales {
  uint32_t words[4];
};

// `valid`: how many of them there are; `aligned`: whether four are one load.
__device__ inline FourScales load_four_scales(const void* scales, FloatFormat format, int64_t first,
                                              int valid, bool aligned) {
  FourScales four = {};
  const bool wide = format == FloatFormat::kFloat;
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

__device__ inline void to_floats(const FourScales& four, FloatFormat format, float (&values)[4]) {
  const auto each = [&](auto value) {
#pragma unroll
    for (int i = 0; i < 4; ++i) values[i] = value(i);
  };
  const auto half = [&](int i) { return static_cast<uint16_t>(four.words[i / 2] >> 16 * (i % 2)); };
  switch (format) {
    case FloatFormat::kFloat: return each([&](int i) { return __uint_as_float(four.words[i]); });
    case FloatFormat::kBf16:
      return each([&](int i) { return half_to_float(half(i), FloatFormat::kBf16); });
    default: return each([&](int i) { return half_to_float(half(i), FloatFormat::kFp16); });
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

}  // namespace fastinfer::cuda
