// A warp and the tiles of its group: products by mma.sync, with rows in the registers of quads.
// Bytes are decoded to fp16 in registers:
//
// - Keys: ldmatrix gives a lane four neighbouring bytes of a key: head dimensions are in the order
//   of query_offset. An int8 key has an offset (kKeyOffset).
// - Values: ldmatrix transposes pairs of bytes, so a register holds two neighbouring columns of two
//   keys; the even columns of 16 make one tile of a product and the odd ones the next.
#pragma once

#include "../ptx/ldmatrix.h"
#include "../ptx/mma.h"
#include "decode_hidden.cuh"
#include "decode_rows.cuh"
#include "decode_traits.cuh"

namespace fastinfer::cuda {

// Column of element i (0 or 1) of a lane's pair in tile `tile` of the result.
template <class T>
__device__ inline int value_column(int tile, int i) {
  const int c = threadIdx.x % 4;
  return T::kByteV ? tile / 2 * 16 + 4 * c + 2 * i + tile % 2 : tile * 8 + 2 * c + i;
}

// Where a lane begins to load rows of q, from row `row` on.
template <class T>
__device__ inline uint32_t query_address(uint32_t q, int row) {
  const int lane = threadIdx.x % 32;
  return q + swizzled<T::kHeadDim * 2>(row + lane % 16, lane / 16);
}

// 16 rows of q by head dimensions [16 step, 16 step + 16), as the first operand of a product.
__device__ inline void load_query(uint32_t (&a)[4], uint32_t address, int step) {
  ptx::ldmatrix_x4(a, chunk_address(address, step * 2));
}

template <class T>
using Scores = float[T::kRowTiles][T::kKeyTiles][4];

// s = start + q k^T. Element [i][n][2 h + j] of a lane is row 16 i + 8 h + lane / 4, key 8 n + 2
// (lane % 4) + j. `start(i, h)` is the same for all keys, `query(a, i, step)` gives the first
// operand.
template <class T, class Start, class Query>
__device__ inline void multiply_keys(Scores<T>& s, uint32_t k, const Start& start,
                                     const Query& query) {
  constexpr bool kBf16 = T::kKFormat == KvFormat::kBf16;
  const int lane = threadIdx.x % 32;
  float starts[T::kRowTiles][4];
#pragma unroll
  for (int i = 0; i < T::kRowTiles; ++i) {
#pragma unroll
    for (int e = 0; e < 4; ++e) starts[i][e] = start(i, e / 2);
  }
  const uint32_t first = T::kByteK
                             ? k + swizzled<T::kKPitch>(lane, 0)
                             : k + swizzled<T::kKPitch>(lane % 8 + lane / 16 * 8, lane / 8 % 2);
#pragma unroll
  for (int step = 0; step < T::kHeadDim / 16; ++step) {
    uint32_t a[T::kRowTiles][4];
#pragma unroll
    for (int i = 0; i < T::kRowTiles; ++i) query(a[i], i, step);
    if constexpr (T::kByteK) {
      uint32_t b[4];
      ptx::ldmatrix_x4(b, chunk_address(first, step));
#pragma unroll
      for (int n = 0; n < T::kKeyTiles; ++n) {
        uint32_t b0, b1;
        decode_keys<T::kKFormat>(b[n], b0, b1);
#pragma unroll
        for (int i = 0; i < T::kRowTiles; ++i) {
          ptx::mma_m16n8k16<kBf16>(s[i][n], a[i], b0, b1, step == 0 ? starts[i] : s[i][n]);
        }
      }
    } else {
#pragma unroll
      for (int n = 0; n < T::kKeyTiles; n += 2) {
        uint32_t b[4];
        ptx::ldmatrix_x4(b, chunk_address(first, step * 2) + n * 8 * T::kKPitch);
#pragma unroll
        for (int i = 0; i < T::kRowTiles; ++i) {
          ptx::mma_m16n8k16<kBf16>(s[i][n], a[i], b[0], b[1], step == 0 ? starts[i] : s[i][n]);
          ptx::mma_m16n8k16<kBf16>(s[i][n + 1], a[i], b[2], b[3],
                                   step == 0 ? starts[i] : s[i][n + 1]);
        }
      }
    }
  }
}

// acc += p v. Element [i][n][2 h + j] of acc is row 16 i + 8 h + lane / 4, column value_column(n,
// j).
template <class T>
__device__ inline void multiply_values(float (&acc)[T::kRowTiles][T::kValueTiles][4],
                                       const Scores<T>& p, uint32_t v) {
  constexpr bool kBf16 = T::kVFormat == KvFormat::kBf16;
  const int lane = threadIdx.x % 32;
  uint32_t a[T::kRowTiles][T::kKeys / 16][4];
#pragma unroll
  for (int i = 0; i < T::kRowTiles; ++i) {
#pragma unroll
    for (int step = 0; step < T::kKeys / 16; ++step) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float (&pair)[4] = p[i][step * 2 + e / 2];
        a[i][step][e] = ptx::pack<kBf16>(pair[e % 2 * 2], pair[e % 2 * 2 + 1]);
      }
    }
  }
  const uint32_t first = T::kByteV ? v + swizzled<T::kVPitch>(lane, 0)
                                   : v + swizzled<T::kVPitch>(lane % 16, lane / 16);
