// Prints configurations of scaled products with few rows, one line a request: M, N, K, SMs, gated.
#include "scaled_mm_config.h"

#include <cstdio>

int main() {
  using namespace fastinfer::cuda;
  long m, n, k, sms, gated;
  while (std::scanf("%ld %ld %ld %ld %ld", &m, &n, &k, &sms, &gated) == 5) {
    const auto config = few_tokens_config(m, (n + 63) / 64, (k + kMmColumns - 1) / kMmColumns,
                                          static_cast<int>(sms), gated != 0);
    std::printf("%d %d %d\n", config.shape.tokens, config.shape.splits, config.cluster);
  }
}
