// How products are cut: pure functions of the shape and the device.
#pragma once

#include <cstdint>

namespace fastinfer::cuda {

constexpr int kFewRows = 16;      // of x, at most
constexpr int kMostNormRows = 8;  // that the product itself normalises
constexpr int kMaxCluster = 8;

// The number of rows that stands for m: all that share it share a measured configuration.
constexpr int64_t rows_bucket(int64_t m) {
  constexpr int64_t kLargest = 8192;
  if (m <= kFewRows) return m <= kFewRows / 2 ? kFewRows / 2 : kFewRows;
  int64_t bucket = 2 * kFewRows;
  while (bucket < m && bucket < kLargest) bucket *= 2;
  return bucket;
}

// A product, by what its configuration depends on.
struct LowBitShape {
  int bits;
  int64_t m, n, k, group_size;

  constexpr bool few_rows() const { return m <= kFewRows; }
  constexpr int64_t n_tiles() const { return (n + 63) / 64; }
  constexpr int64_t k_tiles() const { return (k + 63) / 64; }
  // Some tile of 64 columns has more than one group: kernels of few rows have their own shapes for
  // that, those of many rows do not take it.
  constexpr bool many_scales() const { return group_size < k && group_size % 64 != 0; }
  // Groups that share 128 columns, 1 or 2: what kernels of many rows ask.
  constexpr int stage_groups() const { return group_size >= k || group_size % 128 == 0 ? 1 : 2; }
};

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

// Every warp of a block has a tile of K, or nearly.
constexpr bool few_rows_cluster_usable(FewRowsShape shape, int cluster, int64_t k_tiles) {
  return cluster == 1 || k_tiles / cluster >= shape.warps / 2;
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
    for (int cluster = 1; cluster <= kMaxCluster; cluster *= 2) {
      const int64_t blocks = groups * cluster;
      // Larger clusters do not fit everywhere, and a second wave of them costs as much as the
      // first.
      if (cluster > 1 && blocks > (cluster > 2 ? slots * 9 / 10 : slots)) break;
      if (!few_rows_cluster_usable(shape, cluster, k_tiles)) break;
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

// Of a block: rows of x, and warpgroups that cut K, while its others have other features. `shared`:
// blocks go from tile to tile, and two copy x together.
struct ManyRowsShape {
  int tokens;
  int warpgroups;
  int splits;
  bool shared;
  int stage;  // the time of 128 columns of K, in units of 10 ns, on an H200
};

struct ManyRowsConfig {
  ManyRowsShape shape;
  int cluster;  // blocks that cut K, or parts of it that are added up later if `shared`
};

constexpr ManyRowsShape kManyRowsShapes[] = {{32, 4, 1, false, 103},  {32, 4, 4, false, 95},
                                             {64, 4, 1, false, 110},  {64, 4, 2, false, 120},
                                             {128, 4, 1, false, 181}, {128, 4, 2, false, 210},
                                             {128, 4, 1, true, 150},  {256, 2, 1, true, 135}};

// `groups` that share 128 columns, 1 or 2. Groups of 64 have fewer kernels.
constexpr bool many_rows_shape_usable(int groups, ManyRowsShape shape) {
  return groups == 1 || shape.tokens == 64 || shape.shared;
}

// Every part of K has two stages.
constexpr bool many_rows_cluster_usable(ManyRowsShape shape, int cluster, int64_t k_tiles) {
  const int64_t stages = (k_tiles + 1) / 2, parts = int64_t{shape.splits} * cluster;
  return parts == 1 || stages / parts >= 2;
}

// Whether the sums of parts that are added up later, in fp32, take at most 256 MB.
constexpr bool many_rows_parts_fit(int64_t m, int64_t n_tiles, int parts) {
  return parts == 1 || m <= (int64_t{256} << 20) / (n_tiles * 64 * 4 * parts);
}

// The time of a block is that of its stages and of its beginning and end. A multiprocessor has one
// block. Results that are not light (result.h) have kernels whose blocks make one tile, or parts of
// K; gates and what they multiply lie in one block.
inline ManyRowsConfig many_rows_config(int64_t m, int64_t n_tiles, int64_t k_tiles, int groups,
                                       int sms, bool light = true, bool gated = false) {
  constexpr int64_t kBeginAndEnd = 280;
  constexpr int64_t kAddParts = 300, kPartialBytes = 40'000;
  const int64_t stages = (k_tiles + 1) / 2;
  ManyRowsConfig best{};
  int64_t best_cost = -1;
  for (const ManyRowsShape shape : kManyRowsShapes) {
    if (!many_rows_shape_usable(groups, shape)) continue;
    if (gated && shape.splits == shape.warpgroups) continue;
    const int64_t tiles = shape.warpgroups / shape.splits * (shape.shared ? 2 : 1);
    const int64_t pieces = (n_tiles + tiles - 1) / tiles * ((m + shape.tokens - 1) / shape.tokens);
    for (int cluster = 1; cluster <= kMaxCluster; cluster *= 2) {
      if (!many_rows_cluster_usable(shape, cluster, k_tiles)) break;
      if (shape.shared && cluster == 1 && !light) continue;
      if (shape.shared && !many_rows_parts_fit(m, n_tiles, cluster)) break;
      const int64_t parts = int64_t{shape.splits} * cluster;
      // Larger clusters do not fit everywhere.
      const int64_t slots = shape.shared ? sms / 2 : cluster > 2 ? sms * 9 / 10 : sms;
      if (cluster > 1 && !shape.shared && pieces * cluster > slots) break;
      const int64_t waves = (pieces * cluster + slots - 1) / slots;
      int64_t cost = waves * ((stages + parts - 1) / parts * shape.stage + kBeginAndEnd);
      if (shape.shared && cluster > 1) {
        // Sums in fp32, written and read.
        cost += kAddParts + cluster * m * n_tiles * 64 * 8 / kPartialBytes;
      } else {
        // Sums go from block to block.
        for (int blocks = 2; blocks <= cluster; blocks *= 2) cost += 60 + shape.tokens * 5 / 2;
      }
      if (best_cost < 0 || cost < best_cost) best = {shape, cluster}, best_cost = cost;
    }
  }
  return best;
}

}  // namespace fastinfer::cuda