#pragma unroll
  for (int n = 0; n < T::kValueTiles; n += 2) {
    if constexpr (T::kByteV) {
      uint32_t b[4], even[4], odd[4];
      ptx::ldmatrix_x4_trans(b, chunk_address(first, n / 2));
#pragma unroll
      for (int e = 0; e < 4; ++e) decode_values<T::kVFormat>(b[e], even[e], odd[e]);
#pragma unroll
      for (int step = 0; step < 2; ++step) {
#pragma unroll
        for (int i = 0; i < T::kRowTiles; ++i) {
          const auto& x = a[i][step];
          ptx::mma_m16n8k16<kBf16>(acc[i][n], x, even[step * 2], even[step * 2 + 1], acc[i][n]);
          ptx::mma_m16n8k16<kBf16>(acc[i][n + 1], x, odd[step * 2], odd[step * 2 + 1],
                                   acc[i][n + 1]);
        }
      }
    } else {
#pragma unroll
      for (int step = 0; step < T::kKeys / 16; ++step) {
        uint32_t b[4];
        ptx::ldmatrix_x4_trans(b, chunk_address(first, n) + step * 16 * T::kVPitch);
#pragma unroll
        for (int i = 0; i < T::kRowTiles; ++i) {
          ptx::mma_m16n8k16<kBf16>(acc[i][n], a[i][step], b[0], b[1], acc[i][n]);
          ptx::mma_m16n8k16<kBf16>(acc[i][n + 1], a[i][step], b[2], b[3], acc[i][n + 1]);
        }
      }
    }
  }
}

// A warp's running softmax over the tiles of its group.
template <class T>
struct WarpState {
  const int group, member;  // its rows begin with kWarpRows * member
  float acc[T::kRowTiles][T::kValueTiles][4];
  float base[T::kRowTiles][2];   // subtracted from scores: the highest so far, or kSlack less
  float total[T::kRowTiles][2];  // this lane's share of the sum
  // Byte values: acc is divided by 2^(exponent - kByteExponent), so that the probabilities, times
  // the values' scales, fill the range of fp16. Scales seen so far are below 2^(exponent - 126).
  int exponent = kLeastExponent;
  uint32_t q;  // address of the rows
  uint32_t kept[T::kKeepQuery ? T::kHeadDim / 16 : 1][4];

