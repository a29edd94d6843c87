// The end of a product: the blocks of a cluster, which have cut K, add up what they have and write
// it.
#pragma once

#include "../ptx/cluster.h"
#include "low_bit_gemm.h"
#include "low_bit_scales.cuh"

namespace fastinfer::cuda {

// Called by all threads, when their block's `sums` [tokens][pitch] are written. They are those of
// output features from first_feature on and of rows of x from first_token on. `see(sum, token)` is
// shown each sum that this thread writes.
template <class T, int kFeatures, int kPitch, int kThreads, class See>
__device__ inline void write_result(const LowBitParams& p, const float (*sums)[kPitch],
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
    float sum = sums[token][feature];
    if (blocks > 1) {
      sum = 0.0f;
      for (uint32_t block = 0; block < blocks; ++block) {
        sum += ptx::cluster_load(&sums[token][feature], block);
      }
    }
    see(sum, token);
    if (p.bias != nullptr) sum += load_scalar(p.bias, p.bias_format, n);
    static_cast<T*>(p.out)[(first_token + token) * p.out_row_stride + n] = static_cast<T>(sum);
  }
  // Nobody reads this block's memory any more.
  if (blocks > 1) ptx::cluster_sync_relaxed();
}

}  // namespace fastinfer::cuda
