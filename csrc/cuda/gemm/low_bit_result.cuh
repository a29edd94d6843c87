// The end of a product: sums become rows of the result.
#pragma once

#include "cluster_result.cuh"
#include "low_bit_gemm.h"
#include "low_bit_scales.cuh"

namespace fastinfer::cuda {

// Called by all threads of a cluster whose blocks, and within them parts [kSplits], have cut K,
// when their block's `sums` are written: those of rows of x from first_token on. `see(sum, token)`
// is shown each sum that this thread writes.
template <class T, int kFeatures, int kThreads, int kSplits, int kTokens, int kPitch, class See>
__device__ inline void write_result(const LowBitParams& p,
                                    const float (&sums)[kSplits][kTokens][kPitch],
                                    int32_t first_feature, int32_t first_token, int tokens,
                                    See see) {
  add_up_cluster<kFeatures, kThreads>(
      sums, first_feature, p.n, tokens, [&](float sum, int token, int32_t n) {
        see(sum, token);
        if (p.bias != nullptr) sum += load_scalar(p.bias, p.bias_format, n);
        static_cast<T*>(p.out)[(first_token + token) * p.out_row_stride + n] = static_cast<T>(sum);
      });
}

}  // namespace fastinfer::cuda
