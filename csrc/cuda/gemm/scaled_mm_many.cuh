// Products of 8-bit matrices: out = a b^T by wgmma. Raw pointers only; checks, choice and launch
// live in scaled_mm.cu.
//
// Blocks go from tile to tile of 128 rows of a by a number of output features that the shape
// chooses; each of two warpgroups makes 64 rows. Two blocks, of a cluster, have neighbouring rows
// and share what they copy of b. Warps of a third warpgroup copy.
//
// Tensor cores keep some 13 bits below the largest fp8 product or sum; so sums of 512 columns are
// formed apart and are added in fp32, and those of 128 columns, with their scales, where these vary
// along K.
#pragma once

#include "../ptx/cluster.h"
#include "../ptx/convert.h"
#include "../ptx/cp_async.h"
#include "../ptx/grid_dependency.h"
#include "../ptx/named_barrier.h"
#include "../ptx/setmaxnreg.h"
#include "../ptx/stmatrix.h"
#include "../ptx/tma.h"
#include "../ptx/wgmma.h"
#include "../ring.cuh"
#include "result.cuh"
#include "scaled_mm.h"

namespace fastinfer::cuda {

constexpr int kMostSharedBytes = 227 * 1024;  // of a block

template <bool kFp8_, bool kBlocks_, int kFeatures_>
struct ManyTokensTraits {
  static constexpr bool kFp8 = kFp8_;
  static constexpr bool kBlocks = kBlocks_;  // scales vary along K
  static constexpr int kFeatures = kFeatures_;
  static constexpr int kWarpgroups = 2;
  static constexpr int kRows = 64;  // of a warpgroup
  static constexpr int kTokens = kRows * kWarpgroups;
  static constexpr int kThreads = 128 * (kWarpgroups + 1);
  static constexpr int kApart = 4;  // stages whose fp8 sums are formed apart, but for blocks
  static constexpr int kColumnScales = kFeatures / 64;  // of b for a stage, of blocks
  using Element = std::conditional_t<kFp8, __nv_fp8_e4m3, int8_t>;
  using Sum = std::conditional_t<kFp8, float, int32_t>;
  using Mma = ptx::Wgmma<Element, kFeatures>;

  struct alignas(1024) Stage {
    uint8_t a[kWarpgroups][kRows][kMmColumns];  // swizzled by TMA
    uint8_t b[kFeatures][kMmColumns];
  };
  struct Scales {  // of a stage
    float a[kTokens];
    float b[kColumnScales];
  };
  union alignas(16) Staging {
    uint16_t halves[16][64];
    float floats[16][32];
  };
  struct Ends {
    Staging staging[4 * kWarpgroups];  // of a warp
    float b_scales[kWarpgroups][kFeatures];
    float biases[kWarpgroups][kFeatures];
  };
  static constexpr int kStageBytes =
      sizeof(Stage) + (kBlocks ? sizeof(Scales) : 0) + 2 * sizeof(ptx::Mbarrier);
  static constexpr int kStages = (kMostSharedBytes - sizeof(Ends)) / kStageBytes;
  struct Smem {
    Stage stages[kStages];
    Scales scales[kBlocks ? kStages : 1];
    Ends ends;
    ptx::Mbarrier full[kStages];
    ptx::Mbarrier empty[kStages];
  };
};

struct MmTile {
  int32_t first_token, first_column;
};

// Features of a tile: in a row, or gates and then what they multiply.
template <class Traits>
__device__ int32_t feature_of(const ResultParams& r, const MmTile& tile, int i) {
  constexpr int kHalf = Traits::kFeatures / 2;
  return tile.first_column + i + (r.gated && i >= kHalf ? r.columns - kHalf : 0);
}

// By one thread of a warp: a by the first warp, this block's half of b, to both, by the second.
template <class Traits>
__device__ void copy_many_tokens(const ScaledMmParams& p, const ScaledMmMaps& maps,
                                 const MmTile& tile, typename Traits::Smem& smem,
                                 Ring<Traits::kStages>& stage) {
  const int warp = threadIdx.x / 32 % 4;
  constexpr int kHalf = Traits::kFeatures / 2;
  static_assert(kHalf % 8 == 0 && Traits::kTokens == kManyTokensBoxA);
  const int first = ptx::cluster_rank() * kHalf;
#pragma unroll 1
  for (int32_t k = 0; k < p.stages; ++k, stage.next()) {
    auto& to = smem.stages[stage.index];
    auto& full = smem.full[stage.index];
    smem.empty[stage.index].wait(stage.phase ^ 1);
    if (warp == 0) {
      full.arrive_expect(sizeof(to.a));
      ptx::tma_load(to.a, &maps.a, &full, k * kMmColumns, tile.first_token, 0, 0);
    } else {
      full.arrive_expect(sizeof(to.b));
      ptx::tma_load_to_both(to.b[first], &maps.b, &full, k * kMmColumns,
                            feature_of<Traits>(p.result, tile, first), 0, 0);
    }
  }
}

// By a warp: the scales of each stage. Tiles begin at multiples of 64 features, so that each 64 lie
// in one block of b.
template <class Traits>
__device__ void copy_many_tokens_scales(const ScaledMmParams& p, const MmTile& tile,
                                        typename Traits::Smem& smem, Ring<Traits::kStages>& stage) {
  constexpr int kRows = Traits::kTokens / 32;  // of a lane
  const int lane = threadIdx.x % 32;
  const float* a[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    a[i] = p.a_scale.at(min(tile.first_token + 32 * i + lane, p.m - 1), 0);
  }
  const float* b = p.b_scale.at(min(tile.first_column + 64 * lane, p.n - 1), 0);
#pragma unroll 1
  for (int32_t k = 0; k < p.stages; ++k, stage.next()) {
    auto& to = smem.scales[stage.index];
    smem.empty[stage.index].wait(stage.phase ^ 1);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      ptx::cp_async_4(ptx::shared_address(&to.a[32 * i + lane]), a[i], false);
      a[i] += p.a_scale.block_stride;
    }
    if (lane < Traits::kColumnScales) {
      ptx::cp_async_4(ptx::shared_address(&to.b[lane]), b, false);
    }
    b += p.b_scale.block_stride;
    ptx::cp_async_arrive(smem.full[stage.index]);
  }
}

