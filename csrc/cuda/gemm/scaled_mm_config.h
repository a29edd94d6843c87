// How products of 8-bit matrices are cut: pure functions of the shape and the device.
#pragma once

#include <cstdint>

namespace fastinfer::cuda {

// Rows of a, at most, for which the weights' bytes are what takes time.
constexpr int kMostFewTokens = 64;
constexpr int kMmColumns = 128;  // of K, of a stage

// Of a block: rows of a, and warpgroups that cut K, while its others have other features.
struct FewTokensShape {
  int tokens;
  int splits;
};
constexpr FewTokensShape kFewTokensShapes[] = {{16, 1}, {16, 2}, {16, 4},
                                               {64, 1}, {64, 2}, {64, 4}};
constexpr int kFewTokensWarpgroups = 4;

struct FewTokensConfig {
  FewTokensShape shape;
  int cluster;  // blocks that cut K
};

// n_tiles: of 64 features; stages: of kMmColumns columns. A block's time is that of its stages and
// of its beginning and end; a multiprocessor has one block. Gates and what they multiply lie in one
// block.
inline FewTokensConfig few_tokens_config(int64_t m, int64_t n_tiles, int64_t stages, int sms,
                                         bool gated = false) {
  constexpr int64_t kBeginAndEnd = 3;  // in stages
  FewTokensConfig best{};
  int64_t best_cost = -1;
  for (const FewTokensShape shape : kFewTokensShapes) {
    if (shape.tokens != (m <= 16 ? 16 : 64)) continue;
    if (gated && shape.splits == kFewTokensWarpgroups) continue;
    const int64_t features = kFewTokensWarpgroups / shape.splits;
    const int64_t pieces =
        (n_tiles + features - 1) / features * ((m + shape.tokens - 1) / shape.tokens);
    for (int cluster = 1; cluster <= 8; cluster *= 2) {
      const int64_t parts = int64_t{shape.splits} * cluster;
      if (parts > 1 && stages / parts < 2) break;
      // Larger clusters do not fit everywhere.
      const int64_t slots = cluster > 2 ? sms * 9 / 10 : sms;
      if (cluster > 1 && pieces * cluster > slots) break;
      const int64_t waves = (pieces * cluster + slots - 1) / slots;
      const int64_t cost = waves * ((stages + parts - 1) / parts + kBeginAndEnd);
      if (best_cost < 0 || cost < best_cost) best = {shape, cluster}, best_cost = cost;
    }
  }
  return best;
}

}  // namespace fastinfer::cuda
