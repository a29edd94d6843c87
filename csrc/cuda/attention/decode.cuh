// Attention of few query rows over a paged cache, as in decoding and in verifying a draft: the
// narrow items of a plan; and, in parts, the wide ones that the prefill kernel does not take.
//
// A persistent block takes units (an item for one KV head) in a fixed stride. The rows of a unit
// are its query tokens times the heads that share the KV head, so that keys and values are read
// once. Warps split the unit's keys: tile t is the work of group t % kKeyGroups, which has its own
// ring in shared memory, its own running softmax, and never waits for the others before the unit's
// end.
//
// Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018; Dao et al.,
// "Flash-Decoding for long-context inference", 2023.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cfloat>
#include <climits>

#include "../ptx/grid_dependency.h"
#include "../ptx/lane_id.h"
#include "decode_tile.cuh"
#include "scores.cuh"

namespace fastinfer::cuda {

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;
constexpr float kInfinity = __builtin_huge_valf();
// Scores may exceed what is subtracted from them by so much, in base 2, before a row is rescaled:
// probabilities stay far from the largest fp16 number, and few tiles have work for it.
constexpr float kSlack = 6.0f;
constexpr int kByteExponent = 135;  // 2^(135 - 126 + kSlack) and a little more is within fp16

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

// What there is to know about the rows of a unit, and q in the type of its product. bf16 becomes
// fp16 where keys are bytes: a power of two for each row keeps its largest element below 2^15. The
// sign of the softmax scale (or its being 0) goes into q, so that factors are positive.
template <class T>
__device__ inline void prepare_rows(const DecodeParams& p, DecodeSmem<T>& smem,
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
      smem.rows[row].factor = row_factor == 0.0f ? FLT_MIN : row_factor;
      smem.rows[row].start = start;
    }
  }
}

// Whether a row sees key `key` of its sequence.
__device__ inline bool is_visible(const DecodeParams& p, const DecodeUnit& unit,
                                  const DecodeRow& row, int key) {
  if (key < unit.low || key >= unit.high) return false;
  int position = key;
  if (p.tree_mask != nullptr) {
    const int own = key - unit.step_begin;  // which token of the step it is
    if (own >= 0) {
      if ((row.tree >> min(own, 63) & 1) == 0) return false;
      if (p.window_left >= 0 || p.window_right >= 0) {
        const int64_t mask = p.tree_mask[static_cast<int64_t>(unit.first_token) + own];
        position = unit.step_begin + __popcll(static_cast<unsigned long long>(mask)) - 1;
      }
    }
  }
  return position >= row.low && position <= row.high;
}

// A warp's running softmax over the tiles of its group.
template <class T>
struct DecodeState {
  float acc[T::kRowTiles][T::kValueTiles][4];
  float base[T::kRowTiles][2];   // subtracted from scores: the highest so far, or kSlack less
  float total[T::kRowTiles][2];  // this lane's share of the sum
  // Byte values: acc is divided by 2^(exponent - kByteExponent), so that the probabilities, times
  // the values' scales, fill the range of fp16. Scales seen so far are below 2^(exponent - 126).
  int exponent;

  __device__ void reset() {
    exponent = 27;
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
  __device__ void multiply_row(int i, int h, float by) {
#pragma unroll
    for (int n = 0; n < T::kValueTiles; ++n) {
      acc[i][n][2 * h] *= by;
      acc[i][n][2 * h + 1] *= by;
    }
  }
};

// Takes the tile of keys [begin, begin + kKeys) that lies in a stage of the group's ring.
template <class T, class Query>
__device__ inline void take_tile(const DecodeParams& p, DecodeSmem<T>& smem, const DecodeUnit& unit,
                                 int group, int row_group, int stage, int begin, const Query& query,
                                 DecodeState<T>& state) {
  const int lane = threadIdx.x % 32;
  unsigned char* tile = smem.tiles[group][stage];
  unsigned char* values = tile + T::kKeys * T::kKPitch;
  const float* k_scales = smem.scales[group][stage][0];
  float* v_scales = smem.scales[group][stage][1];
  const DecodeRow* rows = smem.rows + row_group * T::kWarpRows + lane / 4;

  Scores<T> s;
  const auto start = [&](int i, int h) {
    return T::kKFormat == KvFormat::kInt8 ? rows[i * 16 + h * 8].start : 0.0f;
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
    for (int h = 0; h < 2; ++h) factors[i][h] = rows[i * 16 + h * 8].factor;
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
    // 0 * NaN: a value that some rows see must not reach the others. A key with a NaN or an
    // infinity makes NaN of the rows that see it and is then taken as zero. Where all rows see the
    // same, what is hidden was loaded as zero.
    if (max(begin, unit.low) < unit.all_low || min(begin + T::kKeys, unit.high) > unit.all_high) {
      const uint32_t spoiled = spoiled_keys<T>(values, v_scales);
      group_barrier<T>(group);
#pragma unroll 1
      for (uint32_t left = spoiled; left != 0; left &= left - 1) {
        const int key = __ffs(left) - 1;
#pragma unroll
        for (int i = 0; i < T::kRowTiles; ++i) {
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            if (is_visible(p, unit, rows[i * 16 + h * 8], begin + key)) {
              state.multiply_row(i, h, __uint_as_float(0x7fffffffu));
            }
          }
        }
        if (row_group == 0) {
          for (int b = lane * 4; b < T::kVPitch; b += 128) {
            *reinterpret_cast<uint32_t*>(values + key * T::kVPitch + b) = 0;
          }
          if (T::kByteV && lane == 0) v_scales[key] = 0.0f;
        }
      }
      group_barrier<T>(group);
    }
  }

