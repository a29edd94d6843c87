// What qk_norm_rope_append_ does to a thread's part of a row, step by step, and its parameters.
//
// Every step rounds to the element type where the op that it stands for would, and sums are in the
// order of rms_norm's kernel, so the results are, bit for bit, those of the ops in turn.
#pragma once

#include "../ptx/cp_async.h"
#include "page_rows.cuh"

namespace fastinfer::cuda {

// What is done to a row, as bits. kHasRow is a thread's own: rows of a unit may be too few.
enum QkvSteps : int { kAddBias = 1, kNormalise = 2, kTurn = 4, kHasRow = 8 };

// Rows of q, of k or of v.
struct alignas(16) QkvKind {
  int first_unit;    // of a token
  int heads;         // rows of a token
  int first_vector;  // of a token's columns
  int vectors;       // 16-byte vectors of a row
  int steps;         // QkvSteps
};
constexpr int kQueries = 0, kKeys = 1, kValues = 2;

struct QkNormRopeAppendParams {
  const void* qkv;  // [T, heads * dim + kv_heads * (dim + value_dim)]
  int64_t qkv_token_stride;
  void* q_out;  // [T, heads, dim]; may be the first columns of qkv
  int64_t q_token_stride;
  int64_t q_head_stride;
  const int64_t* slot_mapping;  // [T]
  const int64_t* positions;     // [T], or null: nothing is turned
  const float* cos_sin;         // [num_positions, rotary_dim]: cosines, then sines
  int64_t cos_sin_stride;
  int64_t num_positions;
  const void* bias;        // [columns of qkv], or null
  const void* weights[2];  // of q and k: [dim], element type or fp32, or null: not normalised
  bool weight_is_float[2];
  bool interleaved;
  float eps;
  float weight_offset;
  QkvKind kinds[3];
  int units;  // of a token
  int warps;  // of a block
  int rotary_dim;
  int lanes_log2;    // threads of a row: a power of two, up to a warp
  int32_t capacity;  // slots
  Divider block_size;
  PageSide pages[2];  // of k and v
};

// Vectors of a thread, `lanes` apart.
constexpr int kQkvVectors = 4;
// Warps of a block where tokens are many, and where they are so few that the GPU is not full.
constexpr int kQkvWarps = 3;
constexpr int kQkvMostWarps = 6;
constexpr int64_t kQkvFewTokens = 512;
// Warps of a multiprocessor: enough for loads in flight, few enough for the registers.
template <int kLanes>
constexpr int kQkvResidentWarps = kLanes > 0 ? 24 : 18;

template <class T>
using QkvVectors = Pack<T>[kQkvVectors];

// Elements of a row; at most, where its threads are not known.
template <class T, int kLanes>
constexpr int kQkvRowElements = (kLanes > 0 ? kLanes * kQkvVectors : 32) * Pack<T>::kSize;

// Whether 0 <= n < limit.
__device__ inline bool is_below(int64_t n, int64_t limit) {
  return static_cast<uint64_t>(n) < static_cast<uint64_t>(limit);
}

template <int kCount>
__device__ inline void load_floats(const float* from, float (&values)[kCount]) {
#pragma unroll
  for (int e = 0; e < kCount; e += 4) {
    const float4 four = *reinterpret_cast<const float4*>(from + e);
    values[e] = four.x, values[e + 1] = four.y, values[e + 2] = four.z, values[e + 3] = four.w;
  }
}

template <class T>
__device__ inline void add_bias(const T* bias, Pack<T>* x) {
  constexpr int kSize = Pack<T>::kSize;
  float values[kSize], b[kSize];
  unpack(*x, values);
  unpack(load_pack(bias), b);
#pragma unroll
  for (int e = 0; e < kSize; ++e) values[e] = __fadd_rn(values[e], b[e]);
  *x = rounded<T>(values);
}

// What rows of q and of k are multiplied by. By all threads of the block.
template <class T, int kMostElements>
__device__ inline void load_weights(const QkNormRopeAppendParams& p,
                                    float (&weights)[2][kMostElements]) {
#pragma unroll
  for (int kind : {kQueries, kKeys}) {
    const void* const from = p.weights[kind];
    if (from == nullptr) continue;
    for (int i = threadIdx.x; i < p.kinds[kind].vectors * Pack<T>::kSize; i += p.warps * 32) {
      const float weight = p.weight_is_float[kind] ? static_cast<const float*>(from)[i]
                                                   : float(static_cast<const T*>(from)[i]);
      weights[kind][i] = weight + p.weight_offset;
    }
  }
}

// x / sqrt(mean(x^2) + eps) * weight. Called by all threads of a warp.
template <class T>
__device__ inline void normalise(const float* weight, int elements, float eps, int lane, int lanes,
                                 QkvVectors<T>& x) {
  constexpr int kSize = Pack<T>::kSize;
  float values[kQkvVectors][kSize];
  float squares[kQkvVectors] = {};
#pragma unroll
  for (int i = 0; i < kQkvVectors; ++i) {
    unpack(x[i], values[i]);
#pragma unroll
    for (float value : values[i]) squares[i] = __fmaf_rn(value, value, squares[i]);
  }
  // As rms_norm, where every vector has a thread: those half a row apart first.
  float total = (squares[0] + squares[2]) + (squares[1] + squares[3]);
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) {
    if (mask < lanes) total += __shfl_xor_sync(kFullWarp, total, mask);
  }
  // The mean is rounded before eps is added, also where the division is a multiplication.
  const float rstd = __frcp_rn(sqrtf(__fadd_rn(total / float(elements), eps)));
#pragma unroll
  for (int i = 0; i < kQkvVectors; ++i) {
    float w[kSize];
    load_floats(weight + (lane + i * lanes) * kSize, w);
#pragma unroll
    for (int e = 0; e < kSize; ++e) values[i][e] = values[i][e] * rstd * w[e];
    x[i] = rounded<T>(values[i]);
  }
}

