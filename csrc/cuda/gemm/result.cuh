// What follows a product: bias, activation, gate, residual and the format of the result, all of it
// in fp32 (see checks/epilogue.h).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "../ptx/convert.h"
#include "floats.cuh"
#include "result.h"

namespace fastinfer::cuda {

// x sigmoid(s), right in both tails.
__device__ inline float times_sigmoid(float x, float s) {
  const float e = expf(-fabsf(s));
  return x * (s < 0.0f ? e : 1.0f) / (1.0f + e);
}

__device__ inline float activate(Activation activation, float x) {
  switch (activation) {
    case Activation::kNone: return x;
    case Activation::kSilu: return times_sigmoid(x, x);
    case Activation::kGeluTanh:
      return times_sigmoid(x, 1.5957691216057308f * x * (1.0f + 0.044715f * x * x));
    default: return 0.5f * x * erfcf(-0.70710678118654752f * x);
  }
}

// The same for ResultParams::light, with approximate exponentials and quotients.
__device__ inline float activate_lightly(Activation activation, float x) {
  const float gelu = 1.5957691216057308f * x * (1.0f + 0.044715f * x * x);
  const float s = activation == Activation::kSilu ? x : gelu;
  const float e = ptx::exp2(-1.4426950408889634f * fabsf(s));
  const float sigmoid = (s < 0.0f ? e : 1.0f) * ptx::reciprocal(1.0f + e);
  return activation == Activation::kNone ? x : x * sigmoid;
}

__device__ inline float biased(const ResultParams& r, float sum, int32_t feature) {
  return r.bias == nullptr ? sum : sum + load_scalar(r.bias, r.bias_format, feature);
}

// What is left to do with a whole row's and column's value.
__device__ inline void store_finished(const ResultParams& r, float h, int64_t row, int32_t column) {
  if (r.residual != nullptr) {
    h += load_scalar(r.residual, r.residual_format, row * r.residual_row_stride + column);
  }
  const int64_t at = row * r.out_row_stride + column;
  switch (r.out_format) {
    case OutFormat::kFloat: static_cast<float*>(r.out)[at] = h; break;
    case OutFormat::kBf16: static_cast<__nv_bfloat16*>(r.out)[at] = __float2bfloat16(h); break;
    case OutFormat::kFp16: static_cast<__half*>(r.out)[at] = __float2half(h); break;
    case OutFormat::kFp8: {
      const float scaled = __fdiv_rn(h, *r.out_scale);
      static_cast<uint8_t*>(r.out)[at] =
          isnan(scaled) ? 0x7f : __nv_cvt_float_to_fp8(scaled, __NV_SATFINITE, __NV_E4M3);
      break;
    }
    default: {
      const float scaled = __fdiv_rn(h, *r.out_scale);
      const float clamped = fminf(fmaxf(scaled, -127.0f), 127.0f);
      static_cast<int8_t*>(r.out)[at] =
          isnan(scaled) ? 0 : static_cast<int8_t>(__float2int_rn(clamped));
    }
  }
}

// A sum that is no gate.
__device__ inline void store_sum(const ResultParams& r, float sum, int64_t row, int32_t feature) {
  store_finished(r, activate(r.activation, biased(r, sum, feature)), row, feature);
}

// Those of a row and column whose y, without bias, is `load(second)`; of gates the second is what
// they multiply.
template <class Load>
__device__ inline void finish_one(const ResultParams& r, int64_t row, int32_t column, Load load) {
  float h = activate(r.activation, biased(r, load(false), column));
  if (r.gated) h *= biased(r, load(true), column + r.columns);
  store_finished(r, h, row, column);
}

// The same for eight columns of a light result, which has them in eights: `load(second, eight)`.
template <class Load>
__device__ inline void finish_eight(const ResultParams& r, int64_t row, int32_t column, Load load) {
  float values[8];
  load(false, values);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    values[i] = activate_lightly(r.activation, biased(r, values[i], column + i));
  }
  if (r.gated) {
    float others[8];
    load(true, others);
#pragma unroll
    for (int i = 0; i < 8; ++i) values[i] *= biased(r, others[i], column + i + r.columns);
  }
  const bool bf16 = r.out_format == OutFormat::kBf16;
  uint32_t pairs[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float first = values[2 * i], second = values[2 * i + 1];
    pairs[i] = bf16 ? ptx::pack<true>(first, second) : ptx::pack<false>(first, second);
  }
  uint16_t* to = static_cast<uint16_t*>(r.out) + row * r.out_row_stride + column;
  *reinterpret_cast<uint4*>(to) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
}

}  // namespace fastinfer::cuda
