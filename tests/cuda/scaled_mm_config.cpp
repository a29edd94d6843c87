// Prints configurations of scaled products, one line a request: M, N, K, SMs, gated; of few rows
// the shape and the cluster, and the features of a tile of many, of one scale and of blocks.
#include "scaled_mm_config.h"

#include <cstdio>

int main() {
  using namespace fastinfer::cuda;
  long m, n, k, sms, gated;
  while (std::scanf("%ld %ld %ld %ld %ld", &m, &n, &k, &sms, &gated) == 5) {
    const long stages = (k + kMmColumns - 1) / kMmColumns;
    const auto config =
        few_tokens_config(m, (n + 63) / 64, stages, static_cast<int>(sms), gated != 0);
    const auto features = [&](bool block_scales) {
      return many_tokens_features(m, n, stages, static_cast<int>(sms), block_scales);
    };
    std::printf("%d %d %d %d %d\n", config.shape.tokens, config.shape.splits, config.cluster,
                features(false), features(true));
  }
}