  float v_factor = 1.0f, v_ratio = 1.0f;
  if constexpr (T::kByteV) {
    const float scale = fabsf(v_scales[lane]);
    const uint32_t bits = isfinite(scale) ? __float_as_uint(scale) : 0;
    const int exponent =
        max(state.exponent, static_cast<int>(__reduce_max_sync(0xffffffffu, bits) >> 23));
    v_ratio = power_of_two(state.exponent - exponent);
    v_factor = power_of_two(kByteExponent - exponent);
    state.exponent = exponent;
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
      const float before = state.base[i][h];
      const bool grows = highest > before + kSlack;
      if (grows) state.base[i][h] = highest;
      shrinks |= grows;
      shrink[i][h] = grows ? ptx::exp2(before - highest) : 1.0f;
    }
  }
  if (__any_sync(0xffffffffu, shrinks)) {
#pragma unroll
    for (int i = 0; i < T::kRowTiles; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        state.total[i][h] *= shrink[i][h];
        state.multiply_row(i, h, shrink[i][h] * v_ratio);
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
        const float base = softmax_base(state.base[i][e / 2]);
        const float x = ptx::exp2(fmaf(s[i][n][e], factors[i][e / 2], -base));
        state.total[i][e / 2] += x;
        s[i][n][e] = x * (e % 2 == 0 ? scale.x : scale.y);
      }
    }
  }
  multiply_values<T>(state.acc, s, ptx::shared_address(values));
}

// Merges what the groups have of a unit and writes it.
template <class T>
__device__ inline void finish_unit(const DecodeParams& p, DecodeSmem<T>& smem,
                                   const DecodeUnit& unit, int group, int row_group,
                                   DecodeState<T>& state) {
  const int lane = threadIdx.x % 32;
  const int first_row = row_group * T::kWarpRows + lane / 4;
#pragma unroll
  for (int i = 0; i < T::kRowTiles; ++i) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float& total = state.total[i][h];
      total += __shfl_xor_sync(0xffffffffu, total, 1);
      total += __shfl_xor_sync(0xffffffffu, total, 2);
      if (lane % 4 == 0) {
        smem.stats[group][first_row + i * 16 + h * 8] = {state.base[i][h], total};
      }
    }
  }
  __syncthreads();
  const bool final = unit.partial_row < 0;
#pragma unroll
  for (int i = 0; i < T::kRowTiles; ++i) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = first_row + i * 16 + h * 8;
      float highest = -kInfinity, total = 0.0f;
#pragma unroll
      for (int g = 0; g < T::kKeyGroups; ++g) highest = fmaxf(highest, smem.stats[g][row].x);
      const float base = softmax_base(highest);
