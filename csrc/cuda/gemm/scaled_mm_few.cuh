// Products of 8-bit matrices with few rows of a: out^T = b a^T by wgmma, for b's bytes are what
// takes time. Raw pointers only; checks, choice and launch live in scaled_mm.cu.
//
// A warpgroup makes a tile of 64 output features by all of the block's rows of a. The warpgroups
// share out a block's features and its part of K, and the blocks of a cluster cut K further. Of a
// fifth warpgroup two threads copy by TMA, and a warp copies scales that vary along K.
//
// Tensor cores keep some 13 bits below the largest fp8 product or sum; so sums of 128 columns are
// formed apart, and are added in fp32, with their scales where these vary along K.
#pragma once

#include "../ptx/cp_async.h"
#include "../ptx/grid_dependency.h"
#include "../ptx/setmaxnreg.h"
#include "../ptx/tma.h"
#include "../ptx/wgmma.h"
#include "../ring.cuh"
#include "cluster_result.cuh"
#include "range_of_k.cuh"
#include "result.cuh"
#include "scaled_mm.h"

namespace fastinfer::cuda {

template <bool kFp8_, bool kBlocks_, int kTokens_, int kSplits_>
struct FewTokensTraits {
  static constexpr bool kFp8 = kFp8_;
  static constexpr bool kBlocks = kBlocks_;  // scales vary along K
  static constexpr int kTokens = kTokens_;
  static constexpr int kSplits = kSplits_;
  static constexpr int kWarpgroups = kFewTokensWarpgroups;
  static constexpr int kFeatureTiles = kWarpgroups / kSplits;
  static constexpr int kTile = 64;
  static constexpr int kFeatures = kTile * kFeatureTiles;
  static constexpr int kThreads = 128 * (kWarpgroups + 1);
  static constexpr int kRowPitch = kFeatures + 4;
  using Element = std::conditional_t<kFp8, __nv_fp8_e4m3, int8_t>;
  using Sum = std::conditional_t<kFp8, float, int32_t>;
  using Mma = ptx::Wgmma<Element, kTokens>;

  struct alignas(1024) Stage {
    uint8_t b[kWarpgroups][kTile][kMmColumns];  // swizzled by TMA
    uint8_t a[kSplits][kTokens][kMmColumns];
  };
  struct Scales {  // of a stage
    float a[kSplits][kTokens];
    float b[kWarpgroups];
  };
  static constexpr int kMostStages = 220 * 1024 / sizeof(Stage);
  static constexpr int kStages = kMostStages < 8 ? kMostStages : 8;
  using Sums = Sum[kSplits][kTokens][kRowPitch];

  struct Smem {
    union {
      Stage stages[kStages];
      Sums sums;  // when all products are done
    };
    Scales scales[kBlocks ? kStages : 1];
    ptx::Mbarrier full[kStages];
    ptx::Mbarrier empty[kStages];
  };
};

// What a block works on: stages of K, columns of the result and rows of a.
struct MmPart : RangeOfK {
  int32_t first_column, first_token;

