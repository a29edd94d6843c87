// What low-bit products of many rows have in shared memory, and the warps that copy it there.
#pragma once

#include <type_traits>
#include <utility>

#include "../ptx/cluster.h"
#include "../ptx/cp_async.h"
#include "../ptx/grid_dependency.h"
#include "../ptx/tma.h"
#include "../ptx/wgmma.h"
#include "../ring.cuh"
#include "low_bit_codes.cuh"
#include "low_bit_gemm.h"
#include "low_bit_scales.cuh"
#include "range_of_k.cuh"

namespace fastinfer::cuda {

// kSplits of the warpgroups share features and cut K. kGroups of K share the columns of a stage.
// kShared: two blocks copy x together, and go from tile to tile.
template <class T_, int kBits_, int kTokens_, int kWarpgroups_, int kSplits_, int kGroups_,
          bool kShared_>
struct ManyRowsTraits {
  using T = T_;
  static constexpr int kBits = kBits_;
  static constexpr int kTokens = kTokens_;
  static constexpr int kWarpgroups = kWarpgroups_;
  static constexpr int kSplits = kSplits_;
  static constexpr int kGroups = kGroups_;
  static constexpr bool kShared = kShared_;
  using Codes = LowBitCodes<T, kBits, true>;
  using Mma = ptx::Wgmma<T, kTokens>;
  static constexpr int kTile = 64;       // features of a warpgroup, and columns of a packed tile
  static constexpr int kStageTiles = 2;  // along K
  static constexpr int kFeatureTiles = kWarpgroups / kSplits;
  static constexpr int kFeatures = kTile * kFeatureTiles;
  static constexpr int kThreads = 128 * (kWarpgroups + 1);
  // Registers are given out anew among what the block was launched with.
  static constexpr int kRegisters = kWarpgroups == 4 ? 112 : 232;
  static constexpr int kCopyRegisters = kWarpgroups == 4 ? 32 : 40;
  static_assert(kWarpgroups * kRegisters + kCopyRegisters <=
                (kWarpgroups + 1) * (65536 / kThreads / 8 * 8));
  static constexpr int kPartSteps = kTokens == 128 ? 2 : 4;  // registers for two parts of weights
  static constexpr int kTileVectors = 32 * kBits;            // of packed weights
  static constexpr int kRowPitch = kFeatures + 4;  // no two quads of a warp meet in a bank

  struct Stage {
    T x[kSplits][kStageTiles][kTokens][kTile];  // swizzled by TMA
    uint4 weights[kWarpgroups][kStageTiles][kTileVectors];
    uint32_t scales[kWarpgroups][kGroups][2][kTile];  // and zeros, as they are stored
  };
  static constexpr int kStageBytes = (sizeof(Stage) + 1023) / 1024 * 1024;
  struct alignas(1024) PaddedStage : Stage {};
  static_assert(sizeof(PaddedStage) == kStageBytes);
  using Staging = T[16][kTile];  // of a warpgroup
  using Sums = float[kSplits][kTokens][kRowPitch];
  static constexpr int kStagingBytes = kShared ? kWarpgroups * sizeof(Staging) : 0;
  static constexpr int kMostStages = (226 * 1024 - kStagingBytes) / kStageBytes;
  static constexpr int kStages = kMostStages < 8 ? kMostStages : 8;
  static_assert(kStages >= 2);  // one is given back when products of the next are queued