// The row of a position, on its way to shared memory; NaN if there is none. By all threads of a
// warp.
template <int kMostElements>
__device__ inline void load_cos_sin(const QkNormRopeAppendParams& p, int64_t position,
                                    float (&cos_sin)[kMostElements]) {
  const bool known = is_below(position, p.num_positions);
  const float* const from = p.cos_sin + (known ? position * p.cos_sin_stride : 0);
#pragma unroll
  for (int first = 0; first < kMostElements; first += 128) {
    const int i = first + threadIdx.x % 32 * 4;
    if (i >= p.rotary_dim) continue;
    if (known) {
      ptx::cp_async_16(ptx::shared_address(cos_sin + i), from + i, false);
    } else {
      constexpr float kNan = __builtin_nanf("");
      *reinterpret_cast<float4*>(cos_sin + i) = make_float4(kNan, kNan, kNan, kNan);
    }
  }
}

// x1 cos - x2 sin and x1 sin + x2 cos. As in rotary_embedding_ the product with x1 is the one that
// is not rounded.
__device__ inline void turn_pair(float& x1, float& x2, float cos, float sin) {
  const float first = x1, second = x2;
  x1 = __fmaf_rn(first, cos, __fmul_rn(-second, sin));
  x2 = __fmaf_rn(first, sin, __fmul_rn(second, cos));
}

// Rows whose halves are the members of their pairs: a thread has both.
template <class T>
__device__ inline void turn_halves(const float* cos_sin, int lane, int lanes, QkvVectors<T>& x) {
  constexpr int kSize = Pack<T>::kSize, kHalf = kQkvVectors / 2;
#pragma unroll
  for (int i = 0; i < kHalf; ++i) {
    float first[kSize], second[kSize], cos[kSize], sin[kSize];
    load_floats(cos_sin + (lane + i * lanes) * kSize, cos);
    load_floats(cos_sin + (lane + (i + kHalf) * lanes) * kSize, sin);
    unpack(x[i], first);
    unpack(x[i + kHalf], second);
#pragma unroll
    for (int e = 0; e < kSize; ++e) turn_pair(first[e], second[e], cos[e], sin[e]);
    x[i] = rounded<T>(first);
    x[i + kHalf] = rounded<T>(second);
  }
}

