// The two rows of a tile that a thread shares with the three others of its quad: running softmax,
// accumulator, result.
//
// wgmma's layout: of every eight columns a thread holds two, 2 * (lane % 4) and the next, of the
// rows lane / 4 and lane / 4 + 8 of its warp's 16: d[4 j + 2 r + e] is column 8 j + 2 (lane % 4) +
// e of its row r.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "../ptx/convert.h"
#include "prefill_isolated.cuh"
#include "prefill_params.h"
#include "scores.cuh"

namespace fastinfer::cuda {

template <class T>
constexpr bool kIsBf16 = false;
template <>
constexpr bool kIsBf16<__nv_bfloat16> = true;

// Scores of the accumulator's layout as A operands of 16 keys each.
template <class T, int kN>
__device__ inline void pack_probabilities(const float (&s)[kN / 2], uint32_t (&p)[kN / 16][4]) {
#pragma unroll
  for (int i = 0; i < kN / 16; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      p[i][j] = ptx::pack<kIsBf16<T>>(s[8 * i + 2 * j], s[8 * i + 2 * j + 1]);
      asm volatile("" : "+r"(p[i][j])::"memory");
    }
  }
}

__device__ inline float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ inline float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

// x[i] of a quad's thread t becomes x[t] of its thread i.
__device__ inline void quad_transpose(uint32_t (&x)[4]) {
#pragma unroll
  for (int bit = 1; bit <= 2; bit *= 2) {
    const bool upper = threadIdx.x & bit;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & bit) continue;
      uint32_t& low = x[i];
      uint32_t& high = x[i | bit];
      const uint32_t received = __shfl_xor_sync(~0u, upper ? low : high, bit);
      (upper ? low : high) = received;
    }
  }
}

// Which rows of every tile a thread has.
struct ThreadRows {
  int row;       // of the tile, and row + 8
  int token[2];  // of the tile that they belong to
  int lane;

  __device__ ThreadRows(const PrefillParams& p, int first_row) {
    lane = threadIdx.x % 32;
    row = first_row + lane / 4;
    token[0] = row / p.group;
    token[1] = (row + 8) / p.group;
  }

  __device__ int head(const PrefillParams& p, const PrefillTile& tile, int r) const {
    return tile.kv_head * p.group + row + 8 * r - token[r] * p.group;
  }
  __device__ bool exists(const PrefillParams& p, const PrefillTile& tile, int r) const {
    return token[r] < p.tile_tokens && tile.token_begin + token[r] < tile.seqlen_q;
  }
};

struct RowScales {
  float log2[2];  // of a score in the exponent of 2; > 0
  float value;    // of values
};

// The lse of a row that has to be computed again, a NaN that no computation gives.
constexpr uint32_t kFailedLse = 0x7fc0f1fa;

template <int kValueDim>
struct RowState {
  float o[kValueDim / 2];
  float base[2];   // in the exponent of 2, what o and sum are relative to; -inf: nothing seen yet
  float sum[2];    // of this thread's probabilities
  float alpha[2];  // what the last block's base makes of earlier sums

  // Rows that do not exist count as started, whatever their queries hold.
  __device__ void start(const PrefillParams& p, const PrefillTile& tile, const ThreadRows& mine) {
#pragma unroll
    for (int i = 0; i < kValueDim / 2; ++i) o[i] = 0.f;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      base[r] = mine.exists(p, tile, r) ? -INFINITY : 0.f;
      sum[r] = 0.f;
    }
  }

  // Whether a row's factor is none that may follow the maximum: zero, negative, not finite.
  __device__ bool read_scales(const PrefillParams& p, const PrefillTile& tile,
                              const ThreadRows& mine, RowScales* scales) const {
    bool unusual = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      scales->log2[r] = score_factor(p, tile.kv_head, mine.head(p, tile, r));
      unusual = unusual || !(scales->log2[r] > 0.f && scales->log2[r] < INFINITY);
    }
    if (p.v_scale != nullptr) scales->value = p.v_scale[tile.kv_head];
    unusual = __any_sync(~0u, unusual);
    if (unusual) scales->log2[0] = scales->log2[1] = 1.f;
    return unusual;
  }

  // Such factors, at once.
  template <int kN>
  __device__ static void scale(float (&s)[kN / 2], const PrefillParams& p, const PrefillTile& tile,
                               const ThreadRows& mine) {
    const float factor[2] = {score_factor(p, tile.kv_head, mine.head(p, tile, 0)),
                             score_factor(p, tile.kv_head, mine.head(p, tile, 1))};
#pragma unroll
    for (int i = 0; i < kN / 2; ++i) s[i] *= factor[i / 2 % 2];
  }

  template <int kN>
  __device__ static void cap(float (&s)[kN / 2], const PrefillParams& p) {
#pragma unroll
    for (int i = 0; i < kN / 2; ++i) s[i] = p.softcap_log2 * tanh_accurate(s[i] * p.cap_scale);
  }

  // -inf for keys that a row does not see, of the block that begins at key `first`.
  template <int kN>
  __device__ static void mask(float (&s)[kN / 2], const PrefillParams& p, const PrefillTile& tile,
                              const ThreadRows& mine, int32_t first) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const KeyRange seen = seen_keys(p, tile, tile.token_begin + mine.token[r]);
      const int32_t offset = first + mine.lane % 4 * 2;
      const int32_t from = seen.begin - offset, to = seen.end - offset;
      if (p.window_left < 0) {  // nearly always: half as many comparisons
#pragma unroll
        for (int j = 0; j < kN / 8; ++j) {
          if (8 * j >= to) s[4 * j + 2 * r] = -INFINITY;
          if (8 * j + 1 >= to) s[4 * j + 2 * r + 1] = -INFINITY;
        }
        continue;
      }