  struct SharedSmem {
    PaddedStage stages[kStages];
    alignas(16) Staging staging[kWarpgroups];
    ptx::Mbarrier full[kStages];
    ptx::Mbarrier empty[kStages];
  };
  struct OwnSmem {
    union {
      PaddedStage stages[kStages];
      Sums sums;  // when all products are done
    };
    ptx::Mbarrier full[kStages];
    ptx::Mbarrier empty[kStages];
  };
  using Smem = std::conditional_t<kShared, SharedSmem, OwnSmem>;
};

// What a block works on: stages of K, tiles of N and rows of x.
struct ManyRowsTile : RangeOfK {
  int32_t first_tile, first_token;
  int32_t part = 0;  // of those that are added up later
};

// A tile of N of a block: features in a row, or gates and then what they multiply.
template <class Traits>
__device__ int32_t n_tile_of(const LowBitParams& p, const ManyRowsTile& tile, int i) {
  constexpr int kHalf = Traits::kFeatureTiles / 2;
  const bool up = p.result.gated && i >= kHalf;
  // Past the last tile it is read again; nobody writes what comes of it.
  return min(tile.first_tile + i + (up ? p.n_tiles / 2 - kHalf : 0), p.n_tiles - 1);
}

template <class Traits>
__device__ const uint4* stage_weights(const LowBitParams& p, int32_t n_tile, int32_t k) {
  const int64_t tiles = int64_t{n_tile} * p.k_tiles + k * Traits::kStageTiles;
  return p.qweight + tiles * Traits::kTileVectors;
}

// Its bytes; the last one's second tile of K may be missing.
template <class Traits>
__device__ uint32_t stage_weight_bytes(const LowBitParams& p, int32_t k) {
  return min(Traits::kStageTiles, p.k_tiles - k * Traits::kStageTiles) * 16 * Traits::kTileVectors;
}

// Before anything may be read that an earlier kernel writes: the weights are only brought into L2.
template <class Traits>
__device__ void copy_begin(const LowBitParams& p, const ManyRowsTile& tile) {
  if (threadIdx.x % 128 == 0) {
    for (int split = 0; split < Traits::kSplits; ++split) {
      const int32_t first = tile.first_of<Traits::kSplits>(split);
      const int32_t end = tile.first_of<Traits::kSplits>(split + 1);
      for (int32_t k = first; k < end && k < first + Traits::kStages; ++k) {
        for (int i = 0; i < Traits::kFeatureTiles; ++i) {
          ptx::prefetch_l2(stage_weights<Traits>(p, n_tile_of<Traits>(p, tile, i), k),
                           stage_weight_bytes<Traits>(p, k));
        }
      }
    }
  }
  ptx::grid_dependency_wait();
  ptx::grid_dependency_launch();
}

// By the warps of a warpgroup: one copies x, two the weights, and one scales and zeros. Each counts
// what it copies.
template <class Traits>
__device__ void copy_x(const CUtensorMap* x_map, const ManyRowsTile& tile,
                       typename Traits::Smem& smem, Ring<Traits::kStages>& stage) {
  constexpr uint32_t kBytes =
      sizeof(typename Traits::T) * Traits::kStageTiles * Traits::kTokens * Traits::kTile;
  if (threadIdx.x % 32 != 0) return;
  const int32_t stages = tile.stages<Traits::kSplits>();
  int32_t column[Traits::kSplits], left[Traits::kSplits];
#pragma unroll
  for (int split = 0; split < Traits::kSplits; ++split) {
    const int32_t first = tile.first_of<Traits::kSplits>(split);
    column[split] = first * Traits::kStageTiles * Traits::kTile;
    left[split] = tile.first_of<Traits::kSplits>(split + 1) - first;
  }
#pragma unroll 1
  for (int32_t j = 0; j < stages; ++j, stage.next()) {
    auto& to = smem.stages[stage.index];
    auto& full = smem.full[stage.index];
    uint32_t bytes = 0;
#pragma unroll
    for (int split = 0; split < Traits::kSplits; ++split) bytes += j < left[split] ? kBytes : 0;
    smem.empty[stage.index].wait(stage.phase ^ 1);
    full.arrive_expect(bytes);
#pragma unroll
    for (int split = 0; split < Traits::kSplits; ++split) {
#pragma unroll
      for (int i = 0; i < Traits::kStageTiles; ++i) {
        if constexpr (Traits::kShared) {
          constexpr int kHalf = Traits::kTokens / 2;
          const int first = ptx::cluster_rank() * kHalf;
          ptx::tma_load_to_both(to.x[split][i][first], x_map, &full, column[split],
                                tile.first_token + first, 0, 0);
        } else if (j < left[split]) {
          ptx::tma_load(to.x[split][i], x_map, &full, column[split], tile.first_token, 0, 0);
        }
        column[split] += Traits::kTile;
      }
    }
  }
}

// Those of `kCount` warpgroups from `first` on.
template <class Traits, int kCount>
__device__ void copy_weights(const LowBitParams& p, const ManyRowsTile& tile, int first,
                             typename Traits::Smem& smem, Ring<Traits::kStages>& stage) {
  if (threadIdx.x % 32 != 0) return;
  const int32_t stages = tile.stages<Traits::kSplits>();
  const uint4* from[kCount];
  int32_t k[kCount], end[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int split = (first + i) / Traits::kFeatureTiles;
    k[i] = tile.first_of<Traits::kSplits>(split);
    end[i] = tile.first_of<Traits::kSplits>(split + 1);
    from[i] = stage_weights<Traits>(
        p, n_tile_of<Traits>(p, tile, (first + i) % Traits::kFeatureTiles), k[i]);
  }
#pragma unroll 1
  for (int32_t j = 0; j < stages; ++j, stage.next()) {
    auto& to = smem.stages[stage.index];
    auto& full = smem.full[stage.index];
    uint32_t bytes[kCount], all = 0;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      bytes[i] = k[i] < end[i] ? stage_weight_bytes<Traits>(p, k[i]) : 0;
      all += bytes[i];
    }
    smem.empty[stage.index].wait(stage.phase ^ 1);
    full.arrive_expect(all);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (bytes[i] > 0) ptx::bulk_load(to.weights[first + i], from[i], bytes[i], &full);
      from[i] += Traits::kStageTiles * Traits::kTileVectors;
      ++k[i];
    }
  }
}

