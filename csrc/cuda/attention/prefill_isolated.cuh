// One row of a prefill tile, computed by a warp from what the row sees alone.
//
// Products of matrices take 0 * NaN and 0 * inf from values that a mask hides. Rows that this has
// reached are computed again here: slowly, but it happens to broken data only.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>

#include "prefill_params.h"

namespace fastinfer::cuda {

// What the producer tells the consumers with Q.
struct PrefillTile {
  int32_t sequence;
  int32_t kv_head;
  int32_t token_begin;
  int32_t seqlen_q;
  int32_t seqlen_k;
  int32_t first_query;  // of the sequence, in ragged tensors
  int32_t first_key;
  int32_t index;
  bool careful;  // some rows failed before (prefill_rows.cuh): they are computed again
  bool valid;    // false: no more work
};

// Keys that a query token of the tile's sequence sees: [begin, end).
struct KeyRange {
  int32_t begin, end;
};

__device__ inline KeyRange seen_keys(const PrefillParams& p, const PrefillTile& tile,
                                     int32_t token) {
  const int32_t position = token + tile.seqlen_k - tile.seqlen_q;
  return {p.window_left >= 0 ? max(0, position - p.window_left) : 0,
          p.window_right >= 0 ? min(tile.seqlen_k, position + p.window_right + 1) : tile.seqlen_k};
}

__device__ inline float as_float(__nv_bfloat16 x) {
  return __bfloat162float(x);
}
__device__ inline float as_float(__half x) {
  return __half2float(x);
}
__device__ inline float as_float(__nv_fp8_e4m3 x) {
  return static_cast<float>(x);
}

// Of a row's scores in the exponent of 2, where e4m3 tensors have scales; maybe not a number > 0.
__device__ inline float score_factor(const PrefillParams& p, int kv_head, int head) {
  float factor = p.scale_log2;
  if (p.q_scale != nullptr) factor *= p.q_scale[head];
  if (p.k_scale != nullptr) factor *= p.k_scale[kv_head];
  return factor;
}

// Where the elements of a key of the tile's sequence and KV head begin.
__device__ inline int64_t key_offset(const PrefillParams& p, const PrefillTile& tile,
                                     const PrefillStrides& strides, int32_t key) {
  const int64_t head = tile.kv_head * strides.head;
  if (p.block_table == nullptr) {
    const int64_t outer = p.cu_seqlens_q == nullptr ? tile.sequence * strides.outer : 0;
    return outer + (int64_t{tile.first_key} + key) * strides.token + head;
  }
  const int32_t entry = key / p.block_size;
  const int64_t block = p.block_table[tile.sequence * p.table_sequence + entry * p.table_block];
  return block * strides.outer + (key - entry * p.block_size) * strides.token + head;
}

template <class T, class Out>
__device__ __noinline__ void isolated_row(const PrefillParams& p, const PrefillTile& tile, int row,
                                          int lane) {
  constexpr int kColumns = 8;  // of the result a lane: 256 / 32
  const int32_t token = tile.token_begin + row / p.group;
  const int head = tile.kv_head * p.group + row % p.group;
  const int64_t query = int64_t{tile.first_query} + token;
  const KeyRange seen = seen_keys(p, tile, token);
  const T* q = static_cast<const T*>(p.q) + tile.sequence * p.q_strides.outer +
               query * p.q_strides.token + head * p.q_strides.head;
  const T* k = static_cast<const T*>(p.k);
  const T* v = static_cast<const T*>(p.v);

  const float factor = score_factor(p, tile.kv_head, head);
  const float value_factor = p.v_scale != nullptr ? p.v_scale[tile.kv_head] : 1.f;

  float maximum = -INFINITY, sum = 0.f, acc[kColumns] = {};
  for (int32_t key = seen.begin; key < seen.end; ++key) {
    const T* key_row = k + key_offset(p, tile, p.k_strides, key);
    const T* value_row = v + key_offset(p, tile, p.v_strides, key);
    float score = 0.f;
    for (int d = lane; d < p.head_dim; d += 32) {
      score += as_float(q[d]) * as_float(key_row[d]);
    }
    for (int step = 16; step > 0; step /= 2) score += __shfl_xor_sync(~0u, score, step);
    score = p.softcap_log2 > 0.f ? p.softcap_log2 * tanhf(score * p.cap_scale) : score * factor;
    const float highest = fmaxf(maximum, score);
    const float base = highest == -INFINITY ? 0.f : highest;
    const float alpha = exp2f(maximum - base), weight = exp2f(score - base);
    maximum = highest;
    sum = sum * alpha + weight;
    if (isnan(sum)) break;  // and so is the whole row
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      const int column = lane + 32 * i;
      if (column < p.value_dim) {
        acc[i] = acc[i] * alpha + weight * as_float(value_row[column]);
      }
    }
  }
  const bool empty = sum == 0.f;
  float denominator = sum;
  if (p.sinks != nullptr) denominator += exp2f(p.sinks[head] * 1.4426950408889634f - maximum);
  Out* out = static_cast<Out*>(p.out) + tile.sequence * p.out_strides.outer +
             query * p.out_strides.token + head * p.out_strides.head;
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    const int column = lane + 32 * i;
    if (column < p.value_dim) {
      out[column] = Out(empty ? 0.f : acc[i] * value_factor / denominator);
    }
  }
  if (lane == 0) {
    p.lse[tile.sequence * p.lse_outer + head * p.lse_head + query] =
        empty ? -INFINITY : maximum * 0.6931471805599453f + logf(sum);
  }
}

}  // namespace fastinfer::cuda
