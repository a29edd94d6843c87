// Weight-only quantized products for more rows of x: out = x W^T by wgmma. Raw pointers only;
// checks, choice and launch live in low_bit_gemm.cu.
//
// A block takes 128 output features and a tile of rows of x. One warp copies, tile after tile of 64
// columns of K: rows of x by TMA, packed weights as they are. Each of two warpgroups makes 64
// features' codes, less their zeros, the first operand of wgmma in registers, where a warp finds
// its 16 features as they are packed; x is the second, in shared memory. So the product is
// transposed. Sums of a group are formed apart, of exact codes, and get the group's scale in fp32.
// Where there are fewer tiles than multiprocessors, the blocks of a cluster cut K.
//
// What a zero is more than an integer is a product of its own, with the sum of x.
#pragma once

#include "../attention/ring.cuh"
#include "../ptx/convert.h"
#include "../ptx/cp_async.h"
#include "../ptx/grid_dependency.h"
#include "../ptx/named_barrier.h"
#include "../ptx/setmaxnreg.h"
#include "../ptx/tma.h"
#include "../ptx/wgmma.h"
#include "low_bit_codes.cuh"
#include "low_bit_gemm.h"
#include "low_bit_result.cuh"

namespace fastinfer::cuda {

template <class T_, int kBits_, int kTokens_>
struct ManyRowsTraits {
  using T = T_;
  static constexpr int kBits = kBits_;
  static constexpr int kTokens = kTokens_;
  using Codes = LowBitCodes<T, kBits, true>;
  using Mma = ptx::Wgmma<T, kTokens>;
  static constexpr int kTile = 64;  // features of a warpgroup, and columns of K
  static constexpr int kWarpgroups = 2;
  static constexpr int kFeatures = kTile * kWarpgroups;
  static constexpr int kThreads = 128 * (kWarpgroups + 1);
  static constexpr int kTileVectors = 32 * kBits;  // of packed weights
  static constexpr int kRowPitch = kFeatures + 4;  // no two quads of a warp meet in a bank

  struct Stage {
    T x[kTokens][kTile];  // swizzled by TMA
    uint4 weights[kWarpgroups][kTileVectors];
  };
  static_assert(sizeof(Stage) % 1024 == 0);
  static constexpr int kStageBytes = sizeof(Stage);
  static constexpr int kMostStages = 196 * 1024 / kStageBytes;
  static constexpr int kStages = kMostStages < 8 ? kMostStages : 8;

  struct Smem {
    union {
      Stage stages[kStages];
      float sums[kTokens][kRowPitch];  // when all products are done
    };
    ptx::Mbarrier full[kStages];
    ptx::Mbarrier empty[kStages];
  };
};

// What a block works on.
struct ManyRowsTile {
  int32_t first_tile;   // of N
  int32_t first_token;  // of x
  int32_t begin, end;   // tiles of K
};

template <class Traits>
__device__ void copy_tiles(const LowBitParams& p, const CUtensorMap* x_map,
                           const ManyRowsTile& tile, typename Traits::Smem& smem) {
  const auto weights = [&](int half, int32_t k_tile) {
    // Past the last tile it is read again; nobody writes what comes of it.
    const int32_t n_tile = min(tile.first_tile + half, p.n_tiles - 1);
    return p.qweight + (int64_t{n_tile} * p.k_tiles + k_tile) * Traits::kTileVectors;
  };
  constexpr uint32_t kWeightBytes = 16 * Traits::kTileVectors;
  for (int32_t k = tile.begin; k < tile.end && k < tile.begin + Traits::kStages; ++k) {
#pragma unroll
    for (int half = 0; half < Traits::kWarpgroups; ++half) {
      ptx::prefetch_l2(weights(half, k), kWeightBytes);
    }
  }
  ptx::grid_dependency_wait();  // x may be what the kernel before writes
  ptx::grid_dependency_launch();
  Ring<Traits::kStages> stage;
  for (int32_t k = tile.begin; k < tile.end; ++k, stage.next()) {
    auto& to = smem.stages[stage.index];
    auto& full = smem.full[stage.index];
    smem.empty[stage.index].wait(stage.phase ^ 1);
    full.arrive_expect(Traits::kStageBytes);
    ptx::tma_load(to.x, x_map, &full, k * Traits::kTile, tile.first_token, 0, 0);
#pragma unroll
    for (int half = 0; half < Traits::kWarpgroups; ++half) {
      ptx::bulk_load(to.weights[half], weights(half, k), kWeightBytes, &full);
    }
  }
}

// Scales and zeros of a lane's two features, 8 apart, for one group.
struct GroupOfTwo {
  float scale[2];
  float zero[2];
};

template <class Traits>
struct ManyRowsWarpgroup {
  using T = typename Traits::T;
  using Codes = typename Traits::Codes;
  static constexpr int kElements = Traits::kTokens / 2;  // of a lane

