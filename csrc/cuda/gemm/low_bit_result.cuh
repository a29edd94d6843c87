// The end of a product: sums become rows of the result.
#pragma once

#include "../ptx/cluster.h"
#include "low_bit_gemm.h"
#include "low_bit_scales.cuh"

namespace fastinfer::cuda {

// Called by all threads of a cluster whose blocks, and within them parts [kSplits], have cut K,
// when their block's `sums` are written. They are those of output features from first_feature on
// and of rows of x from first_token on. `see(sum, token)` is shown each sum that this thread
// writes.
template <class T, int kFeatures, int kThreads, int kSplits, int kTokens, int kPitch, class See>
__device__ inline void write_result(const LowBitParams& p,
                                    const float (&sums)[kSplits][kTokens][kPitch],
                                    int32_t first_feature, int32_t first_token, int tokens,
                                    See see) {
  const uint32_t rank = ptx::cluster_rank(), blocks = ptx::cluster_size();
  if (blocks == 1) {
    __syncthreads();
  } else {
    ptx::cluster_sync();
  }
  for (int i = rank * kThreads + threadIdx.x; i < kFeatures * tokens; i += blocks * kThreads) {
    const int token = i / kFeatures, feature = i % kFeatures;
    const int32_t n = first_feature + feature;
    if (n >= p.n) continue;
    float sum = 0.0f;
#pragma unroll
    for (int split = 0; split < kSplits; ++split) {
      const float* own = &sums[split][token][feature];
      if (blocks == 1) {
        sum += *own;
      } else {
        for (uint32_t block = 0; block < blocks; ++block) sum += ptx::cluster_load(own, block);
      }
    }
    see(sum, token);
    if (p.bias != nullptr) sum += load_scalar(p.bias, p.bias_format, n);
    static_cast<T*>(p.out)[(first_token + token) * p.out_row_stride + n] = static_cast<T>(sum);
  }
  // Nobody reads this block's memory any more.
  if (blocks > 1) ptx::cluster_sync_relaxed();
}

// Called by a warpgroup, this thread the `thread`-th, for whole sums of 64 features. `bias`: as
// many.
template <class T, int kTokens, int kPitch>
__device__ inline void write_rows(const LowBitParams& p, const float (&sums)[kTokens][kPitch],
                                  int32_t first_feature, int32_t first_token, int thread) {
  const int32_t n = first_feature + thread % 64;
  if (n >= p.n) return;
  const float bias = p.bias == nullptr ? 0.0f : load_scalar(p.bias, p.bias_format, n);
  for (int token = thread / 64; token < min(kTokens, p.m - first_token); token += 2) {
    const float sum = sums[token][thread % 64] + bias;
    static_cast<T*>(p.out)[(first_token + token) * p.out_row_stride + n] = static_cast<T>(sum);
  }
}

}  // namespace fastinfer::cuda
