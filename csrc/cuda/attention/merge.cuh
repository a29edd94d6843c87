// merge_attention_states on the GPU: a block merges a tile of tokens and heads, a thread 16 bytes
// of a row, up to a warp a row. Raw pointers only; checks and launch live in merge.cu.
#pragma once

#include <cstdint>
#include <cstring>

#include "../indexing.h"
#include "../ptx/convert.h"
#include "../vectors.cuh"

namespace fastinfer::cuda {

constexpr int kMergeStatesThreads = 256;
constexpr int kMergeStatesRows = 2;   // rows of a thread, whose loads are under way together
constexpr int kMergeStatesBatch = 2;  // states that are loaded at once

struct MergeStatesParams {
  const void* outs;    // [splits, sequences, tokens, heads, value_dim]
  const float* lses;   // [splits, sequences, heads, tokens]
  const float* sinks;  // [heads] or null
  void* out;           // [sequences, tokens, heads, value_dim]
  float* lse;          // [sequences, heads, tokens]
  int64_t outs_split, outs_sequence, lses_split, lses_sequence, out_sequence, lse_sequence;
  // Of 32 bits, so that an offset is one multiplication; products have 64.
  int32_t outs_token, outs_head, lses_head, out_token, out_head, lse_head;
  int32_t splits, tokens, heads, value_dim;
  // A block's rows are a tile of tokens and heads: an lse is dense along tokens, an out along
  // heads.
  int lanes_log2;       // threads of a row
  int tile_heads_log2;  // heads of a tile
  int tile_tokens_log2;
  Divider head_tiles, token_tiles;
};

// A state's weight in a row is exp(lse - base) * norm.
struct RowWeight {
  float base, norm;
};

struct MergeStatesShared {
  RowWeight weights[kMergeStatesThreads * kMergeStatesRows];
  float lse[kMergeStatesThreads * kMergeStatesRows];  // merged
};

// 16 bytes of a row, of which `count` elements exist.
template <class T, bool kVectorised>
__device__ inline Pack<T> load_row_part(const T* from, int count) {
  if constexpr (kVectorised) {
    return load_pack(from);
  } else {
    T elements[Pack<T>::kSize];
#pragma unroll
    for (int e = 0; e < Pack<T>::kSize; ++e) elements[e] = e < count ? from[e] : T(0.0f);
    Pack<T> pack;
    memcpy(pack.words, elements, sizeof(elements));
    return pack;
  }
}

template <class T, bool kVectorised>
__device__ inline void store_row_part(T* to, const Pack<T>& pack, int count) {
  if constexpr (kVectorised) {
    store_pack(to, pack);
  } else {
    T elements[Pack<T>::kSize];
    memcpy(elements, pack.words, sizeof(elements));
#pragma unroll
    for (int e = 0; e < Pack<T>::kSize; ++e) {
      if (e < count) to[e] = elements[e];
    }
  }
}

// kVectorised: rows begin on 16-byte boundaries and are whole numbers of 16 bytes. Otherwise
// elements are loaded and stored one by one, and the arithmetic is the same, so that a row's bits
// do not depend on its address.
template <class T, bool kVectorised>
__global__ void __launch_bounds__(kMergeStatesThreads, kVectorised ? 4 : 1)
    merge_states_kernel(const __grid_constant__ MergeStatesParams p) {
  constexpr float kLog2e = 1.4426950408889634f;
  constexpr float kInfinity = __builtin_huge_valf();
  constexpr int kRows = kMergeStatesRows, kBatch = kMergeStatesBatch, kSize = Pack<T>::kSize;
  __shared__ MergeStatesShared shared;

  const int32_t tile = static_cast<int32_t>(blockIdx.x);
  const int32_t outer = p.head_tiles.quotient(tile);
  const int32_t head_tile = tile - outer * p.head_tiles.divisor;
  const int32_t sequence = p.token_tiles.quotient(outer);
  const int32_t token_tile = outer - sequence * p.token_tiles.divisor;
  const int32_t first_head = head_tile << p.tile_heads_log2;
  const int32_t first_token = token_tile << p.tile_tokens_log2;
  const auto head_of = [&](int row) { return first_head + (row & ((1 << p.tile_heads_log2) - 1)); };
  const auto token_of = [&](int row) { return first_token + (row >> p.tile_heads_log2); };
  const auto wide = [](int32_t n, int32_t stride) { return static_cast<int64_t>(n) * stride; };
  const T* outs = static_cast<const T*>(p.outs) + sequence * p.outs_sequence;
  const float* lses = p.lses + sequence * p.lses_sequence;

  struct Row {
    int index;
    int32_t head, token;
    const T* outs;
    const float* lses;
  } rows[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int row = (r * kMergeStatesThreads + static_cast<int>(threadIdx.x)) >> p.lanes_log2;
    rows[r].index = row;
    rows[r].head = head_of(row);
    rows[r].token = token_of(row);
    // Beyond the edges the last row is read again and not written: loads need no condition.
    const int32_t head = min(rows[r].head, p.heads - 1);
    const int32_t token = min(rows[r].token, p.tokens - 1);
    rows[r].outs = outs + wide(token, p.outs_token) + wide(head, p.outs_head);
    rows[r].lses = lses + wide(head, p.lses_head) + token;
  }
  int column = (threadIdx.x & ((1 << p.lanes_log2) - 1)) * kSize;
  float lse[kRows][kBatch];
  Pack<T> part[kRows][kBatch];
  const auto load = [&](int32_t first) {
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int32_t s = first + i;
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        lse[r][i] = -kInfinity;
        if (s >= p.splits) continue;
        lse[r][i] = rows[r].lses[s * p.lses_split];
        part[r][i] = load_row_part<T, kVectorised>(rows[r].outs + s * p.outs_split + column,
                                                   p.value_dim - column);
      }
    }
  };
  if (column < p.value_dim) load(0);

  // Meanwhile a thread of each row: what its weights have in common.
  const int row_count = kMergeStatesThreads * kRows >> p.lanes_log2;
  for (int row = threadIdx.x; row < row_count; row += kMergeStatesThreads) {
    const int32_t head = head_of(row), token = token_of(row);
    if (head >= p.heads || token >= p.tokens) continue;
    const float* row_lses = lses + wide(head, p.lses_head) + token;
    float highest = -kInfinity;
#pragma unroll 4
    for (int32_t s = 0; s < p.splits; ++s) highest = fmaxf(highest, row_lses[s * p.lses_split]);
    const float base = highest == -kInfinity ? 0.0f : highest;
    float total = 0.0f;
#pragma unroll 4
    for (int32_t s = 0; s < p.splits; ++s) {
      total += ptx::exp2((row_lses[s * p.lses_split] - base) * kLog2e);
    }
    const bool empty = total == 0.0f;
    shared.lse[row] = empty ? -kInfinity : base + logf(total);
    if (p.sinks != nullptr) total += ptx::exp2((p.sinks[head] - base) * kLog2e);
    shared.weights[row] = {base, empty ? 0.0f : 1.0f / total};
  }
  __syncthreads();

  while (column < p.value_dim) {
    float sums[kRows][kSize] = {};
    for (int32_t first = 0;;) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const RowWeight row = shared.weights[rows[r].index];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          if (lse[r][i] == -kInfinity) continue;  // an empty result may hold anything
          const float weight = ptx::exp2((lse[r][i] - row.base) * kLog2e) * row.norm;
          float values[kSize];
          unpack(part[r][i], values);
#pragma unroll
          for (int e = 0; e < kSize; ++e) sums[r][e] = fmaf(weight, values[e], sums[r][e]);
        }
      }
      first += kBatch;
      if (first >= p.splits) break;
      load(first);
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (rows[r].head >= p.heads || rows[r].token >= p.tokens) continue;
      T* to = static_cast<T*>(p.out) + sequence * p.out_sequence +
              wide(rows[r].token, p.out_token) + wide(rows[r].head, p.out_head) + column;
      store_row_part<T, kVectorised>(to, rounded<T>(sums[r]), p.value_dim - column);
    }
    column += kSize << p.lanes_log2;
    if (column < p.value_dim) load(0);
  }

  // At the end, since lse may be one of lses.
  __syncthreads();
  for (int row = threadIdx.x; row < row_count; row += kMergeStatesThreads) {
    const int32_t head = head_of(row), token = token_of(row);
    if (head >= p.heads || token >= p.tokens) continue;
    p.lse[sequence * p.lse_sequence + wide(head, p.lse_head) + token] = shared.lse[row];
  }
}

}  // namespace fastinfer::cuda
