// From a fused QKV projection to queries and pages in one pass: a block takes a token, a group of
// threads a head's row, a thread one or two vectors of 16 bytes of it. Raw pointers only; checks
// and launch live in qk_norm_rope_append.cu.
//
// Every step rounds to the element type where the op that it stands for would, and sums are in the
// order of rms_norm's kernel, so the results are, bit for bit, those of the ops in turn.
#pragma once

#include "page_rows.cuh"

namespace fastinfer::cuda {

struct QkNormRopeAppendParams {
  const void* qkv;  // [T, heads * dim + kv_heads * (dim + value_dim)]
  int64_t qkv_token_stride;
  void* q_out;  // [T, heads, dim]; may be the first columns of qkv
  int64_t q_token_stride;
  int64_t q_head_stride;
  const int64_t* slot_mapping;  // [T]
  const int64_t* positions;     // [T], or null: nothing is turned
  const float* cos_sin;         // [num_positions, 2 * pairs]: cosines, then sines
  int64_t cos_sin_stride;
  int64_t num_positions;
  const void* bias;      // [columns of qkv], or null
  const void* q_weight;  // [dim], element type or fp32, or null: not normalised
  const void* k_weight;  // likewise
  bool q_weight_is_float;
  bool k_weight_is_float;
  bool interleaved;
  float eps;
  float weight_offset;
  int heads;
  int kv_heads;
  int vectors;       // 16-byte vectors of a row of q or k
  int v_vectors;     // of v
  int pair_vectors;  // of the first members of all pairs
  int lanes_log2;    // threads of a row: a power of two, up to a warp
  int32_t capacity;  // slots
  Divider block_size;
  PageSide k;
  PageSide v;
};

constexpr int kQkvThreads = 128;
// Blocks of a multiprocessor that registers must allow: enough loads in flight.
constexpr int kQkvBlocks = 5;
// Rows of a thread, whose loads are in flight together.
constexpr int kQkvRows = 3;

// What turns a thread's elements of any row: x1 cos - x2 sin and x1 sin + x2 cos. As in
// rotary_embedding_ the product with x1 is the one that is not rounded.
//
// With two vectors in a thread these are the first and the second members of the same pairs.
template <class T, int kVectors>
struct Turn {
  static constexpr int kSize = Pack<T>::kSize;
  float cos[kSize];
  float sin[kSize];

  __device__ void load(const QkNormRopeAppendParams& p, int64_t position, int lane) {
    // Outside the table nothing is read, and the token becomes NaN.
    const bool known = position >= 0 && position < p.num_positions;
    const bool read = known && lane < 2 * p.pair_vectors;
    const float* row = p.cos_sin + (read ? position * p.cos_sin_stride : 0);
    const float* sines = row + p.pair_vectors * kSize;
    constexpr float kUnknown = __builtin_nanf("");
    if (kVectors == 1 && p.interleaved) {
      const int first = lane * kSize / 2;
#pragma unroll
      for (int e = 0; e < kSize; e += 2) {
        cos[e] = cos[e + 1] = read ? row[first + e / 2] : kUnknown;
        sin[e] = sin[e + 1] = read ? sines[first + e / 2] : kUnknown;
      }
      return;
    }
    const bool is_first = lane < p.pair_vectors;
    const int first = (is_first ? lane : lane - p.pair_vectors) * kSize;
#pragma unroll
    for (int e = 0; e < kSize; e += 4) {
      float4 c = make_float4(kUnknown, kUnknown, kUnknown, kUnknown), s = c;
      if (read) {
        c = *reinterpret_cast<const float4*>(row + first + e);
        s = *reinterpret_cast<const float4*>(sines + first + e);
      }
      cos[e] = c.x, cos[e + 1] = c.y, cos[e + 2] = c.z, cos[e + 3] = c.w;
      sin[e] = s.x, sin[e + 1] = s.y, sin[e + 2] = s.z, sin[e + 3] = s.w;
    }
  }

