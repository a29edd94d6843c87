// The rows of a unit: what they see, and q on its way to shared memory.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cfloat>
#include <climits>

#include "../ptx/async_proxy.h"
#include "../ptx/lane_id.h"
#include "decode_bytes.cuh"
#include "decode_unit.cuh"
#include "scores.cuh"

namespace fastinfer::cuda {

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;
constexpr float kInfinity = __builtin_huge_valf();
constexpr float kNan = __builtin_nanf("");
// Scores may exceed what is subtracted from them by so much, in base 2, before a row is rescaled:
// probabilities stay far from the largest fp16 number, and few tiles have work for it.
constexpr float kSlack = 6.0f;
constexpr int kByteExponent = 135;  // 2^(135 - 126 + kSlack) and a little more is within fp16
constexpr int kLeastExponent = 27;  // of scales

__device__ inline float read_16bit(uint16_t bits, bool is_bf16) {
  return is_bf16 ? __uint_as_float(static_cast<uint32_t>(bits) << 16)
                 : __half2float(__ushort_as_half(bits));
}

__device__ inline uint16_t write_16bit(float value, bool is_bf16) {
  return is_bf16 ? __bfloat16_as_ushort(__float2bfloat16_rn(value))
                 : __half_as_ushort(__float2half_rn(value));
}

// 2^exponent, for exponents of normal numbers; 0 below.
__device__ inline float power_of_two(int exponent) {
  return __uint_as_float(static_cast<uint32_t>(max(exponent + 127, 0)) << 23);
}

// A row that has seen nothing has the base -inf; subtracting it from -inf would be NaN.
__device__ inline float softmax_base(float base) {
  return base == -kInfinity ? 0.0f : base;
}

// Where head dimension d of a row of q lies. Next to bytes, dimensions of a group of 16 are in the
// order in which ldmatrix gives them to a lane: lane c of a quad has 4 c, 4 c + 1 | 4 c + 2, 4 c +
// 3 where it would have 2 c, 2 c + 1 | 2 c + 8, 2 c + 9.
template <class T>
__host__ __device__ inline int query_offset(int row, int d) {
  const int in16 = d % 16;
  const int place = T::kByteK ? in16 / 4 * 2 + in16 % 2 + in16 / 2 % 2 * 8 : in16;
  const int element = d - in16 + place;
  if constexpr (T::kByWarpgroup) {  // as wgmma reads it: 64 dimensions of all rows, then the next
    return element / 64 * T::kRows * 128 + swizzled<128>(row, element % 64 / 8) + element % 8 * 2;
  } else {
    return swizzled<T::kHeadDim * 2>(row, element / 8) + element % 8 * 2;
  }
}

// The exponent, as fp32 has it, of a tile's largest value scale. The same for all lanes.
template <class T>
__device__ inline int scale_exponent(const float* v_scales) {
  uint32_t largest = 0;
#pragma unroll
  for (int key = threadIdx.x % 32; key < T::kKeys; key += 32) {
    const float scale = fabsf(v_scales[key]);
    if (isfinite(scale)) largest = max(largest, __float_as_uint(scale));
  }
  return static_cast<int>(__reduce_max_sync(0xffffffffu, largest) >> 23);
}

// What there is to know about the rows of a unit, and q in the type of its product. bf16 becomes
// fp16 where keys are bytes: a power of two for each row keeps its largest element below 2^15. The
// sign of the softmax scale (or its being 0) goes into q, so that factors are positive.
template <class T>
__device__ inline void prepare_rows(const DecodeParams& p, typename T::Smem& smem,
                                    const DecodeUnit& unit) {
  constexpr int kWarpShare = (T::kRows + T::kWarps - 1) / T::kWarps;
  constexpr int kLaneShare = T::kHeadDim / 32;
  const int warp = threadIdx.x / 32, lane = ptx::lane_id();
  const int num_rows = unit.token_count * p.group;
  uint16_t elements[kWarpShare][kLaneShare];  // all loads before the first use
#pragma unroll
  for (int i = 0; i < kWarpShare; ++i) {
    const int row = i * T::kWarps + warp;
    const int64_t token = unit.first_token + unit.token_begin + row / p.group;
    const int64_t head = unit.kv_head * p.group + row % p.group;
    const uint16_t* q = p.q + token * p.q_token + head * p.q_head;
#pragma unroll
    for (int e = 0; e < kLaneShare; ++e) {
      const int d = e * 32 + lane;
      elements[i][e] = row < num_rows && d < p.head_dim ? q[d] : uint16_t{0};
    }
  }
  if (threadIdx.x < T::kRows) {
    const int row = threadIdx.x, token = unit.token_begin + row / p.group;
    DecodeRow& info = smem.rows[row];
    info.head = row < num_rows ? unit.kv_head * p.group + row % p.group : -1;
    info.low = INT_MIN;
    info.high = INT_MAX;
    info.tree = ~0ull;
    if (row < num_rows) {
      const int64_t at = unit.first_token + token;
      int position = unit.step_begin + token;
      if (p.tree_mask != nullptr) {
        info.tree = static_cast<unsigned long long>(p.tree_mask[at]);
        position = unit.step_begin + __popcll(info.tree) - 1;
      }
      if (p.window_left >= 0) info.low = position - p.window_left;
      if (p.window_right >= 0) info.high = position + p.window_right;
      if (unit.partial_row < 0) {
        info.out_at = at * p.out_token + info.head * p.out_head;
        info.lse_at = info.head * p.lse_head + at;
      } else {
        const int64_t partial = unit.partial_row + token - unit.token_begin;
        info.lse_at = partial * p.num_heads + info.head;
        info.out_at = info.lse_at * p.value_dim;
      }
    }
  }
  const float sign = p.scale == 0.0f ? 0.0f : p.scale < 0.0f ? -1.0f : 1.0f;
  const float scale = sign == 0.0f ? 1.0f : fabsf(p.scale);
  const float factor = p.softcap > 0.0f ? scale / p.softcap : scale * kLog2e;
#pragma unroll
  for (int i = 0; i < kWarpShare; ++i) {
    const int row = i * T::kWarps + warp;
    if (row >= T::kRows) break;
    int exponent = 0;
    if constexpr (T::kByteK) {
      float largest = 0.0f;
#pragma unroll
      for (int e = 0; e < kLaneShare; ++e) {
        largest = fmaxf(largest, fabsf(read_16bit(elements[i][e], p.is_bf16)));
      }
      const uint32_t bits = __reduce_max_sync(0xffffffffu, __float_as_uint(largest));
      // An infinite row stays what it is; so does a row of zeros.
      const int largest_exponent = static_cast<int>(bits >> 23) - 127;
      if (bits != 0 && largest_exponent < 128) exponent = max(largest_exponent - 14, -100);
    }
    float sum = 0.0f;
#pragma unroll
    for (int e = 0; e < kLaneShare; ++e) {
      uint16_t element = elements[i][e];
      if (T::kByteK || sign != 1.0f) {
        const float value = read_16bit(element, p.is_bf16) * (sign * power_of_two(-exponent));
        element = write_16bit(value, !T::kByteK && p.is_bf16);
        sum += read_16bit(element, !T::kByteK && p.is_bf16);
      }
      *reinterpret_cast<uint16_t*>(smem.q + query_offset<T>(row, e * 32 + lane)) = element;
    }
    float start = 0.0f, key_unit = 1.0f;
    if constexpr (T::kKFormat == KvFormat::kInt8) {
#pragma unroll
      for (int mask = 16; mask > 0; mask /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, mask);
      start = -kKeyOffset * kKeyUnit * sum;
      key_unit = kKeyUnit;
    }
    if (lane == 0) {
      // Not 0, whatever underflows: 0 times a hidden score, -inf, would be NaN.
      const float row_factor = factor * power_of_two(exponent) / key_unit;
      smem.factors[row] = row_factor == 0.0f ? FLT_MIN : row_factor;
      smem.starts[row] = start;
    }
  }
  if constexpr (T::kByWarpgroup) ptx::fence_async_proxy();
}

}  // namespace fastinfer::cuda