// Any rows. Called by all threads of a warp, which exchange them through `rows`.
template <class T>
__device__ inline void turn_any(const QkNormRopeAppendParams& p, const float* cos_sin,
                                Pack<T> (&rows)[kQkvVectors][32], int lane, int lanes,
                                QkvVectors<T>& x) {
  constexpr int kSize = Pack<T>::kSize;
  const float* const sines = cos_sin + p.rotary_dim / 2;
  const int pair_vectors = p.rotary_dim / 2 / kSize;
  const int thread = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < kQkvVectors; ++i) rows[i][thread] = x[i];
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kQkvVectors; ++i) {
    const int vector = lane + i * lanes;
    if (vector >= 2 * pair_vectors) continue;
    float values[kSize];
    unpack(x[i], values);
    if (p.interleaved) {
#pragma unroll
      for (int e = 0; e < kSize; e += 2) {
        const int pair = (vector * kSize + e) / 2;
        turn_pair(values[e], values[e + 1], cos_sin[pair], sines[pair]);
      }
    } else {
      const bool is_first = vector < pair_vectors;
      const int partner = is_first ? vector + pair_vectors : vector - pair_vectors;
      float partners[kSize], cos[kSize], sin[kSize];
      unpack(rows[partner / lanes][thread - lane + partner % lanes], partners);
      load_floats(cos_sin + min(vector, partner) * kSize, cos);
      load_floats(sines + min(vector, partner) * kSize, sin);
#pragma unroll
      for (int e = 0; e < kSize; ++e) {
        float x1 = is_first ? values[e] : partners[e];
        float x2 = is_first ? partners[e] : values[e];
        turn_pair(x1, x2, cos[e], sin[e]);
        values[e] = is_first ? x1 : x2;
      }
    }
    x[i] = rounded<T>(values);
  }
  // Only now may other rows come here.
  __syncwarp();
}

// Which vectors of its row a thread has: lane + i * lanes. With kLanes all of them are in the row.
template <int kLanes>
struct QkvPart {
  int lane;
  int lanes;
  int vectors;   // of the row
  bool has_row;  // whether there is such a row

  __device__ bool in_row(int i) const { return kLanes > 0 || lane + i * lanes < vectors; }
  __device__ bool holds(int i) const { return has_row && in_row(i); }
};

// A row of k or v to its place. Called by all threads of a warp.
template <bool kQuantized, class T, int kLanes>
__device__ inline void write_row(const QkNormRopeAppendParams& p, const PageSide& pages,
                                 int32_t slot, int head, const QkvPart<kLanes>& part,
                                 const QkvVectors<T>& x) {
  constexpr int kSize = Pack<T>::kSize;
  const int32_t block = p.block_size.quotient(slot);
  const int32_t offset = slot - block * p.block_size.divisor;
  const int64_t element = element_at(pages, block, offset, head) + part.lane * kSize;
  if (!kQuantized || pages.format == PageFormat::kElements) {
    T* const to = static_cast<T*>(pages.cache) + element;
#pragma unroll
    for (int i = 0; i < kQkvVectors; ++i) {
      if (part.holds(i)) store_pack(to + i * part.lanes * kSize, x[i]);
    }
    return;
  }
  uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < kQkvVectors; ++i) {
    if (part.in_row(i)) largest = max(largest, largest_magnitude(x[i]));
  }
  largest = largest_of_lanes(largest, part.lanes);
  if (!part.holds(0)) return;
  float* const scale_place = scale_at(pages, block, offset, head);
  float scale;
  if (pages.scale_is_dynamic) {
    scale = dynamic_scale(largest, pages.format);
    if (part.lane == 0) *scale_place = scale;
  } else {
    scale = *scale_place;
  }
  uint32_t words[kQkvVectors * kSize / 4];
  if (pages.format == PageFormat::kInt8) {
    quantize<PageFormat::kInt8, kQkvVectors>(x, scale, largest, words);
  } else {
    quantize<PageFormat::kFp8, kQkvVectors>(x, scale, largest, words);
  }
#pragma unroll
  for (int i = 0; i < kQkvVectors; ++i) {
    if (!part.holds(i)) continue;
    uint8_t* const to = static_cast<uint8_t*>(pages.cache) + element + i * part.lanes * kSize;
    if constexpr (kSize == 8) {
      *reinterpret_cast<uint2*>(to) = make_uint2(words[2 * i], words[2 * i + 1]);
    } else {
      *reinterpret_cast<uint32_t*>(to) = words[i];
    }
  }
}

}  // namespace fastinfer::cuda