  // Of a tile of 64: features in a row, or gates and then what they multiply.
  template <int kTiles>
  __device__ int32_t first_feature(const ResultParams& r, int i) const {
    const bool up = r.gated && i >= kTiles / 2;
    return first_column + 64 * i + (up ? r.columns - 64 * (kTiles / 2) : 0);
  }
};

// The first stages of b. They may still be written: L2 has what is written later as well.
template <class Traits>
__device__ void prefetch_b(const ScaledMmParams& p, const ScaledMmMaps& maps, const MmPart& part) {
  for (int split = 0; split < Traits::kSplits; ++split) {
    const int32_t first = part.first_of<Traits::kSplits>(split);
    const int32_t end = part.first_of<Traits::kSplits>(split + 1);
    for (int32_t k = first; k < end && k < first + Traits::kStages; ++k) {
      for (int i = 0; i < Traits::kFeatureTiles; ++i) {
        ptx::tma_prefetch_l2(&maps.b, k * kMmColumns,
                             part.first_feature<Traits::kFeatureTiles>(p.result, i), 0, 0);
      }
    }
  }
}

// By one thread of a warp: b by the first warp, a by the second.
template <class Traits>
__device__ void copy_few_tokens(const ScaledMmParams& p, const ScaledMmMaps& maps,
                                const MmPart& part, typename Traits::Smem& smem) {
  const int warp = threadIdx.x / 32 % 4;
  if (warp > 1 || threadIdx.x % 32 != 0) return;
  if (warp == 0) prefetch_b<Traits>(p, maps, part);
  ptx::grid_dependency_wait();  // a, and b too, may be what the kernel before writes
  ptx::grid_dependency_launch();
  constexpr uint32_t kBytesB = Traits::kTile * kMmColumns;
  constexpr uint32_t kBytesA = Traits::kTokens * kMmColumns;
  Ring<Traits::kStages> stage;
  const int32_t stages = part.stages<Traits::kSplits>();
#pragma unroll 1
  for (int32_t j = 0; j < stages; ++j, stage.next()) {
    auto& to = smem.stages[stage.index];
    auto& full = smem.full[stage.index];
    bool has[Traits::kSplits];
    int32_t column[Traits::kSplits];
    int parts = 0;
#pragma unroll
    for (int split = 0; split < Traits::kSplits; ++split) {
      const int32_t k = part.first_of<Traits::kSplits>(split) + j;
      has[split] = k < part.first_of<Traits::kSplits>(split + 1);
      column[split] = k * kMmColumns;
      parts += has[split];
    }
    smem.empty[stage.index].wait(stage.phase ^ 1);
    full.arrive_expect(parts * (warp == 0 ? kBytesB * Traits::kFeatureTiles : kBytesA));
#pragma unroll
    for (int split = 0; split < Traits::kSplits; ++split) {
      if (!has[split]) continue;
      if (warp == 1) {
        ptx::tma_load(to.a[split], &maps.a, &full, column[split], part.first_token, 0, 0);
        continue;
      }
#pragma unroll
      for (int i = 0; i < Traits::kFeatureTiles; ++i) {
        ptx::tma_load(to.b[split * Traits::kFeatureTiles + i], &maps.b, &full, column[split],
                      part.first_feature<Traits::kFeatureTiles>(p.result, i), 0, 0);
      }
    }
  }
}

// By a third warp, where scales vary along K.
template <class Traits>
__device__ void copy_few_tokens_scales(const ScaledMmParams& p, const MmPart& part,
                                       typename Traits::Smem& smem) {
  constexpr int kRows = (Traits::kTokens + 31) / 32;  // of a lane
  const int lane = threadIdx.x % 32, tile = min(lane, Traits::kFeatureTiles - 1);
  const float* a[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    a[i] = p.a_scale.at(min(part.first_token + 32 * i + lane, p.m - 1), 0);
  }
  const int32_t feature = part.first_feature<Traits::kFeatureTiles>(p.result, tile);
  const float* b = p.b_scale.at(min(feature, p.n - 1), 0);
  ptx::grid_dependency_wait();
  Ring<Traits::kStages> stage;
  const int32_t stages = part.stages<Traits::kSplits>();
#pragma unroll 1
  for (int32_t j = 0; j < stages; ++j, stage.next()) {
    auto& to = smem.scales[stage.index];
    smem.empty[stage.index].wait(stage.phase ^ 1);
#pragma unroll
    for (int split = 0; split < Traits::kSplits; ++split) {
      // Nobody multiplies by those of a part that has ended.
      const int64_t k = min(part.first_of<Traits::kSplits>(split) + j, p.stages - 1);
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        if (32 * i + lane >= Traits::kTokens) continue;
        ptx::cp_async_4(ptx::shared_address(&to.a[split][32 * i + lane]),
                        a[i] + k * p.a_scale.block_stride, false);
      }
      if (lane == tile) {
        ptx::cp_async_4(ptx::shared_address(&to.b[split * Traits::kFeatureTiles + tile]),
                        b + k * p.b_scale.block_stride, false);
      }
    }
    ptx::cp_async_arrive(smem.full[stage.index]);
  }
}

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    scaled_mm_few_tokens_kernel(const __grid_constant__ ScaledMmParams p,
                                const __grid_constant__ ScaledMmMaps maps,
                                const int32_t token_tiles) {
  extern __shared__ __align__(1024) uint4 memory[];
  auto& smem = reinterpret_cast<typename Traits::Smem&>(memory);
  const uint32_t rank = ptx::cluster_rank(), blocks = ptx::cluster_size();
  const auto first_of = [&](uint32_t block) {
    return static_cast<int32_t>(int64_t{p.stages} * block / blocks);
  };
  // Neighbouring blocks share features.
  const int32_t index = blockIdx.x / blocks;
  const int columns = p.result.gated ? Traits::kFeatures / 2 : Traits::kFeatures;
  const MmPart part{{first_of(rank), first_of(rank + 1)},
                    index / token_tiles * columns,
                    index % token_tiles * Traits::kTokens};
  if (threadIdx.x == 0) {
    for (int i = 0; i < Traits::kStages; ++i) {
      smem.full[i].init(2 + (Traits::kBlocks ? 32 : 0));
      smem.empty[i].init(4 * Traits::kWarpgroups);
    }
    ptx::fence_mbarrier_init();
  }
  __syncthreads();

  constexpr int kElements = Traits::kTokens / 2;  // of a lane
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
  if (warpgroup == Traits::kWarpgroups) {
    ptx::registers_decrease<32>();
    if constexpr (Traits::kBlocks) {
      if (threadIdx.x / 32 % 4 == 2) copy_few_tokens_scales<Traits>(p, part, smem);
    }
    copy_few_tokens<Traits>(p, maps, part, smem);
  } else {
    constexpr int kThreads = 128 * Traits::kWarpgroups;
    ptx::registers_increase<112>();
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    const int split = warpgroup / Traits::kFeatureTiles;
    const int32_t first = part.first_of<Traits::kSplits>(split);
    const int32_t end = part.first_of<Traits::kSplits>(split + 1);
    typename Traits::Sum part_sums[kElements] = {};
    float sums[kElements] = {};
    Ring<Traits::kStages> stage;
    const int32_t stages = part.stages<Traits::kSplits>();
#pragma unroll 1
    for (int32_t k = first; k < first + stages; ++k, stage.next()) {
      const auto& from = smem.stages[stage.index];
      const uint64_t b = ptx::uniform_k_major_descriptor(ptx::shared_address(from.b[warpgroup]));
      const uint64_t a = ptx::uniform_k_major_descriptor(ptx::shared_address(from.a[split]));
      smem.full[stage.index].wait(stage.phase);
      if (k < end) {  // a part of K may be a stage shorter than the others
        ptx::wgmma_pin(part_sums);
        ptx::wgmma_fence();
#pragma unroll
        for (int step = 0; step < 4; ++step) {
          Traits::Mma::shared_k_major(part_sums, b + 2 * step, a + 2 * step,
                                      !Traits::kFp8 || step > 0);
        }
        ptx::wgmma_commit();
        float2 scales[Traits::kBlocks ? Traits::kTokens / 8 : 1];
        if constexpr (Traits::kBlocks) {
          const auto& of_stage = smem.scales[stage.index];
          const float b_scale = of_stage.b[warpgroup];
#pragma unroll
          for (int i = 0; i < Traits::kTokens / 8; ++i) {
            const int token = 8 * i + 2 * (lane % 4);
            scales[i] = *reinterpret_cast<const float2*>(&of_stage.a[split][token]);
            scales[i].x *= b_scale, scales[i].y *= b_scale;
          }
        }
        ptx::wgmma_wait<0>();
        ptx::wgmma_pin(part_sums);
        if constexpr (Traits::kBlocks) {
#pragma unroll
          for (int i = 0; i < kElements; ++i) {
            const float2 two = scales[i / 4];
            sums[i] = fmaf(i % 2 == 0 ? two.x : two.y, part_sums[i], sums[i]);
          }
          __syncwarp();  // scales are read before the stage is given back
        } else if constexpr (Traits::kFp8) {
#pragma unroll
          for (int i = 0; i < kElements; ++i) sums[i] += part_sums[i];
        }
      }
      if (lane == 0) smem.empty[stage.index].arrive();
    }
    sync_sums_of_block<kThreads>();  // all stages have been read
    // sums[i]: features 16 warp + lane / 4 (+ 8) of tokens 8 (i / 4) + 2 (lane % 4) (+ 1).
    const int feature = warpgroup % Traits::kFeatureTiles * Traits::kTile + 16 * warp + lane / 4;
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      const int token = 8 * (i / 4) + 2 * (lane % 4) + i % 2;
      auto& to = smem.sums[split][token][feature + 8 * (i / 2 % 2)];
      if constexpr (Traits::kFp8) to = sums[i];
      if constexpr (!Traits::kFp8) to = part_sums[i];
    }
    sums_are_written<kThreads>();
    ptx::grid_dependency_wait();
    finish_cluster<Traits::kFeatures, kThreads>(
        p.result, smem.sums, part.first_column, part.first_token,
        min(Traits::kTokens, p.m - part.first_token),
        [&](typename Traits::Sum sum, int64_t row, int32_t n) {
          float y = static_cast<float>(sum);
          if constexpr (!Traits::kBlocks) {
            y *= p.a_scale.data[row * p.a_scale.row_stride];
            y *= p.b_scale.data[n * p.b_scale.row_stride];
          }
          return y;
        });
    sums_are_read();
  }
}

}  // namespace fastinfer::cuda