template <class Traits>
struct ManyTokensWarpgroup {
  static constexpr int kElements = Traits::kFeatures / 2;  // of a lane

  const ScaledMmParams& p;
  typename Traits::Smem& smem;
  int warpgroup, warp, lane;
  Ring<Traits::kStages> stage;
  typename Traits::Sum part[kElements];
  float sums[Traits::kFp8 ? kElements : 1];
  // Of the tile's rows, and of two of its features, on their way while it is multiplied.
  float row_scales[2], column_scales[2], column_biases[2];

  __device__ void release(int index) {
    if (lane < 2) smem.empty[index].arrive_remote(lane);
  }

  __device__ int32_t row(const MmTile& tile) const {
    return tile.first_token + 64 * warpgroup + 16 * warp + lane / 4;
  }

  __device__ void begin(const MmTile& tile) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int32_t n =
          min(feature_of<Traits>(p.result, tile, 32 * warp + lane + 128 * i), p.n - 1);
      column_biases[i] = biased(p.result, 0.0f, n);
      row_scales[i] = column_scales[i] = 1.0f;
      if constexpr (!Traits::kBlocks) {
        row_scales[i] = p.a_scale.data[min(row(tile) + 8 * i, p.m - 1) * p.a_scale.row_stride];
        column_scales[i] = p.b_scale.data[n * p.b_scale.row_stride];
      }
    }
    if constexpr (Traits::kFp8) {
#pragma unroll
      for (float& sum : sums) sum = 0.0f;
    }
  }

  __device__ void wait_for_copies() { smem.full[stage.index].wait(stage.phase); }

  struct Operands {  // descriptors
    uint64_t a, b;
  };

  __device__ Operands operands() const {
    const auto& from = smem.stages[stage.index];
    return {ptx::uniform_k_major_descriptor(ptx::shared_address(from.a[warpgroup])),
            ptx::uniform_k_major_descriptor(ptx::shared_address(from.b))};
  }

  __device__ void multiply_stage(const Operands& from, bool add) {
    ptx::wgmma_pin(part);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      Traits::Mma::shared_k_major(part, from.a + 2 * step, from.b + 2 * step, add || step > 0);
    }
    ptx::wgmma_commit();
  }

  __device__ void wait_for_all() {
    ptx::wgmma_wait<0>();
    ptx::wgmma_pin(part);
  }

  __device__ void multiply() {
    const int32_t apart = Traits::kFp8 ? Traits::kApart : p.stages;
#pragma unroll 1
    for (int32_t k = 0; k < p.stages;) {
      const int32_t end = min(k + apart, p.stages);
      int before = stage.index;
#pragma unroll 1
      for (bool add = false; k < end; add = true, ++k) {
        const int here = stage.index;
        const Operands from = operands();
        wait_for_copies();
        multiply_stage(from, add);
        ptx::wgmma_wait<1>();  // the stage before has been read
        if (add) release(before);
        before = here;
        stage.next();
      }
      wait_for_all();
      release(before);
      if constexpr (Traits::kFp8) {
#pragma unroll
        for (int i = 0; i < kElements; ++i) sums[i] += part[i];
      }
    }
  }

  // Of each stage the sums are formed apart, for its scales. The next one's descriptors, and
  // whether its copies have come, are found before these are added, so that its products follow at
  // once.
  __device__ void multiply_blocks() {
    bool copied = false;
    Operands from = operands();
#pragma unroll 1
    for (int32_t k = 0; k < p.stages; ++k) {
      if (!copied) wait_for_copies();
      multiply_stage(from, false);
      const auto& scales = smem.scales[stage.index];
      float factors[2][Traits::kColumnScales];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int j = 0; j < Traits::kColumnScales; ++j) {
          factors[i][j] = scales.a[64 * warpgroup + 16 * warp + 8 * i + lane / 4] * scales.b[j];
        }
      }
      const int here = stage.index;
      stage.next();
      from = operands();
      __syncwarp();  // scales are read before the stage is given back
      wait_for_all();
      release(here);
      copied = smem.full[stage.index].test(stage.phase);
