// The end of products that several blocks have formed together.
#pragma once

#include <cstdint>

#include "../ptx/cluster.h"

namespace fastinfer::cuda {

// Called by all threads of a cluster whose blocks, and within them parts [kSplits], have cut K,
// when their block's `sums` are written: those of output features from first_feature on, of which
// there are n in all, and of some tokens. `store(sum, token, feature)` gets each whole sum once.
// Sums are of 32 bits.
template <int kFeatures, int kThreads, class Sum, int kSplits, int kTokens, int kPitch, class Store>
__device__ inline void add_up_cluster(const Sum (&sums)[kSplits][kTokens][kPitch],
                                      int32_t first_feature, int32_t n, int tokens, Store store) {
  const uint32_t rank = ptx::cluster_rank(), blocks = ptx::cluster_size();
  if (blocks == 1) {
    __syncthreads();
  } else {
    ptx::cluster_sync();
  }
  for (int i = rank * kThreads + threadIdx.x; i < kFeatures * tokens; i += blocks * kThreads) {
    const int token = i / kFeatures, feature = i % kFeatures;
    if (first_feature + feature >= n) continue;
    Sum sum = 0;
#pragma unroll
    for (int split = 0; split < kSplits; ++split) {
      const Sum* own = &sums[split][token][feature];
      if (blocks == 1) {
        sum += *own;
      } else {
        for (uint32_t block = 0; block < blocks; ++block) sum += ptx::cluster_load(own, block);
      }
    }
    store(sum, token, first_feature + feature);
  }
  // Nobody reads this block's memory any more.
  if (blocks > 1) ptx::cluster_sync_relaxed();
}

}  // namespace fastinfer::cuda