  __device__ WarpState(DecodeSmem<T>& smem, int group, int member) : group(group), member(member) {
    q = query_address<T>(ptx::shared_address(smem.q), member * T::kWarpRows);
    if constexpr (T::kKeepQuery) {
#pragma unroll
      for (int step = 0; step < T::kHeadDim / 16; ++step) load_query(kept[step], q, step);
    }
#pragma unroll
    for (int i = 0; i < T::kRowTiles; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        base[i][h] = -kInfinity;
        total[i][h] = 0.0f;
      }
#pragma unroll
      for (int n = 0; n < T::kValueTiles; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) acc[i][n][e] = 0.0f;
      }
    }
  }

  __device__ int row(int i, int h) const {
    return member * T::kWarpRows + i * 16 + h * 8 + threadIdx.x % 32 / 4;
  }
  __device__ void multiply_row(int i, int h, float by) {
#pragma unroll
    for (int n = 0; n < T::kValueTiles; ++n) {
      acc[i][n][2 * h] *= by;
      acc[i][n][2 * h + 1] *= by;
    }
  }

  // Takes the tile of keys [begin, begin + kKeys) that lies in a stage of the group's ring.
  __device__ void take_tile(const DecodeParams& p, DecodeSmem<T>& smem, const DecodeUnit& unit,
                            int stage, int begin);

  __device__ void write_stats(DecodeSmem<T>& smem) {
#pragma unroll
    for (int i = 0; i < T::kRowTiles; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float sum = total[i][h];
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
        if (threadIdx.x % 4 == 0) smem.stats[group][0][row(i, h)] = {base[i][h], sum};
      }
    }
  }
  __device__ void weigh(const DecodeSmem<T>& smem) {
    const float unit = T::kByteV ? power_of_two(exponent - kByteExponent) : 1.0f;
#pragma unroll
    for (int i = 0; i < T::kRowTiles; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) multiply_row(i, h, smem.weights[group][row(i, h)] * unit);
    }
  }
  // Columns [first, first + kSlice) of the group's result.
  __device__ void write_slice(DecodeSmem<T>& smem, int first) const {
#pragma unroll
    for (int n = 0; n < T::kValueTiles; ++n) {
      // The loop is over registers, so it is unrolled and takes its part of each slice.
      if (n * 8 / T::kSlice * T::kSlice != first) continue;
#pragma unroll
      for (int i = 0; i < T::kRowTiles; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          smem.parts[group][row(i, e / 2)][value_column<T>(n, e % 2) - first] = acc[i][n][e];
        }
      }
    }
  }
};

template <class T>
__device__ inline void WarpState<T>::take_tile(const DecodeParams& p, DecodeSmem<T>& smem,
                                               const DecodeUnit& unit, int stage, int begin) {
  const int lane = threadIdx.x % 32;
  unsigned char* tile = smem.tiles[group][stage];
  unsigned char* values = tile + T::kKeys * T::kKPitch;
  const float* k_scales = smem.scales[group][stage][0];
  float* v_scales = smem.scales[group][stage][1];
  const DecodeRow* rows = smem.rows + row(0, 0);
  const auto query = [&](uint32_t (&to)[4], int i, int step) {
    if constexpr (T::kKeepQuery) {
#pragma unroll
      for (int e = 0; e < 4; ++e) to[e] = kept[step][e];
    } else {
      load_query(to, q + i * 16 * T::kHeadDim * 2, step);
    }
  };

  Scores<T> s;
  const auto start = [&](int i, int h) {
    return T::kKFormat == KvFormat::kInt8 ? smem.starts[row(i, h)] : 0.0f;
  };
  multiply_keys<T>(s, ptx::shared_address(tile), start, query);
  if constexpr (T::kByteK) {
#pragma unroll
    for (int n = 0; n < T::kKeyTiles; ++n) {
      const float2 scale = *reinterpret_cast<const float2*>(k_scales + n * 8 + lane % 4 * 2);
#pragma unroll
      for (int i = 0; i < T::kRowTiles; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) s[i][n][e] *= e % 2 == 0 ? scale.x : scale.y;
      }
    }
  }
  // What is left to do to scores, in base 2.
  float factors[T::kRowTiles][2];
#pragma unroll
  for (int i = 0; i < T::kRowTiles; ++i) {
#pragma unroll
    for (int h = 0; h < 2; ++h) factors[i][h] = smem.factors[row(i, h)];
  }
  if (p.softcap > 0.0f) {
#pragma unroll
    for (int i = 0; i < T::kRowTiles; ++i) {
#pragma unroll
      for (int n = 0; n < T::kKeyTiles; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) s[i][n][e] = tanh_accurate(s[i][n][e] * factors[i][e / 2]);
      }
      factors[i][0] = factors[i][1] = p.softcap * kLog2e;
    }
  }

  const bool whole = begin >= unit.all_low && begin + T::kKeys <= unit.all_high;
  if (!whole) {
    // Bit 2 n + j: the row sees the lane's key j of tile n. Rolled up: this is rare and would be
    // most of the kernel.
    uint32_t visible[T::kRowTiles][2] = {};
#pragma unroll 1
    for (int at = 0; at < T::kKeyTiles * 2; ++at) {
      const int key = begin + at / 2 * 8 + lane % 4 * 2 + at % 2;
#pragma unroll
      for (int i = 0; i < T::kRowTiles; ++i) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          if (is_visible(p, unit, rows[i * 16 + h * 8], key)) visible[i][h] |= 1u << at;
        }
      }
    }
