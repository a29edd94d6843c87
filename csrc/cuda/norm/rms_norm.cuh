// RMSNorm on the GPU: one block a row, one pass over memory. Raw pointers only; checks and launch
// live in rms_norm.cu.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "../../rows.h"

namespace fastinfer::cuda {

struct RmsNormParams {
  const void* x;   // [rows, hidden]
  void* out;       // [rows, hidden], may be x
  void* residual;  // [rows, hidden] or null; then residual += x and out = norm(residual as stored)
  const void* weight;  // [hidden], element type of x or fp32
  Rows x_rows;
  Rows out_rows;
  Rows residual_rows;
  int64_t hidden;
  float eps;
  float weight_offset;
};

constexpr int kRmsNormThreads = 256;
constexpr int kVectorBytes = 16;
// A thread keeps this many 16-byte vectors of its row in registers; longer rows read the rest from
// memory (L2) a second time.
constexpr int kKeptVectors = 4;

template <class T, int kCount = kVectorBytes / sizeof(T)>
struct alignas(kVectorBytes) Vector {
  static constexpr int kSize = kCount;
  T v[kSize];
};

__device__ inline float block_sum(float value) {
  __shared__ float partial[kRmsNormThreads / 32];
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) value += __shfl_xor_sync(0xffffffffu, value, mask);
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = value;
  __syncthreads();
  float total = 0.0f;
#pragma unroll
  for (int i = 0; i < kRmsNormThreads / 32; ++i) total += partial[i];
  return total;
}

// kVectorised: every row of x, out, residual and the weight begin on a 16-byte boundary and hidden
// is a whole number of vectors. Otherwise a thread takes the same elements one by one, so that sums
// have one order and a row's bits do not depend on its address.
template <class T, class W, bool kVectorised>
__global__ void __launch_bounds__(kRmsNormThreads)
    rms_norm_kernel(const __grid_constant__ RmsNormParams p) {
  using Vec = Vector<T>;
  constexpr int kSize = Vec::kSize;
  const int64_t row = blockIdx.x;
  const T* x = static_cast<const T*>(p.x) + p.x_rows.offset(row);
  T* out = static_cast<T*>(p.out) + p.out_rows.offset(row);
  T* residual = p.residual ? static_cast<T*>(p.residual) + p.residual_rows.offset(row) : nullptr;
  const W* weight = static_cast<const W*>(p.weight);
  const int64_t vectors = (p.hidden + kSize - 1) / kSize;

  const auto load = [&](const T* from, int64_t i) {
    Vec v;
    if constexpr (kVectorised) {
      v = reinterpret_cast<const Vec*>(from)[i];
    } else {
#pragma unroll
      for (int e = 0; e < kSize; ++e) {
        v.v[e] = i * kSize + e < p.hidden ? from[i * kSize + e] : T(0.0f);
      }
    }
    return v;
  };
  const auto store = [&](T* to, int64_t i, const Vec& v) {
    if constexpr (kVectorised) {
      reinterpret_cast<Vec*>(to)[i] = v;
    } else {
#pragma unroll
      for (int e = 0; e < kSize; ++e) {
        if (i * kSize + e < p.hidden) to[i * kSize + e] = v.v[e];
      }
    }
  };

  // Reads vector i (adding and storing the residual) and accumulates its squares.
  float square = 0.0f;
  const auto read = [&](int64_t i) {
    Vec v = load(x, i);
    if (residual != nullptr) {
      const Vec r = load(residual, i);
#pragma unroll
      for (int e = 0; e < kSize; ++e) v.v[e] = T(float(r.v[e]) + float(v.v[e]));
      store(residual, i, v);
    }
#pragma unroll
    for (int e = 0; e < kSize; ++e) square += float(v.v[e]) * float(v.v[e]);
    return v;
  };
  Vec kept[kKeptVectors];
  int64_t i = threadIdx.x;
#pragma unroll
  for (int k = 0; k < kKeptVectors; ++k, i += kRmsNormThreads) {
    if (i < vectors) kept[k] = read(i);
  }
#pragma unroll 1
  for (; i < vectors; i += kRmsNormThreads) read(i);
  const float rstd = 1.0f / sqrtf(block_sum(square) / float(p.hidden) + p.eps);

  const auto write = [&](int64_t i, Vec v) {
    Vector<W, Vec::kSize> w;
    if constexpr (kVectorised) {
      w = reinterpret_cast<const Vector<W, Vec::kSize>*>(weight)[i];
    } else {
#pragma unroll
      for (int e = 0; e < kSize; ++e) {
        w.v[e] = i * kSize + e < p.hidden ? weight[i * kSize + e] : W(0.0f);
      }
    }
#pragma unroll
    for (int e = 0; e < kSize; ++e) {
      v.v[e] = T(float(v.v[e]) * rstd * (float(w.v[e]) + p.weight_offset));
    }
    store(out, i, v);
  };
  const T* row_values = residual != nullptr ? residual : x;
  i = threadIdx.x;
#pragma unroll
  for (int k = 0; k < kKeptVectors; ++k, i += kRmsNormThreads) {
    if (i < vectors) write(i, kept[k]);
  }
#pragma unroll 1
  for (; i < vectors; i += kRmsNormThreads) write(i, load(row_values, i));
}

}  // namespace fastinfer::cuda
