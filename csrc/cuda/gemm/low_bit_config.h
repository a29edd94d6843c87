// How products are cut: pure functions of the shape and the device.
#pragma once

#include <cstdint>

namespace fastinfer::cuda {

// Of a block: rows of 16 output features, and warps.
struct FewRowsShape {
  int rows;
  int warps;
};

struct FewRowsConfig {
  FewRowsShape shape;
  int cluster;  // blocks that share the features and cut K
};

// A multiprocessor has 16 warps at work, so one block of 16 or two of 8.
constexpr int kFewRowsWarpsOfSm = 16;
constexpr FewRowsShape kFewRowsShapes[] = {{4, 16}, {6, 16}, {8, 16}, {4, 8}, {7, 8}, {8, 8}};

// What shared memory holds, in two stages, and whole blocks of codes allow. Groups of 16 and 32
// have one shape: their kernels need many registers.
constexpr bool few_rows_shape_usable(int bits, bool many_scales, FewRowsShape shape) {
  if (bits == 8) return shape.rows == 4 && !(many_scales && shape.warps == 16);
  if (many_scales) return shape.rows == 4 && shape.warps == 8;
  if (bits != 4) return shape.rows == 8 || (shape.rows == 4 && shape.warps == 16);
  return !(shape.rows == 4 && shape.warps == 8);
}

// The time of a block is that of its products (about as many as it has rows and two more, for each
// tile of K) and of its beginning and end; a multiprocessor takes its blocks one after the other.
inline FewRowsConfig few_rows_config(int bits, bool many_scales, int64_t n_tiles, int64_t k_tiles,
                                     int sms) {
  constexpr int64_t kBeginAndEnd = 170;
  FewRowsConfig best{};
  int64_t best_cost = -1;
  for (const FewRowsShape shape : kFewRowsShapes) {
    if (!few_rows_shape_usable(bits, many_scales, shape)) continue;
    const int64_t groups = (4 * n_tiles + shape.rows - 1) / shape.rows;
    const int64_t slots = int64_t{sms} * (kFewRowsWarpsOfSm / shape.warps);
    for (int cluster = 1; cluster <= 8; cluster *= 2) {
      const int64_t blocks = groups * cluster;
      // Larger clusters do not fit everywhere, and a second wave of them costs as much as the
      // first.
      if (cluster > 1 && blocks > (cluster > 2 ? slots * 9 / 10 : slots)) break;
      if (cluster > 1 && k_tiles / cluster < shape.warps / 2) break;
      const int64_t of_sm = (blocks + sms - 1) / sms;
      const int64_t waves = (blocks + slots - 1) / slots;
      int64_t products = of_sm * ((k_tiles + cluster - 1) / cluster) * (shape.rows + 2);
      // Fewer warps than a multiprocessor could have hide less.
      if (of_sm * shape.warps < kFewRowsWarpsOfSm) products = products * 3 / 2;
      const int64_t cost = products + waves * kBeginAndEnd;
      if (best_cost < 0 || cost < best_cost) best = {shape, cluster}, best_cost = cost;
    }
  }
  return best;
}

struct ManyRowsConfig {
  int tokens;   // rows of x of a block: 32, 64 or 128
  int cluster;  // as above
};

// A multiprocessor has one block. As many blocks cut K as find a place at once.
inline ManyRowsConfig many_rows_config(int64_t m, int64_t n_tiles, int64_t k_tiles, int sms) {
  ManyRowsConfig config{m <= 32 ? 32 : m <= 64 ? 64 : 128, 1};
  const int64_t tiles = (n_tiles + 1) / 2 * ((m + config.tokens - 1) / config.tokens);
  constexpr int64_t kLeastTiles = 4;  // of K, of a block
  while (config.cluster < 8) {
    const int wider = 2 * config.cluster;
    const int64_t slots = wider > 2 ? sms * 9 / 10 : sms;
    if (tiles * wider > slots || k_tiles / wider < kLeastTiles) break;
    config.cluster = wider;
  }
  return config;
}

}  // namespace fastinfer::cuda
