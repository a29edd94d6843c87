// The end of products that several blocks have formed together.
#pragma once

#include <cstdint>
#include <type_traits>

#include "../ptx/cluster.h"
#include "../ptx/named_barrier.h"
#include "result.cuh"

namespace fastinfer::cuda {

constexpr int kSumsBarrier = 15;  // a named one; kernels have others from 1 on

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

// The whole sum of a cluster's blocks, 1 or an even number, and within them of their parts
// [kSplits]. Two are loaded before one is waited for.
template <class Sum, int kSplits, int kTokens, int kPitch>
__device__ inline Sum whole_sum(const Sum (&sums)[kSplits][kTokens][kPitch], int token,
                                int feature) {
  const uint32_t blocks = ptx::cluster_size();
  Sum sum = 0;
#pragma unroll
  for (int split = 0; split < kSplits; ++split) {
    const Sum* own = &sums[split][token][feature];
    if (blocks == 1) sum += *own;
    for (uint32_t block = 0; block + 1 < blocks; block += 2) {
      const Sum first = ptx::cluster_load(own, block), second = ptx::cluster_load(own, block + 1);
      sum += first;
      sum += second;
    }
  }
  return sum;
}

// Those of eight neighbours; kPitch is a multiple of 4.
template <int kBlocks, class Sum>
__device__ inline void add_eight_of_blocks(const Sum* own, uint32_t first, Sum (&eight)[8]) {
  Sum fours[kBlocks][2][4];
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      ptx::cluster_load_four(own + 4 * i, first + block, fours[block][i]);
    }
  }
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
    for (int i = 0; i < 8; ++i) eight[i] += fours[block][i / 4][i % 4];
  }
}

template <class Sum, int kSplits, int kTokens, int kPitch>
__device__ inline void whole_sums(const Sum (&sums)[kSplits][kTokens][kPitch], int token,
                                  int feature, Sum (&eight)[8]) {
  static_assert(kPitch % 4 == 0);
  const uint32_t blocks = ptx::cluster_size();
#pragma unroll
  for (Sum& sum : eight) sum = 0;
#pragma unroll
  for (int split = 0; split < kSplits; ++split) {
    const Sum* own = &sums[split][token][feature];
    if (blocks == 1) {
#pragma unroll
      for (int i = 0; i < 8; ++i) eight[i] += own[i];
    }
    for (uint32_t block = 0; block + 1 < blocks; block += 2) {
      add_eight_of_blocks<2>(own, block, eight);
    }
  }
}

// Among the kThreads of each block that add up; others may have ended.
template <int kThreads>
__device__ inline void sync_sums_of_block() {
  ptx::named_barrier_sync(kSumsBarrier, kThreads);
}

// Before sums are read, and after the last.
template <int kThreads>
__device__ inline void sums_are_written() {
  if (ptx::cluster_size() == 1) {
    sync_sums_of_block<kThreads>();
  } else {
    ptx::cluster_sync();
  }
}
__device__ inline void sums_are_read() {
  // Nobody reads this block's memory any more.
  if (ptx::cluster_size() > 1) ptx::cluster_sync_relaxed();
}

// The sums to a result (ResultParams), by kThreads of each block between the two above:
// `to_y(sum, row, feature)` is y without its bias. Where rows of the result allow it, eight columns
// at a time. Gates are the first half of a block's features, and what they multiply is the second.
template <int kFeatures, int kThreads, class Sum, int kSplits, int kTokens, int kPitch, class ToY>
__device__ inline void finish_cluster(const ResultParams& r,
                                      const Sum (&sums)[kSplits][kTokens][kPitch],
                                      int32_t first_column, int32_t first_token, int tokens,
                                      ToY to_y) {
  constexpr int kHalf = kFeatures / 2;
  const auto finish = [&]<int kColumns>(std::integral_constant<int, kColumns>) {
    if (r.light && r.out_in_eights) {
      each_of_cluster<kColumns / 8, kThreads>(
          first_column / 8, r.columns / 8, tokens, [&](int token, int32_t eighth) {
            const int64_t row = first_token + token;
            const int32_t column = 8 * eighth;
            finish_eight(r, row, column, [&](bool second, float (&values)[8]) {
              Sum eight[8];
              whole_sums(sums, token, column - first_column + (second ? kHalf : 0), eight);
#pragma unroll
              for (int i = 0; i < 8; ++i) {
                values[i] = to_y(eight[i], row, column + i + (second ? r.columns : 0));
              }
            });
          });
    } else {
      each_of_cluster<kColumns, kThreads>(
          first_column, r.columns, tokens, [&](int token, int32_t column) {
            const int64_t row = first_token + token;
            finish_one(r, row, column, [&](bool second) {
              const int at = column - first_column + (second ? kHalf : 0);
              return to_y(whole_sum(sums, token, at), row, column + (second ? r.columns : 0));
            });
          });
    }
  };
  if (r.gated) {
    finish(std::integral_constant<int, kHalf>{});
  } else {
    finish(std::integral_constant<int, kFeatures>{});
  }
}

}  // namespace fastinfer::cuda