#pragma unroll
      for (int j = 0; j < kN / 8; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int column = 8 * j + e;
          if (column < from || column >= to) s[4 * j + 2 * r + e] = -INFINITY;
        }
      }
    }
  }

  // Scores become probabilities relative to the highest so far.
  //
  // Beyond kExactBase the rounding of a base shows in probabilities unless scores are rounded
  // alike. What follows a row's first blocks does not (`exponentials`), so there the row fails
  // (`fast`).
  template <int kN>
  __device__ void softmax(float (&s)[kN / 2], const RowScales& scales, bool fast) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float highest = fmaxf(s[2 * r], s[2 * r + 1]);
#pragma unroll
      for (int j = 1; j < kN / 8; ++j) {
        highest = fmaxf(highest, fmaxf(s[4 * j + 2 * r], s[4 * j + 2 * r + 1]));
      }
      const float now = fmaxf(base[r], quad_max(highest) * scales.log2[r]);
      // A row that has seen nothing keeps -inf; taking it from -inf would be NaN.
      const float finite = now == -INFINITY ? 0.f : now;
      alpha[r] = ptx::exp2(base[r] - finite);
      base[r] = now;
      float total = 0.f, factor = scales.log2[r];
      if (fabsf(finite) > kExactBase) {
        if (fast) total = INFINITY;
#pragma unroll
        for (int j = 0; j < kN / 8; ++j) {
          s[4 * j + 2 * r] *= factor;
          s[4 * j + 2 * r + 1] *= factor;
        }
        factor = 1.f;
      }
#pragma unroll
      for (int j = 0; j < kN / 8; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& x = s[4 * j + 2 * r + e];
          x = ptx::exp2(fmaf(x, factor, -finite));
          total += x;
        }
      }
      sum[r] = sum[r] * alpha[r] + total;
    }
  }

  // Scores kFrom to kTo of a thread become probabilities relative to the base that there is,
  // without looking for a higher one: 16-bit numbers have exponents to spare, and what overflows is
  // found in the end. See recenter and finish.
  template <int kFrom, int kTo, int kCount>
  __device__ void exponentials(float (&s)[kCount], const RowScales& scales) {
    float total[2][2] = {};
#pragma unroll
    for (int i = kFrom; i < kTo; ++i) {
      const int r = i / 2 % 2;
      s[i] = ptx::exp2(fmaf(s[i], scales.log2[r], -base[r]));
      total[r][i % 2] += s[i];
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) sum[r] += total[r][0] + total[r][1];
  }

  // Where sums have grown large, the base becomes higher and they become smaller, by a power of 2.
  // Of probabilities in bf16 that are not in o yet.
  template <int kSteps>
  __device__ void recenter(uint32_t (&probabilities)[kSteps][4]) {
    constexpr float kLarge = 1099511627776.f;  // 2^40
    const auto large = [](float x) { return x > kLarge && x < INFINITY; };
    if (!__any_sync(~0u, large(sum[0]) || large(sum[1]))) return;
    float factor[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float largest = quad_max(sum[r]);
      const int exponent = large(largest) ? min((__float_as_int(largest) >> 23) - 127, 126) : 0;
      factor[r] = __int_as_float((127 - exponent) << 23);
      base[r] += exponent;
      sum[r] *= factor[r];
    }
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const uint32_t pair = ptx::pack<true>(factor[j % 2], factor[j % 2]);
        probabilities[i][j] = ptx::mul_bf16x2(probabilities[i][j], pair);
      }
    }
