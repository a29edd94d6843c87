// Prints the configuration of products of few rows, one line a request: bits, many scales, N, K,
// SMs.
#include <cstdio>

#include "low_bit_config.h"

int main() {
  long bits, many_scales, n, k, sms;
  while (std::scanf("%ld %ld %ld %ld %ld", &bits, &many_scales, &n, &k, &sms) == 5) {
    const auto config =
        fastinfer::cuda::few_rows_config(static_cast<int>(bits), many_scales != 0, (n + 63) / 64,
                                         (k + 63) / 64, static_cast<int>(sms));
    std::printf("%d %d %d\n", config.shape.rows, config.shape.warps, config.cluster);
  }
}
