// The end of products that several blocks have formed together.
#pragma once

#include <cstdint>

#include "../ptx/cluster.h"

namespace fastinfer::cuda {

// Shares out features, from first_feature on of n in all, by tokens among the threads of a cluster:
// `visit(token, feature)`.
template <int kFeatures, int kThreads, class Visit>
__device__ inline void each_of_cluster(int32_t first_feature, int32_t n, int tokens, Visit visit) {
  const uint32_t rank = ptx::cluster_rank(), blocks = ptx::cluster_size();
  for (int i = rank * kThreads + threadIdx.x; i < kFeatures * tokens; i += blocks * kThreads) {
    const int token = i / kFeatures, feature = i % kFeatures;
    if (first_feature + feature < n) visit(token, first_feature + feature);
  }
}

// The whole sum of a cluster's blocks, and within them of their parts [kSplits].
template <class Sum, int kSplits, int kTokens, int kPitch>
__device__ inline Sum whole_sum(const Sum (&sums)[kSplits][kTokens][kPitch], int token,
                                int feature) {
  const uint32_t blocks = ptx::cluster_size();
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
  return sum;
}

// Before sums are read, and after the last: called by all threads of a cluster.
__device__ inline void sums_are_written() {
  if (ptx::cluster_size() == 1) {
    __syncthreads();
  } else {
    ptx::cluster_sync();
  }
}
__device__ inline void sums_are_read() {
  // Nobody reads this block's memory any more.
  if (ptx::cluster_size() > 1) ptx::cluster_sync_relaxed();
}

// Called by all threads of a cluster whose blocks, and within them parts, have cut K, when their
// block's `sums` are written. `store(sum, token, feature)` gets each whole sum once.
template <int kFeatures, int kThreads, class Sum, int kSplits, int kTokens, int kPitch, class Store>
__device__ inline void add_up_cluster(const Sum (&sums)[kSplits][kTokens][kPitch],
                                      int32_t first_feature, int32_t n, int tokens, Store store) {
  sums_are_written();
  each_of_cluster<kFeatures, kThreads>(first_feature, n, tokens, [&](int token, int32_t feature) {
    store(whole_sum(sums, token, feature - first_feature), token, feature);
  });
  sums_are_read();
}

// The same for gates, the first half of a block's features, and what they multiply, the second:
// `store(gate, up, token, column)` for columns from first_column on.
template <int kFeatures, int kThreads, class Sum, int kSplits, int kTokens, int kPitch, class Store>
__device__ inline void add_up_gated(const Sum (&sums)[kSplits][kTokens][kPitch],
                                    int32_t first_column, int32_t columns, int tokens,
                                    Store store) {
  constexpr int kHalf = kFeatures / 2;
  sums_are_written();
  each_of_cluster<kHalf, kThreads>(first_column, columns, tokens, [&](int token, int32_t column) {
    const int feature = column - first_column;
    store(whole_sum(sums, token, feature), whole_sum(sums, token, feature + kHalf), token, column);
  });
  sums_are_read();
}

}  // namespace fastinfer::cuda