  const LowBitParams& p;
  typename Traits::Smem& smem;
  int warpgroup, warp, lane;
  int32_t first_feature;  // of the lane; the other is 8 further
  float sums[kElements];
  float part[kElements];   // of the group
  uint32_t zero_pairs[2];  // offset and integer part of the zeros, in the codes' units
  uint32_t rest[4];        // operand A of what is left of the zeros, negative
  bool has_rest;           // some lane's of the warpgroup is not 0

  __device__ GroupOfTwo load_group(int32_t k_tile) const {
    const int64_t group = p.group_size.quotient(min(k_tile * Traits::kTile, p.k - 1));
    GroupOfTwo two;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int64_t at = group * p.n + min(first_feature + 8 * i, p.n - 1);
      two.scale[i] = load_scalar(p.scales, p.scale_format, at);
      two.zero[i] =
          p.zeros == nullptr ? 1 << (Traits::kBits - 1) : load_scalar(p.zeros, p.scale_format, at);
    }
    return two;
  }

  __device__ static uint32_t pair_of_both(float value) {
    return ptx::pack<Codes::kBf16>(value, value);
  }
  __device__ static uint32_t subtract(uint32_t a, uint32_t b) {
    return Codes::kBf16 ? ptx::sub_bf16x2(a, b) : ptx::sub_f16x2(a, b);
  }