// Scales or zeros of a warpgroup's groups, a lane each; where they cannot be copied as they are,
// all lanes take part.
template <class Traits>
__device__ void copy_scales(const LowBitParams& p, const ManyRowsTile& tile,
                            typename Traits::Smem& smem, Ring<Traits::kStages>& stage) {
  constexpr int kColumns = Traits::kStageTiles * Traits::kTile / Traits::kGroups;  // of a group
  constexpr int kItems = Traits::kWarpgroups * Traits::kGroups * 2;
  const int lane = threadIdx.x % 32;
  const int of = lane % kItems / 2 / Traits::kGroups, i = lane / 2 % Traits::kGroups;
  const int split = of / Traits::kFeatureTiles;
  const int size = p.scale_format == FloatFormat::kFloat ? 4 : 2;
  const int32_t first = tile.first_of<Traits::kSplits>(split);
  const int32_t left = tile.first_of<Traits::kSplits>(split + 1) - first;
  const int32_t n_tile = n_tile_of<Traits>(p, tile, of % Traits::kFeatureTiles);
  const int32_t features = min(Traits::kTile, p.n - n_tile * Traits::kTile);
  const char* values = static_cast<const char*>(lane % 2 == 0 ? p.scales : p.zeros);
  const bool mine = lane < kItems && values != nullptr;
  values += int64_t{n_tile} * Traits::kTile * size;
  const int32_t stages = tile.stages<Traits::kSplits>();
#pragma unroll 1
  for (int32_t j = 0; j < stages; ++j, stage.next()) {
    auto& to = smem.stages[stage.index];
    auto& full = smem.full[stage.index];
    const bool some = mine && j < left;
    // The last stage's second half may lie past the last group.
    const int32_t column = min(((first + j) * Traits::kGroups + i) * kColumns, p.k - 1);
    const char* from = values + int64_t{p.group_size.quotient(column)} * p.n * size;
    smem.empty[stage.index].wait(stage.phase ^ 1);
    if (p.scales_by_bulk) {
      const uint32_t bytes = some ? features * size : 0;
      const uint32_t all = __reduce_add_sync(~0u, bytes);
      if (lane == 0) full.arrive_expect(all);
      __syncwarp();
      if (some) ptx::bulk_load(to.scales[of][i][lane % 2], from, bytes, &full);
    } else {
      for (int item = 0; item < kItems; ++item) {
        if (!__shfl_sync(~0u, some, item)) continue;
        const uint64_t row = __shfl_sync(~0u, reinterpret_cast<uint64_t>(from), item);
        const int many = __shfl_sync(~0u, features, item);
        for (int n = lane; n < many; n += 32) {
          copy_scalar(to.scales[item / 2 / Traits::kGroups][item / 2 % Traits::kGroups][item % 2],
                      reinterpret_cast<const char*>(row), n, size);
        }
      }
      __syncwarp();
      if (lane == 0) full.arrive();
    }
  }
}

template <class Traits>
__device__ void copy_tile(const LowBitParams& p, const CUtensorMap* x_map, const ManyRowsTile& tile,
                          typename Traits::Smem& smem, Ring<Traits::kStages>& stage) {
  constexpr int kHalf = Traits::kWarpgroups / 2;
  switch (threadIdx.x / 32 % 4) {
    case 0: return copy_x<Traits>(x_map, tile, smem, stage);
    case 1: return copy_weights<Traits, kHalf>(p, tile, 0, smem, stage);
    case 2: return copy_weights<Traits, kHalf>(p, tile, kHalf, smem, stage);
    default: return copy_scales<Traits>(p, tile, smem, stage);
  }
}
constexpr int kCopyArrivals = 4;

}  // namespace fastinfer::cuda