  // Called by all threads of a warp; changes the elements where `inside`.
  __device__ void apply(const QkNormRopeAppendParams& p, int lane, int lanes, bool inside,
                        Pack<T> (&x)[kVectors]) const {
    float values[kSize], partners[kSize];
    unpack(x[0], values);
    if constexpr (kVectors == 2) {
      if (!inside) return;
      unpack(x[1], partners);
#pragma unroll
      for (int e = 0; e < kSize; ++e) {
        const float first = values[e], second = partners[e];
        values[e] = __fmaf_rn(first, cos[e], __fmul_rn(-second, sin[e]));
        partners[e] = __fmaf_rn(first, sin[e], __fmul_rn(second, cos[e]));
      }
      x[0] = rounded<T>(values);
      x[1] = rounded<T>(partners);
    } else {
      if (p.interleaved) {
#pragma unroll
        for (int e = 0; e < kSize; ++e) partners[e] = values[e ^ 1];
      } else {
        const int source = lane < p.pair_vectors ? lane + p.pair_vectors : lane - p.pair_vectors;
        Pack<T> partner;
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          partner.words[w] = __shfl_sync(kFullWarp, x[0].words[w], source & (lanes - 1), lanes);
        }
        unpack(partner, partners);
      }
      if (!inside || lane >= 2 * p.pair_vectors) return;
#pragma unroll
      for (int e = 0; e < kSize; ++e) {
        const bool is_first = p.interleaved ? e % 2 == 0 : lane < p.pair_vectors;
        values[e] = is_first ? __fmaf_rn(values[e], cos[e], __fmul_rn(-partners[e], sin[e]))
                             : __fmaf_rn(partners[e], sin[e], __fmul_rn(values[e], cos[e]));
      }
      x[0] = rounded<T>(values);
    }
  }
};

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

// x / sqrt(mean(x^2) + eps) * (weight + weight_offset). Called by all threads of a warp; changes
// the elements where `weight` is not null.
template <class T, int kVectors>
__device__ inline void normalise(const QkNormRopeAppendParams& p, const void* weight,
                                 bool weight_is_float, int lane, int lanes,
                                 Pack<T> (&x)[kVectors]) {
  constexpr int kSize = Pack<T>::kSize;
  float values[kVectors][kSize];
  float total = 0.0f;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    unpack(x[i], values[i]);
    float square = 0.0f;
#pragma unroll
    for (int e = 0; e < kSize; ++e) square = __fmaf_rn(values[i][e], values[i][e], square);
    total = i == 0 ? square : total + square;
  }
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) {
    if (mask < lanes) total += __shfl_xor_sync(kFullWarp, total, mask);
  }
  if (weight == nullptr) return;
  const float rstd = __frcp_rn(sqrtf(total / float(p.vectors * kSize) + p.eps));
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int vector = lane + i * lanes;
    float w[kSize];
    if (weight_is_float) {
      const float4* from = static_cast<const float4*>(weight) + vector * (kSize / 4);
#pragma unroll
      for (int e = 0; e < kSize; e += 4) {
        const float4 four = from[e / 4];
        w[e] = four.x, w[e + 1] = four.y, w[e + 2] = four.z, w[e + 3] = four.w;
      }
    } else {
      unpack(load_pack(static_cast<const T*>(weight) + vector * kSize), w);
    }
#pragma unroll
    for (int e = 0; e < kSize; ++e) {
      values[i][e] = values[i][e] * rstd * (w[e] + p.weight_offset);
    }
    x[i] = rounded<T>(values[i]);
  }
}

// A thread's part of a row of k or v to its place. `largest` is that of the row.
template <class T, int kVectors>
__device__ inline void write_quantized(const PageSide& pages, int32_t block, int32_t offset,
                                       int32_t head, int lane, int lanes, uint32_t largest,
                                       const Pack<T> (&x)[kVectors]) {
  constexpr int kSize = Pack<T>::kSize;
  float* const scale_place = scale_at(pages, block, offset, head);
  float scale;
  if (pages.scale_is_dynamic) {
    scale = dynamic_scale(largest, pages.format);
    if (lane == 0) *scale_place = scale;
  } else {
    scale = *scale_place;
  }
  uint32_t words[kVectors * kSize / 4];
  if (pages.format == PageFormat::kInt8) {
    quantize<PageFormat::kInt8, kVectors>(x, scale, largest, words);
  } else {
    quantize<PageFormat::kFp8, kVectors>(x, scale, largest, words);
  }
  uint8_t* const row = static_cast<uint8_t*>(pages.cache) + element_at(pages, block, offset, head);
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    uint8_t* const to = row + (lane + i * lanes) * kSize;
    if constexpr (kSize == 8) {
      *reinterpret_cast<uint2*>(to) = make_uint2(words[2 * i], words[2 * i + 1]);
    } else {
      *reinterpret_cast<uint32_t*>(to) = words[i];
    }
  }
}