  __device__ void begin_group(const GroupOfTwo& group) {
    bool some = false;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float whole = rintf(group.zero[i]);
      zero_pairs[i] = pair_of_both(Codes::kOffset + whole * Codes::unit(i));
      rest[i] = rest[i + 2] = pair_of_both((whole - group.zero[i]) * Codes::unit(i));
      some = some || group.zero[i] != whole;
    }
    has_rest = p.zeros != nullptr && ptx::named_barrier_any(1 + warpgroup, 128, some);
  }

  __device__ void decode(const typename Traits::Stage& stage, uint32_t (&a)[4][4]) const {
    const int block = warp / Codes::kRows, row = warp % Codes::kRows;
    const uint4* from = stage.weights[warpgroup] + block * (32 * Codes::kLoads) + lane;
    uint32_t words[Codes::kWords];
#pragma unroll
    for (int j = 0; j < Codes::kLoads; ++j) {
      const uint4 four = from[32 * j];
      words[4 * j] = four.x, words[4 * j + 1] = four.y;
      words[4 * j + 2] = four.z, words[4 * j + 3] = four.w;
    }
    // The words of this warp's features, in the place of the block's first.
    if constexpr (Codes::kRows > 1) {
      constexpr int kWordsOfRow = Codes::kWords / Codes::kRows;
#pragma unroll
      for (int other = 1; other < Codes::kRows; ++other) {
#pragma unroll
        for (int i = 0; i < kWordsOfRow; ++i) {
          words[i] = row == other ? words[other * kWordsOfRow + i] : words[i];
        }
      }
    }
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      Codes::operand(words, 0, step, a[step]);
#pragma unroll
      for (int r = 0; r < 4; ++r) a[step][r] = subtract(a[step][r], zero_pairs[r % 2]);
    }
  }

  __device__ void end_group(const GroupOfTwo& group) {
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      const int second = i / 2 % 2;
      sums[i] = fmaf(group.scale[second] * (1.0f / Codes::unit(second)), part[i], sums[i]);
    }
  }

  __device__ void multiply_tiles(const ManyRowsTile& tile) {
#pragma unroll
    for (float& sum : sums) sum = 0.0f;
    if (tile.begin == tile.end) return;
    ptx::grid_dependency_wait();  // scales are read as x is
    const auto group_of = [&](int32_t k) { return p.group_size.quotient(k * Traits::kTile); };
    Ring<Traits::kStages> stage;
    GroupOfTwo group, next = load_group(tile.begin);
    bool fresh = true;
    for (int32_t k = tile.begin; k < tile.end; ++k, stage.next()) {
      if (fresh) {
        group = next;
        begin_group(group);
      }
      const bool last = k + 1 == tile.end || group_of(k + 1) != group_of(k);
      // On its way while this group's last tile is multiplied.
      if (last && k + 1 < tile.end) next = load_group(k + 1);
      const auto& from = smem.stages[stage.index];
      smem.full[stage.index].wait(stage.phase);
      uint32_t a[4][4];
      decode(from, a);
      ptx::wgmma_pin(part);
      ptx::wgmma_fence();
      const uint64_t x = ptx::k_major_descriptor(ptx::shared_address(from.x));
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        // 16 columns are 32 bytes of the swizzled rows.
        Traits::Mma::registers_k_major(part, a[step], x + 2 * step, !fresh || step > 0);
      }
      ptx::wgmma_commit();
      ptx::wgmma_wait<0>();
      ptx::wgmma_pin(part);
      if (has_rest) {
        ptx::wgmma_fence();
#pragma unroll
        for (int step = 0; step < 4; ++step) {
          Traits::Mma::registers_k_major(part, rest, x + 2 * step, true);
        }
        ptx::wgmma_commit();
        ptx::wgmma_wait<0>();
        ptx::wgmma_pin(part);
      }
      if (lane == 0) smem.empty[stage.index].arrive();
      if (last) end_group(group);
      fresh = last;
    }
  }

  // sums[i]: features 16 warp + lane / 4 (+ 8) of tokens 8 (i / 4) + 2 (lane % 4) (+ 1).
  __device__ void publish() const {
    const int feature = 64 * warpgroup + 16 * warp + lane / 4;
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      const int token = 8 * (i / 4) + 2 * (lane % 4) + i % 2;
      smem.sums[token][feature + 8 * (i / 2 % 2)] = sums[i];
    }
  }
};

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    low_bit_many_rows_kernel(const __grid_constant__ LowBitParams p,
                             const __grid_constant__ CUtensorMap x_map, const int32_t token_tiles) {
  using T = typename Traits::T;
  extern __shared__ __align__(1024) uint4 memory[];
  auto& smem = reinterpret_cast<typename Traits::Smem&>(memory);
  const uint32_t rank = ptx::cluster_rank(), blocks = ptx::cluster_size();
  const auto first_of = [&](uint32_t block) {
    return static_cast<int32_t>(int64_t{p.k_tiles} * block / blocks);
  };
  // Neighbouring blocks share the weights.
  const int32_t index = blockIdx.x / blocks;
  const ManyRowsTile tile{index / token_tiles * Traits::kWarpgroups,
                          index % token_tiles * Traits::kTokens, first_of(rank),
                          first_of(rank + 1)};
  if (threadIdx.x == 0) {
    for (int i = 0; i < Traits::kStages; ++i) {
      smem.full[i].init(1);
      smem.empty[i].init(4 * Traits::kWarpgroups);
    }
    ptx::fence_mbarrier_init();
  }
  __syncthreads();

  const int warpgroup = threadIdx.x / 128;
  ManyRowsWarpgroup<Traits> w{p, smem, warpgroup, static_cast<int>(threadIdx.x / 32 % 4),
                              static_cast<int>(threadIdx.x % 32)};
  if (warpgroup == Traits::kWarpgroups) {
    ptx::registers_decrease<40>();
    if (threadIdx.x % 128 == 0) copy_tiles<Traits>(p, &x_map, tile, smem);
    __syncthreads();
  } else {
    ptx::registers_increase<232>();
    w.first_feature = (tile.first_tile + warpgroup) * Traits::kTile + 16 * w.warp + w.lane / 4;
    w.multiply_tiles(tile);
    __syncthreads();  // all tiles have been read
    w.publish();
  }

  write_result<T, Traits::kFeatures, Traits::kRowPitch, Traits::kThreads>(
      p, smem.sums, tile.first_tile * Traits::kTile, tile.first_token,
      min(Traits::kTokens, p.m - tile.first_token), [](float, int) {});
}

}  // namespace fastinfer::cuda