#pragma unroll
      for (int i = 0; i < kElements; ++i) {
        sums[i] = fmaf(factors[i / 2 % 2][i / 32], part[i], sums[i]);
      }
    }
  }

  // sums[i]: row lane / 4 (+ 8) of the warp's 16, features 8 (i / 4) + 2 (lane % 4) (+ 1).
  __device__ float sum(int i) const {
    if constexpr (Traits::kFp8) return sums[i];
    if constexpr (!Traits::kFp8) return __int2float_rn(part[i]);
  }

  // y in columns `column`, which is even, and the next of the tile and row lane / 4 + 8 half; i: of
  // its first sum.
  __device__ float2 two_of_y(int i, int half, int column) const {
    const auto two_of = [&](const float* all) {
      return *reinterpret_cast<const float2*>(all + column);
    };
    const float2 scale = two_of(smem.ends.b_scales[warpgroup]);
    const float2 bias = two_of(smem.ends.biases[warpgroup]);
    return {sum(i) * row_scales[half] * scale.x + bias.x,
            sum(i + 1) * row_scales[half] * scale.y + bias.y};
  }

  __device__ void write(const MmTile& tile) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int column = 32 * warp + lane + 128 * i;
      if (column < Traits::kFeatures) {
        smem.ends.b_scales[warpgroup][column] = column_scales[i];
        smem.ends.biases[warpgroup][column] = column_biases[i];
      }
    }
    ptx::named_barrier_sync(1 + warpgroup, 128);
    const int32_t first_row = tile.first_token + 64 * warpgroup + 16 * warp;
    if (p.result.plain) {
      write_plain(first_row, tile.first_column);
    } else {
      write_finished(first_row, tile.first_column);
    }
    ptx::named_barrier_sync(1 + warpgroup, 128);  // scales and biases have been read
  }

  // 16 rows by at most 64 columns at a time, by way of `staging`, where no two rows of 8 meet in a
  // bank.
  __device__ void write_plain(int32_t first_row, int32_t first_column) {
    const ResultParams& r = p.result;
    const bool bf16 = r.out_format == OutFormat::kBf16;
    auto& staging = smem.ends.staging[4 * warpgroup + warp].halves;
    const auto vector_of = [&](int at, int eight) { return &staging[at][8 * (eight ^ at % 8)]; };
    constexpr int kPairs = Traits::kFeatures / 16;  // of eights of columns
#pragma unroll
    for (int piece = 0; 4 * piece < kPairs; ++piece) {
      const int pairs = min(4, kPairs - 4 * piece);
#pragma unroll
      for (int pair = 0; pair < pairs; ++pair) {
        uint32_t four[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int eight = 2 * (4 * piece + pair) + j / 2;
          const float2 y = two_of_y(4 * eight + 2 * (j % 2), j % 2, 8 * eight + 2 * (lane % 4));
          four[j] = bf16 ? ptx::pack<true>(y.x, y.y) : ptx::pack<false>(y.x, y.y);
        }
        const int matrix = lane / 8;
        ptx::stmatrix_x4(
            ptx::shared_address(vector_of(8 * (matrix % 2) + lane % 8, 2 * pair + matrix / 2)),
            four);
      }
      __syncwarp();
#pragma unroll 1
      for (int i = 0; i < 4; ++i) {
        const int at = 4 * i + lane / 8;
        const int32_t n = first_column + 64 * piece + 8 * (lane % 8), row = first_row + at;
        if (lane % 8 >= 2 * pairs || n >= r.columns || row >= p.m) continue;
        const uint4 vector = *reinterpret_cast<const uint4*>(vector_of(at, lane % 8));
        uint16_t* to = static_cast<uint16_t*>(r.out) + row * r.out_row_stride + n;
        if (r.out_in_eights) {
          *reinterpret_cast<uint4*>(to) = vector;
        } else {
          const uint16_t* values = reinterpret_cast<const uint16_t*>(&vector);
          for (int j = 0; j < 8 && n + j < r.columns; ++j) to[j] = values[j];
        }
      }
      __syncwarp();
    }
  }

  // 16 rows by 16 columns at a time, and what they multiply if they are gates.
  __device__ void write_finished(int32_t first_row, int32_t first_column) {
    const ResultParams& r = p.result;
    constexpr int kHalf = Traits::kFeatures / 2;
    const int columns = r.gated ? kHalf : Traits::kFeatures;
    auto& staging = smem.ends.staging[4 * warpgroup + warp].floats;
#pragma unroll
    for (int piece = 0; piece < Traits::kFeatures / 16; ++piece) {
      if (16 * piece >= columns) break;
#pragma unroll
      for (int i = 0; i < 8; i += 2) {
        const int half = i / 2 % 2, of = 8 * piece + i;
        const int at = lane / 4 + 8 * half, column = 8 * (i / 4) + 2 * (lane % 4);
        const float2 y = two_of_y(of, half, 16 * piece + column);
        staging[at][column] = y.x;
        staging[at][column + 1] = y.y;
        if (r.gated) {
          const float2 up = two_of_y((of + kElements / 2) % kElements, half,
                                     (16 * piece + column + kHalf) % Traits::kFeatures);
          staging[at][16 + column] = up.x;
          staging[at][16 + column + 1] = up.y;
        }
      }
      __syncwarp();
#pragma unroll 1
      for (int i = lane; i < 16 * 16; i += 32) {
        const int at = i / 16, column = i % 16;
        const int32_t row = first_row + at, n = first_column + 16 * piece + column;
        if (row >= p.m || 16 * piece + column >= columns || n >= r.columns) continue;
        const float h = activate(r.activation, staging[at][column]);
        store_finished(r, r.gated ? h * staging[at][16 + column] : h, row, n);
      }
      __syncwarp();
    }
  }
};

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    scaled_mm_many_tokens_kernel(const __grid_constant__ ScaledMmParams p,
                                 const __grid_constant__ ScaledMmMaps maps,
                                 const int32_t token_tiles, const int32_t tiles) {
  extern __shared__ __align__(1024) uint4 memory[];
  auto& smem = reinterpret_cast<typename Traits::Smem&>(memory);
  if (threadIdx.x == 0) {
    for (int i = 0; i < Traits::kStages; ++i) {
      smem.full[i].init(2 + (Traits::kBlocks ? 32 : 0));
      smem.empty[i].init(2 * 4 * Traits::kWarpgroups);
    }
    ptx::fence_mbarrier_init();
  }
  ptx::cluster_sync();

  const int32_t rank = ptx::cluster_rank();
  // Neighbouring clusters have the same features.
  const auto tile_at = [&](int32_t index) {
    const int columns = p.result.gated ? Traits::kFeatures / 2 : Traits::kFeatures;
    return MmTile{(index % token_tiles * 2 + rank) * Traits::kTokens,
                  index / token_tiles * columns};
  };
  const int32_t clusters = gridDim.x / 2, first = blockIdx.x / 2;
  ptx::grid_dependency_wait();
  ptx::grid_dependency_launch();
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
  if (warpgroup == Traits::kWarpgroups) {
    ptx::registers_decrease<40>();
    const int warp = threadIdx.x / 32 % 4;
    Ring<Traits::kStages> stage;
    if (warp < 2 && threadIdx.x % 32 == 0) {
#pragma unroll 1
      for (int32_t i = first; i < tiles; i += clusters) {
        copy_many_tokens<Traits>(p, maps, tile_at(i), smem, stage);
      }
    }
    if constexpr (Traits::kBlocks) {
      if (warp == 2) {
#pragma unroll 1
        for (int32_t i = first; i < tiles; i += clusters) {
          copy_many_tokens_scales<Traits>(p, tile_at(i), smem, stage);
        }
      }
    }
  } else {
    ptx::registers_increase<232>();
    ManyTokensWarpgroup<Traits> w{p, smem, warpgroup, static_cast<int>(threadIdx.x / 32 % 4),
                                  static_cast<int>(threadIdx.x % 32)};
#pragma unroll 1
    for (int32_t i = first; i < tiles; i += clusters) {
      w.begin(tile_at(i));
      if constexpr (Traits::kBlocks) {
        w.multiply_blocks();
      } else {
        w.multiply();
      }
      w.write(tile_at(i));
    }
  }
  __syncwarp();
  ptx::cluster_sync();  // the other block may still release stages here
}

}  // namespace fastinfer::cuda
