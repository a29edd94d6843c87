// Rows on their way into pages: the place of a slot, and quantization whose bits are those of an
// IEEE division. Shared by the kernels of this folder.
#pragma once

#include <cuda_fp8.h>

#include <cstdint>

#include "../indexing.h"
#include "../vectors.cuh"

namespace fastinfer::cuda {

enum class PageFormat : int { kElements, kInt8, kFp8 };

// ---- quantization

__host__ __device__ constexpr float limit_of(PageFormat format) {
  return format == PageFormat::kInt8 ? 127.0f : 448.0f;
}

__device__ inline float dynamic_scale(uint32_t largest, PageFormat format) {
  const float scale = __fdiv_rn(__uint_as_float(largest), limit_of(format));
  return scale == 0.0f ? 1.0f : scale;
}

// x / scale by multiplications, for the elements of one row.
//
// Where usable() holds, quotient(x) is the correctly rounded x / s (or, below 2^-12, something as
// small and of the same sign, which has the same code). Let u be one unit in the last place of
// q = x / s, and m the mantissa of s, in [1, 2).
//   - 1 - s low is a multiple of ulp(s) ulp(low) of at most 2^24 such units, so it is exact, and
//     low + rest is 1 / s but for 2^-45 of it. The first step rounds x low + x rest: beside that
//     rounding it errs by less than 2^-20 u, and |q1 - q| is at most (1/2 + 2^-20) u.
//   - q1 s - x is a multiple of ulp(q1) ulp(s), again at most 2^24 of them: exact. The relative
//     error of `nearest` is at most m 2^-25, so before its rounding the second step, q1 minus the
//     product of both, errs by less than (1 + 2^-18) m 2^-26 u. Half-way points h of the result
//     have h s - x != 0, at least u ulp(s) / 2, so |h - q| >= 2^-24 u / m. The error is smaller,
//     and the rounding goes the right way, if m^2 (1 + 2^-18) < 4: for all but the last few
//     mantissas, of which 256 are left out.
// The range of s keeps all these numbers, for |q| from 2^-12 to 2^30, far from under- and overflow.
struct RowDivision {
  float scale;
  float nearest;  // 1 / scale
  float low;      // rounded down, and what is missing: neither is negative
  float rest;

  __device__ static RowDivision by(float s) {
    const float low = __frcp_rd(s);
    return {s, __frcp_rn(s), low, __fmul_rn(__fmaf_rn(-s, low, 1.0f), low)};
  }

  // For a row, or a part of it, whose largest magnitude has these bits; false if there is a NaN.
  __device__ bool usable(uint32_t largest) const {
    return scale >= 0x1p-80f && scale <= 0x1p80f &&
           (__float_as_uint(scale) & 0x7fffffu) < 0x7fff00u && largest_quotient(largest) <= 0x1p30f;
  }

  // But for its rounding.
  __device__ float largest_quotient(uint32_t largest) const {
    return __fmul_rn(__uint_as_float(largest), nearest);
  }

  // x = -0 gives -0: both terms of every sum are then -0.
  __device__ float quotient(float x) const {
    const float q = __fmaf_rn(x, low, __fmul_rn(x, rest));
    const float excess = __fmaf_rn(q, scale, -x);
    return __fmaf_rn(-excess, nearest, q);
  }
};

// 1.5 * 2^23: added to |x| < 2^22, it rounds to an integer, held in the low bits.
constexpr float kRoundingMagic = 12582912.0f;

// The codes of four quotients, the first in the lowest byte; in int8 of magnitudes up to 127.
template <PageFormat kFormat>
__device__ inline uint32_t encode_four(const float (&q)[4]) {
  if constexpr (kFormat == PageFormat::kInt8) {
    uint32_t code[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) code[e] = __float_as_uint(__fadd_rn(q[e], kRoundingMagic));
    return __byte_perm(__byte_perm(code[0], code[1], 0x0040), __byte_perm(code[2], code[3], 0x0040),
                       0x5410);
  } else {
    const uint32_t low =
        __nv_cvt_float2_to_fp8x2(make_float2(q[0], q[1]), __NV_SATFINITE, __NV_E4M3);
    const uint32_t high =
        __nv_cvt_float2_to_fp8x2(make_float2(q[2], q[3]), __NV_SATFINITE, __NV_E4M3);
    return low | high << 16;
  }
}

// The code of any element under any scale. NaN becomes 0 in int8, and in fp8 the NaN 0x7f.
template <PageFormat kFormat>
__device__ inline uint32_t encode_any(float x, float scale) {
  const float q = __fdiv_rn(x, scale);
  if constexpr (kFormat == PageFormat::kInt8) {
    const float clamped = fminf(fmaxf(q, -127.0f), 127.0f);
    return isnan(q) ? 0 : __float_as_uint(__fadd_rn(clamped, kRoundingMagic)) & 0xff;
  } else {
    if (isnan(q)) return 0x7f;
    return __nv_cvt_float_to_fp8(q, __NV_SATFINITE, __NV_E4M3);
  }
}

// The codes of a thread's part of a row, in words of four. `largest` is that of the part or more.
template <PageFormat kFormat, int kPacks, class T>
__device__ inline void quantize(const Pack<T>* x, float scale, uint32_t largest, uint32_t* words) {
  constexpr int kSize = Pack<T>::kSize;
  const RowDivision division = RowDivision::by(scale);
  // One loop for each case: the common one does not step over what the others need.
  const auto encode = [&](auto word_of) {
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      float values[kSize];
      unpack(x[i], values);
#pragma unroll
      for (int e = 0; e < kSize; e += 4) words[(i * kSize + e) / 4] = word_of(values + e);
    }
  };
  const auto divided = [&](const float* four, bool clamped) {
    float q[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      q[j] = division.quotient(four[j]);
      if (clamped) q[j] = fminf(fmaxf(q[j], -127.0f), 127.0f);
    }
    return encode_four<kFormat>(q);
  };
  if (!division.usable(largest)) {
    encode([&](const float* four) {
      uint32_t word = 0;
#pragma unroll
      for (int j = 0; j < 4; ++j) word |= encode_any<kFormat>(four[j], scale) << 8 * j;
      return word;
    });
  } else if (kFormat == PageFormat::kInt8 && division.largest_quotient(largest) > 127.25f) {
    // Under a scale of the row's own nothing is beyond the limit, but for what rounding takes back.
    encode([&](const float* four) { return divided(four, true); });
  } else {
    encode([&](const float* four) { return divided(four, false); });
  }
}

// ---- places

// The pages of K, or of V, and their scales. Strides are in elements.
struct PageSide {
  void* cache;  // [num_blocks, Hk, block_size, dim]: elements, or bytes if quantized
  int64_t cache_block_stride;
  int64_t cache_head_stride;
  int64_t cache_slot_stride;
  float* scale;  // [num_blocks, Hk, block_size], written; [Hk], read; null if not quantized
  int64_t scale_block_stride;
  int64_t scale_head_stride;
  int64_t scale_slot_stride;
  PageFormat format;
  bool scale_is_dynamic;
};

// The first element of a head's row in the cache.
__device__ inline int64_t element_at(const PageSide& side, int32_t block, int32_t offset,
                                     int32_t head) {
  return block * side.cache_block_stride + offset * side.cache_slot_stride +
         head * side.cache_head_stride;
}

// The scale of a head's row.
__device__ inline float* scale_at(const PageSide& side, int32_t block, int32_t offset,
                                  int32_t head) {
  return side.scale + block * side.scale_block_stride + offset * side.scale_slot_stride +
         head * side.scale_head_stride;
}

}  // namespace fastinfer::cuda