#pragma unroll
    for (int i = 0; i < T::kRowTiles; ++i) {
#pragma unroll
      for (int n = 0; n < T::kKeyTiles; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if ((visible[i][e / 2] >> (2 * n + e % 2) & 1) == 0) s[i][n][e] = -kInfinity;
        }
      }
    }
    if (rows_differ<T>(unit, begin)) {
      clear_spoiled_keys<T>(values, v_scales, group, member, [&](int key) {
#pragma unroll
        for (int i = 0; i < T::kRowTiles; ++i) {
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            if (is_visible(p, unit, rows[i * 16 + h * 8], begin + key)) multiply_row(i, h, kNan);
          }
        }
      });
    }
  }

  float v_factor = 1.0f, v_ratio = 1.0f;
  if constexpr (T::kByteV) {
    const int before = exponent;
    exponent = max(before, scale_exponent<T>(v_scales));
    v_ratio = power_of_two(before - exponent);
    v_factor = power_of_two(kByteExponent - exponent);
  }

  // What was accumulated under a much smaller score (or a smaller scale) shrinks.
  float shrink[T::kRowTiles][2];
  bool shrinks = v_ratio != 1.0f;
#pragma unroll
  for (int i = 0; i < T::kRowTiles; ++i) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float highest = fmaxf(s[i][0][2 * h], s[i][0][2 * h + 1]);
#pragma unroll
      for (int n = 1; n < T::kKeyTiles; ++n) {
        highest = fmaxf(highest, fmaxf(s[i][n][2 * h], s[i][n][2 * h + 1]));
      }
      highest = fmaxf(highest, __shfl_xor_sync(0xffffffffu, highest, 1));
      highest = fmaxf(highest, __shfl_xor_sync(0xffffffffu, highest, 2)) * factors[i][h];
      if (fabsf(highest) > kExactBase) {
#pragma unroll
        for (int n = 0; n < T::kKeyTiles; ++n) {
          s[i][n][2 * h] *= factors[i][h];
          s[i][n][2 * h + 1] *= factors[i][h];
        }
        factors[i][h] = 1.0f;
      }
      const float before = base[i][h];
      const bool grows = highest - before > kSlack;  // exactly, however large they are
      if (grows) base[i][h] = highest;
      shrinks |= grows;
      shrink[i][h] = grows ? ptx::exp2(before - highest) : 1.0f;
    }
  }
  if (__any_sync(0xffffffffu, shrinks)) {
#pragma unroll
    for (int i = 0; i < T::kRowTiles; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        total[i][h] *= shrink[i][h];
        multiply_row(i, h, shrink[i][h] * v_ratio);
      }
    }
  }
#pragma unroll
  for (int n = 0; n < T::kKeyTiles; ++n) {
    float2 scale = {1.0f, 1.0f};
    if constexpr (T::kByteV) {
      scale = *reinterpret_cast<const float2*>(v_scales + n * 8 + lane % 4 * 2);
      scale = {scale.x * v_factor, scale.y * v_factor};
    }
#pragma unroll
    for (int i = 0; i < T::kRowTiles; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float subtracted = softmax_base(base[i][e / 2]);
        const float x = ptx::exp2(fmaf(s[i][n][e], factors[i][e / 2], -subtracted));
        total[i][e / 2] += x;
        s[i][n][e] = x * (e % 2 == 0 ? scale.x : scale.y);
      }
    }
  }
  multiply_values<T>(acc, s, ptx::shared_address(values));
}

}  // namespace fastinfer::cuda