// kVectors: of a thread. Two, `lanes` apart, where a row has exactly so many and, if it is turned,
// its halves are the members of its pairs. kQuantized: the pages of k, of v or of both are.
template <class T, int kVectors, bool kQuantized>
__global__ void __launch_bounds__(kQkvThreads, kQkvBlocks)
    qk_norm_rope_append_kernel(const __grid_constant__ QkNormRopeAppendParams p) {
  using Vec = Pack<T>;
  const int64_t token = blockIdx.x;
  const int lanes = 1 << p.lanes_log2;
  const int lane = threadIdx.x & (lanes - 1);
  const int groups = kQkvThreads >> p.lanes_log2;
  const int group = threadIdx.x >> p.lanes_log2;
  const int keys = p.heads + p.kv_heads;
  const int rows = keys + p.kv_heads;  // of the token: those of q, of k and of v

  const int64_t slot = p.slot_mapping[token];
  const int64_t position = p.positions != nullptr ? p.positions[token] : 0;

  // A thread's elements in qkv and in the bias, and where those of a row begin.
  const T* const qkv =
      static_cast<const T*>(p.qkv) + token * p.qkv_token_stride + lane * Vec::kSize;
  const T* const bias = static_cast<const T*>(p.bias) + lane * Vec::kSize;
  const int vector_step = lanes * Vec::kSize;
  const auto column_of = [&](int row) {
    return (row * p.vectors + max(row - keys, 0) * (p.v_vectors - p.vectors)) * Vec::kSize;
  };
  const auto is_inside = [&](int row) {
    return row < rows && (kVectors == 2 || lane < (row >= keys ? p.v_vectors : p.vectors));
  };

  Vec x[kQkvRows][kVectors];
  const auto load_rows = [&](int first) {
#pragma unroll
    for (int r = 0; r < kQkvRows; ++r) {
      const int row = first + r * groups;
      const bool inside = is_inside(row);
      const T* const from = qkv + column_of(row);
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        x[r][i] = inside ? load_pack(from + i * vector_step) : Vec{};
      }
    }
  };

  // The first rows are on their way before the position is waited for.
  load_rows(group);
  Turn<T, kVectors> turn;
  if (p.positions != nullptr) turn.load(p, position, lane);
  T* const q_out = static_cast<T*>(p.q_out) + token * p.q_token_stride + lane * Vec::kSize;

  // Every thread of a warp stays to the end: rows are summed and turned by exchange.
  for (int done = 0; done < rows; done += groups * kQkvRows) {
    if (done > 0) load_rows(done + group);
#pragma unroll
    for (int r = 0; r < kQkvRows; ++r) {
      const int row = done + group + r * groups;
      const bool inside = is_inside(row);
      const bool is_q = row < p.heads, is_v = row >= keys;
      if (p.bias != nullptr && inside) {
#pragma unroll
        for (int i = 0; i < kVectors; ++i) {
          add_bias(bias + column_of(row) + i * vector_step, &x[r][i]);
        }
      }
      if (p.q_weight != nullptr || p.k_weight != nullptr) {
        const void* weight = !inside || is_v ? nullptr : is_q ? p.q_weight : p.k_weight;
        normalise(p, weight, is_q ? p.q_weight_is_float : p.k_weight_is_float, lane, lanes, x[r]);
      }
      if (p.positions != nullptr) turn.apply(p, lane, lanes, inside && !is_v, x[r]);
      uint32_t largest = 0;
      if constexpr (kQuantized) {
#pragma unroll
        for (int i = 0; i < kVectors; ++i) largest = max(largest, largest_magnitude(x[r][i]));
        largest = largest_of_lanes(largest, lanes);
      }
      if (inside && is_q) {
#pragma unroll
        for (int i = 0; i < kVectors; ++i) {
          store_pack(q_out + row * p.q_head_stride + i * vector_step, x[r][i]);
        }
      } else if (inside && slot >= 0 && slot < p.capacity) {
        const PageSide pages = is_v ? p.v : p.k;
        const int32_t block = p.block_size.quotient(static_cast<int32_t>(slot));
        const int32_t offset = static_cast<int32_t>(slot) - block * p.block_size.divisor;
        const int32_t head = row - (is_v ? keys : p.heads);
        if (!kQuantized || pages.format == PageFormat::kElements) {
          T* const to = static_cast<T*>(pages.cache) + element_at(pages, block, offset, head) +
                        lane * Vec::kSize;
#pragma unroll
          for (int i = 0; i < kVectors; ++i) store_pack(to + i * vector_step, x[r][i]);
        } else {
          write_quantized(pages, block, offset, head, lane, lanes, largest, x[r]);
        }
      }
    }
  }
}

}  // namespace fastinfer::cuda