#pragma unroll
      for (int g = 0; g < T::kKeyGroups; ++g) {
        const float2 part = smem.stats[g][row];
        total += part.y * ptx::exp2(part.x - base);
      }
      const int head = smem.rows[row].head;
      const bool empty = total == 0.0f;
      if (group == 0 && lane % 4 == 0 && head >= 0) {
        float* lse = final ? p.lse : p.partial_lse;
        lse[smem.rows[row].lse_at] = empty ? -kInfinity : highest * kLn2 + logf(total);
      }
      if (final && p.sinks != nullptr && head >= 0) {
        total += ptx::exp2(p.sinks[head] * kLog2e - base);
      }
      float weight = empty ? 0.0f : ptx::exp2(state.base[i][h] - base) / total;
      if constexpr (T::kByteV) weight *= power_of_two(state.exponent - kByteExponent);
      state.multiply_row(i, h, weight);
    }
  }
  for (int first = 0; first < p.value_dim; first += T::kSlice) {
#pragma unroll
    for (int n = 0; n < T::kValueTiles; ++n) {
      // The loop is over registers, so it is unrolled and takes its part of each slice.
      if (n * 8 / T::kSlice * T::kSlice != first) continue;
#pragma unroll
      for (int i = 0; i < T::kRowTiles; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          smem.parts[group][first_row + i * 16 + e / 2 * 8][value_column<T>(n, e % 2) - first] =
              state.acc[i][n][e];
        }
      }
    }
    __syncthreads();
    for (int at = threadIdx.x; at < T::kRows * T::kSlice; at += T::kThreads) {
      const int row = at / T::kSlice, column = at % T::kSlice;
      const DecodeRow& info = smem.rows[row];
      if (info.head < 0 || first + column >= p.value_dim) continue;
      float sum = 0.0f;
#pragma unroll
      for (int g = 0; g < T::kKeyGroups; ++g) sum += smem.parts[g][row][column];
      if (final) {
        p.out[info.out_at + first + column] = write_16bit(sum, p.is_bf16);
      } else {
        p.partial_out[info.out_at + first + column] = sum;
      }
    }
    __syncthreads();
  }
}

template <class T>
__global__ void __launch_bounds__(T::kThreads, 1)
    decode_kernel(const __grid_constant__ DecodeParams p) {
  extern __shared__ __align__(128) unsigned char shared[];
  DecodeSmem<T>& smem = *reinterpret_cast<DecodeSmem<T>*>(shared);
  const int warp = threadIdx.x / 32;
  const int group = warp / T::kRowGroups, row_group = warp % T::kRowGroups;

  ptx::grid_dependency_wait();
  ptx::grid_dependency_launch();
  {
    const int num_wide = p.plan[14], block = blockIdx.x, blocks = gridDim.x;
    const int first_item = p.wide ? 0 : num_wide;
    const int num_items = p.wide ? num_wide : p.plan[1] - num_wide;
    const int num_units = num_items * p.parts * p.num_kv_heads;
    if (block >= num_units) return;
    const int count = (num_units - 1 - block) / blocks + 1;
    if (threadIdx.x == 0) {
      smem.first_item = first_item;
      smem.num_units = count;
    }
    if (threadIdx.x < 3 && threadIdx.x < count) {
      smem.units[threadIdx.x] = read_unit(p, first_item, block + threadIdx.x * blocks);
    }
  }
  __syncthreads();

  KeyStream<T> stream;
  stream.seek(p, smem, group, min(2, smem.num_units - 1));
  int stage = 0;  // of the next tile to compute
  for (int u = 0; u < smem.num_units; ++u) {
    const DecodeUnit& unit = smem.units[u & 3];
    const int last = min(u + 2, smem.num_units - 1);  // the last unit whose entry is there
    if (stream.begin >= stream.high) stream.seek(p, smem, group, last);
    stream.load_up_to(T::kStages - 1, p, smem, group, row_group, last);
    prepare_rows<T>(p, smem, unit);
    __syncthreads();
    // Read by others after the barriers of this unit's end; nobody needs the entry it replaces.
    if (threadIdx.x == 0 && u + 3 < smem.num_units) {
      smem.units[(u + 3) & 3] =
          read_unit(p, smem.first_item, static_cast<int>(blockIdx.x + (u + 3) * gridDim.x));
    }
    __syncwarp();

    const uint32_t q = query_address<T>(ptx::shared_address(smem.q), row_group * T::kWarpRows);
    DecodeState<T> state;
    state.reset();
    const auto take_all = [&](const auto& query) {
      for (int begin = first_tile<T>(unit, group); begin < unit.high;
           begin += T::kKeys * T::kKeyGroups) {
        stream.wait(group);
        // All warps of the group are done with the tile before this one: its stage is free.
        stream.load_up_to(T::kStages, p, smem, group, row_group, last);
        take_tile<T>(p, smem, unit, group, row_group, stage, begin, query, state);
        --stream.ahead;
        stage = stage + 1 == T::kStages ? 0 : stage + 1;
      }
    };
    if constexpr (T::kKeepQuery) {
      uint32_t a[T::kHeadDim / 16][4];
#pragma unroll
      for (int step = 0; step < T::kHeadDim / 16; ++step) load_query(a[step], q, step);
      take_all([&](uint32_t (&to)[4], int, int step) {
#pragma unroll
        for (int e = 0; e < 4; ++e) to[e] = a[step][e];
      });
    } else {
      take_all([&](uint32_t (&to)[4], int i, int step) {
        load_query(to, q + i * 16 * T::kHeadDim * 2, step);
      });
    }
    finish_unit<T>(p, smem, unit, group, row_group, state);
  }
}

}  // namespace fastinfer::cuda
