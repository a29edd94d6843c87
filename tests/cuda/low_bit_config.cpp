// Prints configurations of low-bit products, one line a request: "few" bits, many scales, N, K,
// SMs, or "many" M, N, K, groups of 128 columns, SMs.
#include "low_bit_config.h"

#include <cstdio>
#include <string_view>

namespace {

long tiles(long size) {
  return (size + 63) / 64;
}

}  // namespace

int main() {
  using namespace fastinfer::cuda;
  char kind[8];
  long a, b, n, k, sms;
  while (std::scanf("%7s", kind) == 1) {
    if (std::string_view(kind) == "few") {
      if (std::scanf("%ld %ld %ld %ld %ld", &a, &b, &n, &k, &sms) != 5) return 1;
      const auto config =
          few_rows_config(static_cast<int>(a), b != 0, tiles(n), tiles(k), static_cast<int>(sms));
      std::printf("%d %d %d\n", config.shape.rows, config.shape.warps, config.cluster);
    } else {
      if (std::scanf("%ld %ld %ld %ld %ld", &a, &n, &k, &b, &sms) != 5) return 1;
      const auto config =
          many_rows_config(a, tiles(n), tiles(k), static_cast<int>(b), static_cast<int>(sms));
      const auto& shape = config.shape;
      std::printf("%d %d %d %d %d\n", shape.tokens, shape.warpgroups, shape.splits, shape.shared,
                  config.cluster);
    }
  }
}