#pragma unroll
    for (int i = 0; i < kValueDim / 2; ++i) o[i] *= factor[i / 2 % 2];
  }

  // Bases seldom change after the first blocks.
  __device__ void rescale() {
    if (!__any_sync(~0u, alpha[0] != 1.f || alpha[1] != 1.f)) return;
#pragma unroll
    for (int j = 0; j < kValueDim / 8; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) o[4 * j + i] *= alpha[i / 2];
    }
  }

  // Stores the rows.
  //
  // fast: `exponentials` made them, and what is not finite may have overflowed; such rows are not
  // stored, and true is returned. When the tile comes again, carefully, they alone are stored.
  // Otherwise, if some of the tile's keys are hidden from some of its rows (masked), 0 * NaN may
  // have reached rows that must not see it: those are computed again, each by itself.
  template <class T, class Out>
  __device__ bool finish(const PrefillParams& p, const PrefillTile& tile, const ThreadRows& mine,
                         const RowScales& scales, bool masked, bool fast) {
    const int lane = mine.lane;
    bool again[2] = {false, false}, failed[2] = {false, false};
    int64_t place[2];  // of the row in out
    bool real[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int head = mine.head(p, tile, r);
      real[r] = mine.exists(p, tile, r);
      const int64_t at = int64_t{tile.first_query} + tile.token_begin + mine.token[r];
      float* lse = p.lse + tile.sequence * p.lse_outer + head * p.lse_head + at;
      if (tile.careful) {
        uint32_t earlier = 0;
        if (real[r] && lane % 4 == 0) earlier = __float_as_uint(__ldcg(lse));
        real[r] = __shfl_sync(~0u, earlier, lane & ~3) == kFailedLse;
      }
      place[r] = tile.sequence * p.out_strides.outer + at * p.out_strides.token +
                 head * p.out_strides.head;
      const float total = quad_sum(sum[r]);
      const bool empty = total == 0.f;
      float denominator = total;
      if (p.sinks != nullptr && real[r]) {
        denominator += ptx::exp2(p.sinks[head] * 1.4426950408889634f - base[r]);
      }
      const float factor = empty ? 0.f : 1.f / denominator;
      const float value_factor = empty ? 1.f : scales.value;
      float probe = 0.f;  // NaN if an element is NaN or infinite
#pragma unroll
      for (int j = 0; j < kValueDim / 8; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& x = o[4 * j + 2 * r + e];
          x *= factor;
          probe = fmaf(x, 0.f, probe);
          x *= value_factor;
        }
      }
      const bool finite = probe == 0.f && (fast ? denominator : total) < INFINITY;
      again[r] = !fast && masked && real[r] && !finite;
      failed[r] = (__ballot_sync(~0u, fast && real[r] && !finite) >> (lane & ~3) & 15) != 0;
      if (real[r] && lane % 4 == 0) {
        *lse = failed[r] ? __uint_as_float(kFailedLse)
               : empty   ? -INFINITY
                         : base[r] * 0.6931471805599453f + logf(total);
      }
    }
    Out* out = static_cast<Out*>(p.out);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int j = 0; j < kValueDim / 8; j += 4) {
        uint32_t x[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          x[i] = ptx::pack<kIsBf16<Out>>(o[4 * (j + i) + 2 * r], o[4 * (j + i) + 2 * r + 1]);
        }
        quad_transpose(x);  // eight columns in a row: one store of 16 bytes
        const int column = 8 * (j + lane % 4);
        if (real[r] && !failed[r] && column < p.value_dim) {
          *reinterpret_cast<uint4*>(out + place[r] + column) = make_uint4(x[0], x[1], x[2], x[3]);
        }
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      uint32_t rows = __ballot_sync(~0u, again[r]);
      if (rows == 0) continue;
      __syncwarp();  // what was stored above is stored again
      for (int i = 0; i < 8; ++i, rows >>= 4) {
        if (rows & 15) isolated_row<T, Out>(p, tile, mine.row - lane / 4 + i + 8 * r, lane);
      }
    }
    return __any_sync(~0u, failed[0] || failed[1]);
  }
};

}  // namespace fastinfer::cuda
