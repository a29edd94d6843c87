// How products of 8-bit matrices are cut: pure functions of the shape and the device.
#pragma once

#include <cstdint>
#include <span>

namespace fastinfer::cuda {

// Rows of a that a block has, at most, where the weights' bytes are what takes time: up to twice as
// many rows in all.
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

// Features of a tile with many tokens. Two blocks share what they copy of b, each half of it, in
// boxes of whole swizzle atoms of 8 rows; wgmma on int8 takes multiples of 16. Any other width
// would save less than 0.3 % in the mean of usual shapes.
constexpr int kManyTokensFeatures[] = {192, 176, 160, 128, 96, 64};
// Where scales vary along K, each 64 features have those of one block.
constexpr int kManyTokensBlockFeatures[] = {192, 128, 64};
constexpr int kManyTokensRows = 256;  // of a that two blocks have

constexpr std::span<const int> many_tokens_widths(bool block_scales) {
  if (block_scales) return kManyTokensBlockFeatures;
  return kManyTokensFeatures;
}

// A pair of blocks goes from tile to tile. Times are in those of a feature of a stage; constants
// are measured. Of tiles that take equally long, larger ones read less.
inline int many_tokens_features(int64_t m, int64_t n, int64_t stages, int sms, bool block_scales) {
  constexpr int64_t kOfStage = 64, kBeginAndEnd = 384;
  const int64_t token_tiles = (m + kManyTokensRows - 1) / kManyTokensRows, pairs = sms / 2;
  int best = 0;
  int64_t best_cost = -1;
  for (const int features : many_tokens_widths(block_scales)) {
    const int64_t tiles = (n + features - 1) / features * token_tiles;
    const int64_t waves = (tiles + pairs - 1) / pairs;
    const int64_t cost = waves * (stages * (features + kOfStage) + kBeginAndEnd);
    if (best_cost < 0 || cost < best_cost) best = features, best_cost = cost;
  }
  return best;
}

}  // namespace fastinfer::cuda
