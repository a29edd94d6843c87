// Weight-only quantized products for more rows of x: out = x W^T by wgmma. Raw pointers only;
// checks, choice and launch live in low_bit_gemm.cu.
//
// A warpgroup makes a tile of 64 output features by some rows of x. It decodes the features' codes
// to weights in x's type (the scale is rounded to it, and then the weight), as the first operand of
// wgmma, in registers, where a warp finds its 16 features as they are packed; rows of x are the
// second, in shared memory. So the product is transposed. While one part of the weights is
// multiplied the next is decoded: nothing but that part's registers is waited for. Warps of a fifth
// warpgroup copy: x by TMA, weights and scales as they are.
//
// Two kernels share this. While the weights' bytes are what takes time, the warpgroups share out a
// block's features and its part of K, and the blocks of a cluster cut K further. For more rows
// blocks go from tile to tile, and two share the rows of x they copy.
#pragma once

#include "../ptx/grid_dependency.h"
#include "../ptx/lane_id.h"
#include "../ptx/named_barrier.h"
#include "../ptx/setmaxnreg.h"
#include "../ptx/stmatrix.h"
#include "cluster_result.cuh"
#include "low_bit_many_rows_copy.cuh"
#include "result.cuh"

namespace fastinfer::cuda {

// Named barriers; 0 is __syncthreads.
constexpr int kStagingBarrier = 1;   // of a warpgroup, and three on
constexpr int kExchangeBarrier = 5;  // of two warpgroups, and one on

template <class Traits>
struct ManyRowsWarpgroup {
  using T = typename Traits::T;
  using Codes = typename Traits::Codes;
  using Stage = typename Traits::Stage;
  static constexpr int kElements = Traits::kTokens / 2;  // of a lane
  static constexpr int kPartSteps = Traits::kPartSteps;
  static constexpr int kTileParts = 4 / kPartSteps;
  static constexpr int kLoadedTiles = kTileParts == 1 ? Traits::kStageTiles : 1;

  using Operands = uint32_t[kPartSteps][4];  // A, of the steps of a part
  using Words = uint32_t[Codes::kWords];     // of a tile

  // Of a group and the lane's two features, which are 8 apart. A code's number (LowBitCodes) is
  // worth (number - zero) * factor + rest, each twice in a register.
  struct Group {
    uint32_t zeros[2];    // as near as numbers of x's type are
    uint32_t factors[2];  // the scale, for codes in their units
    uint32_t rests[2];    // what the zero lacks
  };

  const LowBitParams& p;
  typename Traits::Smem& smem;
  int warpgroup, warp, lane;
  Ring<Traits::kStages> stage;
  float sums[kElements];
  // Of scales in fp16, whose range is small: the largest of the feature. bf16 has fp32's range.
  float units[2];

  __device__ ManyRowsWarpgroup(const LowBitParams& params, typename Traits::Smem& memory,
                               int warpgroup)
      : p(params),
        smem(memory),
        warpgroup(warpgroup),
        warp(threadIdx.x / 32 % 4),
        lane(threadIdx.x % 32) {}

  __device__ static uint32_t pair_of_both(float value) {
    return ptx::pack<Codes::kBf16>(value, value);
  }

  // Scales, or zeros, of the lane's features: both are loaded before one is waited for.
  __device__ void load_two(const uint32_t (&from)[Traits::kTile], float (&two)[2]) const {
    const int feature = 16 * warp + lane / 4;
    const uint16_t* halves = reinterpret_cast<const uint16_t*>(from);
    const bool wide = p.scale_format == FloatFormat::kFloat;
    uint32_t bits[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) bits[i] = wide ? from[feature + 8 * i] : halves[feature + 8 * i];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float half = half_to_float(static_cast<uint16_t>(bits[i]), p.scale_format);
      two[i] = wide ? __uint_as_float(bits[i]) : half;
    }
  }

  // Over the stages that this warpgroup multiplies. Four lanes have the same features, and each
  // loads some groups' scales before it waits for one.
  __device__ void find_units(int32_t n_tile, int32_t first_stage, int32_t end_stage) {
    constexpr int kAtOnce = 8;
    constexpr int32_t kColumns = Traits::kStageTiles * Traits::kTile;
    const int32_t first = p.group_size.quotient(min(first_stage * kColumns, p.k - 1));
    const int32_t last = p.group_size.quotient(min(end_stage * kColumns, p.k) - 1);
    const bool wide = p.scale_format == FloatFormat::kFloat;
    const uint32_t* words = static_cast<const uint32_t*>(p.scales);
    const uint16_t* halves = static_cast<const uint16_t*>(p.scales);
    ptx::grid_dependency_wait();  // an earlier kernel may write the scales
    float largest[2] = {kLeastUnit, kLeastUnit};
#pragma unroll 1
    for (int32_t group = first + lane % 4; group <= last; group += 4 * kAtOnce) {
      uint32_t bits[kAtOnce][2];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const int64_t row = int64_t{min(group + 4 * j, last)} * p.n;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int32_t n = min(n_tile * Traits::kTile + 16 * warp + lane / 4 + 8 * i, p.n - 1);
          bits[j][i] = wide ? words[row + n] : halves[row + n];
        }
      }
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float half = half_to_float(static_cast<uint16_t>(bits[j][i]), p.scale_format);
          const float scale = fabsf(wide ? __uint_as_float(bits[j][i]) : half);
          if (scale < INFINITY) largest[i] = fmaxf(largest[i], scale);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int other = 1; other < 4; other *= 2) {
        largest[i] = fmaxf(largest[i], __shfl_xor_sync(~0u, largest[i], other));
      }
      units[i] = fminf(largest[i], kLargestUnit);
      // Scales of 16 bits are exact in units of a power of two.
      if (!wide) units[i] = __uint_as_float(__float_as_uint(units[i]) & 0x7f800000);
    }
  }
  static constexpr float kLeastUnit = 0x1p-100f, kLargestUnit = 0x1p126f;  // have reciprocals

  __device__ Group load_group(const Stage& stage, int index) const {
    Group group;
    float factor[2];
    load_two(stage.scales[warpgroup][index][0], factor);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (Codes::unit(i) != 1.0f) factor[i] *= 1.0f / Codes::unit(i);
      if constexpr (!Codes::kBf16) factor[i] *= ptx::reciprocal(units[i]);
      group.factors[i] = pair_of_both(factor[i]);
      constexpr float kDefaultZero = 1 << (Traits::kBits - 1);
      group.zeros[i] = pair_of_both(Codes::kOffset + kDefaultZero * Codes::unit(i));
      group.rests[i] = 0;
    }
    if (p.zeros != nullptr) {
      float zero[2];
      load_two(stage.scales[warpgroup][index][1], zero);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        zero[i] *= Codes::unit(i);
        group.zeros[i] = pair_of_both(Codes::kOffset + zero[i]);
        const float lacks = first_of_pair(group.zeros[i]) - Codes::kOffset - zero[i];
        // No product of 0 and a scale that is not finite.
        group.rests[i] = pair_of_both(lacks == 0.0f ? 0.0f : lacks * factor[i]);
      }
    }
    return group;
  }

  __device__ static float first_of_pair(uint32_t pair) {
    return half_to_float(static_cast<uint16_t>(pair),
                         Codes::kBf16 ? FloatFormat::kBf16 : FloatFormat::kFp16);
  }

  __device__ void decode(const Words& words, int part, const Group& group, Operands& a) const {
#pragma unroll
    for (int step = 0; step < kPartSteps; ++step) {
      Codes::operand(words, 0, part * kPartSteps + step, a[step]);
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        uint32_t& two = a[step][r];
        const uint32_t zero = group.zeros[r % 2], factor = group.factors[r % 2];
        if constexpr (Codes::kBf16) {
          two = ptx::fma_bf16x2(ptx::sub_bf16x2(two, zero), factor, group.rests[r % 2]);
        } else {
          two = ptx::fma_f16x2(ptx::sub_f16x2(two, zero), factor, group.rests[r % 2]);
        }
      }
    }
  }

  // The words of this warp's features, in the place of the block's first.
  __device__ void load(const Stage& stage, int tile, Words& words) const {
    const int block = warp / Codes::kRows, row = warp % Codes::kRows;
    const uint4* from = stage.weights[warpgroup][tile] + block * (32 * Codes::kLoads) + lane;
#pragma unroll
    for (int j = 0; j < Codes::kLoads; ++j) {
      const uint4 four = from[32 * j];
      words[4 * j] = four.x, words[4 * j + 1] = four.y;
      words[4 * j + 2] = four.z, words[4 * j + 3] = four.w;
    }
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
  }

  // Of a stage's first tile.
  __device__ uint64_t x_descriptor(int stage_index) const {
    const int split = Traits::kSplits == 1 ? 0 : warpgroup / Traits::kFeatureTiles;
    return ptx::uniform_k_major_descriptor(
        ptx::shared_address(smem.stages[stage_index].x[split][0]));
  }

  // `x`: of the stage. Each step's 16 columns are 32 bytes of the swizzled rows.
  __device__ void multiply_part(const Operands& a, uint64_t x, int tile, int part) {
    constexpr int kTileBytes = sizeof(T) * Traits::kTokens * Traits::kTile;
    ptx::wgmma_pin(sums);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kPartSteps; ++step) {
      const int at = tile * kTileBytes + (part * kPartSteps + step) * 32;
      Traits::Mma::registers_k_major(sums, a[step], x + at / 16, true);
    }
    ptx::wgmma_commit();
  }

  __device__ void release(int stage_index) {
    if constexpr (Traits::kShared) {
      if (lane < 2) smem.empty[stage_index].arrive_remote(lane);
    } else {
      if (lane == 0) smem.empty[stage_index].arrive();
    }
  }

  // The sums over the stages of `tile` that are this warpgroup's. As many come for all, and a part
  // of K may have one less.
  __device__ void multiply(const ManyRowsTile& tile) {
    const int split = warpgroup / Traits::kFeatureTiles;
    const int32_t first = tile.template first_of<Traits::kSplits>(split);
    const int32_t end = tile.template first_of<Traits::kSplits>(split + 1);
    const int32_t stages = tile.template stages<Traits::kSplits>();
    if constexpr (!Codes::kBf16) {
      find_units(n_tile_of<Traits>(p, tile, warpgroup % Traits::kFeatureTiles), first, end);
    }
#pragma unroll
    for (float& sum : sums) sum = 0.0f;
    Operands parts[2];
    const auto before = [&] { return (stage.index == 0 ? Traits::kStages : stage.index) - 1; };
#pragma unroll 1
    for (int32_t k = first; k < end; ++k, stage.next()) {
      const int here = stage.index;
      const Stage& from = smem.stages[here];
      const uint64_t x = x_descriptor(here);
      smem.full[here].wait(stage.phase);
      Group group;
      Words words[kLoadedTiles];
      if constexpr (kLoadedTiles > 1) {
#pragma unroll
        for (int i = 0; i < kLoadedTiles; ++i) load(from, i, words[i]);
      }
#pragma unroll kLoadedTiles
      for (int i = 0; i < Traits::kStageTiles; ++i) {
        if constexpr (kLoadedTiles == 1) load(from, i, words[0]);
        if (i < Traits::kGroups) group = load_group(from, i);
#pragma unroll
        for (int part = 0; part < kTileParts; ++part) {
          Operands& a = parts[(i * kTileParts + part) % 2];
          decode(words[i % kLoadedTiles], part, group, a);
          multiply_part(a, x, i, part);
          ptx::wgmma_wait<1>();  // the other part is free
          if (i == 0 && part == 0 && k > first) release(before());
        }
      }
    }
    ptx::wgmma_wait<0>();
    ptx::wgmma_pin(sums);
    if (first < end) release(before());
    if constexpr (!Codes::kBf16) {
#pragma unroll
      for (int i = 0; i < kElements; ++i) sums[i] *= units[i / 2 % 2];
    }
#pragma unroll 1
    for (int32_t k = end; k < first + stages; ++k, stage.next()) {
      smem.full[stage.index].wait(stage.phase);
      release(stage.index);
    }
  }

  // sums[i]: features 16 warp + lane / 4 (+ 8) of tokens 8 (i / 4) + 2 (lane % 4) (+ 1). To
  // `to`, from its column `first` on.
  template <int kPitch>
  __device__ void publish(float (&to)[Traits::kTokens][kPitch], int first) const {
    const int feature = first + 16 * warp + lane / 4;
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      to[8 * (i / 4) + 2 * (lane % 4) + i % 2][feature + 8 * (i / 2 % 2)] = sums[i];
    }
  }

  __device__ void sync_staging() const {
    ptx::named_barrier_sync(kStagingBarrier + warpgroup, 128);
  }

  __device__ void add_bias(int32_t first_feature) {
    if (p.result.bias == nullptr) return;
    float bias[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int32_t n = min(first_feature + 16 * warp + lane / 4 + 8 * i, p.n - 1);
      bias[i] = load_scalar(p.result.bias, p.result.bias_format, n);
    }
#pragma unroll
    for (int i = 0; i < kElements; ++i) sums[i] += bias[i / 2 % 2];
  }

  __device__ void activate_sums() {
    if (p.result.activation == Activation::kNone) return;
#pragma unroll
    for (float& sum : sums) sum = activate_lightly(p.result.activation, sum);
  }

  // The first half of the warpgroups has gates, the second what they multiply. Each makes half of
  // the results, the first or the second half of the tokens, to the first half of `sums`, and sends
  // the other half of what it has: thread by thread, since two have their tokens in the same
  // places.
  __device__ void multiply_gates() {
    constexpr int kHalf = kElements / 2, kPairs = Traits::kWarpgroups / 2;
    const int thread = 32 * warp + lane, pair = warpgroup % kPairs;
    const bool first = warpgroup < kPairs;
    const int other = first ? warpgroup + kPairs : pair;
    float4* to = reinterpret_cast<float4*>(smem.staging[warpgroup]) + thread;
    const float4* from = reinterpret_cast<const float4*>(smem.staging[other]) + thread;
#pragma unroll
    for (int i = 0; i < kHalf; i += 4) {
      *to = first ? make_float4(sums[kHalf + i], sums[kHalf + i + 1], sums[kHalf + i + 2],
                                sums[kHalf + i + 3])
                  : make_float4(sums[i], sums[i + 1], sums[i + 2], sums[i + 3]);
      ptx::named_barrier_sync(kExchangeBarrier + pair, 256);
      const float4 four = *from;
      ptx::named_barrier_sync(kExchangeBarrier + pair, 256);
      const float others[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float own = first ? sums[i + j] : sums[kHalf + i + j];
        const float gate = first ? own : others[j], up = first ? others[j] : own;
        sums[i + j] = activate_lightly(p.result.activation, gate) * up;
      }
    }
  }

  // Sums as they are, in the place of the tile's part.
  __device__ void write_partial(const ManyRowsTile& tile) const {
    const int32_t n_tile = tile.first_tile + warpgroup;
    if (n_tile >= p.n_tiles) return;
    const int64_t pitch = int64_t{p.n_tiles} * Traits::kTile;
    const int32_t row = tile.first_token + 2 * (lane % 4);
    float* to = p.partial + (int64_t{tile.part} * p.m + row) * pitch;
    to += n_tile * Traits::kTile + 16 * warp + lane / 4;
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      const int token = 8 * (i / 4) + i % 2;
      if (row + token < p.m) to[token * pitch + 8 * (i / 2 % 2)] = sums[i];
    }
  }

  // All of a tile.
  __device__ void write(const ManyRowsTile& tile) {
    if (p.partial != nullptr) return write_partial(tile);
    add_bias(n_tile_of<Traits>(p, tile, warpgroup) * Traits::kTile);
    if (p.result.gated) {
      multiply_gates();
      constexpr int kPairs = Traits::kWarpgroups / 2, kHalf = Traits::kTokens / 2;
      write_pieces<kHalf>((tile.first_tile + warpgroup % kPairs) * Traits::kTile,
                          tile.first_token + warpgroup / kPairs * kHalf);
    } else {
      activate_sums();
      write_pieces<Traits::kTokens>((tile.first_tile + warpgroup) * Traits::kTile,
                                    tile.first_token);
    }
  }

  // The first kTokens of `sums`.
  template <int kTokens>
  __device__ void write_pieces(int32_t first_feature, int32_t first_token) const {
    [&]<int... kPieces>(std::integer_sequence<int, kPieces...>) {
      (write_rounded<16 * kPieces>(smem.staging[warpgroup], first_feature, first_token), ...);
    }(std::make_integer_sequence<int, kTokens / 16>{});
  }

  // 16 tokens of the result by way of `staging`: rounded and transposed, with their vectors of 8
  // features where no two rows of 8 meet in a bank.
  template <int kBegin>
  __device__ void write_rounded(T (&staging)[16][Traits::kTile], int32_t first_feature,
                                int32_t first_token) const {
    const auto vector_of = [&](int token, int eight) {
      return &staging[token][8 * (eight ^ token % 8)];
    };
    uint32_t four[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* two = sums + kBegin / 2 + 2 * i;
      four[i] = ptx::pack<Codes::kBf16>(two[0], two[1]);
    }
    const int matrix = lane / 8;
    ptx::stmatrix_x4_trans(
        ptx::shared_address(vector_of(8 * (matrix / 2) + lane % 8, 2 * warp + matrix % 2)), four);
    sync_staging();
    const int thread = 32 * warp + lane, token = thread / 8, eight = thread % 8;
    const int32_t n = first_feature + 8 * eight, row = first_token + kBegin + token;
    const uint4 vector = *reinterpret_cast<const uint4*>(vector_of(token, eight));
    T* to = static_cast<T*>(p.result.out) + row * p.result.out_row_stride + n;
    if (n < p.result.columns && row < p.m) {
      if (p.result.out_in_eights) {
        *reinterpret_cast<uint4*>(to) = vector;
      } else {
        const T* eight_values = reinterpret_cast<const T*>(&vector);
        for (int i = 0; i < 8 && n + i < p.result.columns; ++i) to[i] = eight_values[i];
      }
    }
    sync_staging();
  }
};

template <class Traits>
__device__ void init_barriers(typename Traits::Smem& smem) {
  for (int i = 0; i < Traits::kStages; ++i) {
    smem.full[i].init(kCopyArrivals);
    smem.empty[i].init(4 * Traits::kWarpgroups * (Traits::kShared ? 2 : 1));
  }
  ptx::fence_mbarrier_init();
}

// One tile a block; the blocks of a cluster cut K.
template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    low_bit_some_rows_kernel(const __grid_constant__ LowBitParams p,
                             const __grid_constant__ CUtensorMap x_map, const int32_t token_tiles) {
  using T = typename Traits::T;
  extern __shared__ __align__(1024) uint4 memory[];
  auto& smem = reinterpret_cast<typename Traits::Smem&>(memory);
  const uint32_t rank = ptx::cluster_rank(), blocks = ptx::cluster_size();
  const int32_t k_stages = (p.k_tiles + Traits::kStageTiles - 1) / Traits::kStageTiles;
  const auto first_of = [&](uint32_t block) {
    return static_cast<int32_t>(int64_t{k_stages} * block / blocks);
  };
  // Neighbouring blocks share the weights.
  const int32_t index = blockIdx.x / blocks;
  const int tiles = p.result.gated ? Traits::kFeatureTiles / 2 : Traits::kFeatureTiles;
  const ManyRowsTile tile{{first_of(rank), first_of(rank + 1)},
                          index / token_tiles * tiles,
                          index % token_tiles * Traits::kTokens};
  if (threadIdx.x == 0) init_barriers<Traits>(smem);
  __syncthreads();

  const int warpgroup = ptx::same_in_warp(threadIdx.x / 128);
  if (warpgroup == Traits::kWarpgroups) {
    ptx::registers_decrease<Traits::kCopyRegisters>();
    Ring<Traits::kStages> stage;
    copy_begin<Traits>(p, tile);
    copy_tile<Traits>(p, &x_map, tile, smem, stage);
  } else {
    constexpr int kThreads = 128 * Traits::kWarpgroups;
    ptx::registers_increase<Traits::kRegisters>();
    ManyRowsWarpgroup<Traits> w(p, smem, warpgroup);
    w.multiply(tile);
    sync_sums_of_block<kThreads>();  // all stages have been read
    w.publish(smem.sums[warpgroup / Traits::kFeatureTiles],
              warpgroup % Traits::kFeatureTiles * Traits::kTile);
    sums_are_written<kThreads>();
    finish_cluster<Traits::kFeatures, kThreads>(
        p.result, smem.sums, tile.first_tile * Traits::kTile, tile.first_token,
        min(Traits::kTokens, p.m - tile.first_token), [](float sum, int, int32_t) { return sum; });
    sums_are_read();
  }
}

// Tile after tile, part after part of K; two blocks have neighbouring features and share rows of x.
template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    low_bit_many_rows_kernel(const __grid_constant__ LowBitParams p,
                             const __grid_constant__ CUtensorMap x_map, const int32_t token_tiles,
                             const int32_t tiles) {
  using T = typename Traits::T;
  extern __shared__ __align__(1024) uint4 memory[];
  auto& smem = reinterpret_cast<typename Traits::Smem&>(memory);
  if (threadIdx.x == 0) init_barriers<Traits>(smem);
  ptx::cluster_sync();

  const int32_t rank = ptx::cluster_rank();
  const int32_t k_stages = (p.k_tiles + Traits::kStageTiles - 1) / Traits::kStageTiles;
  const int tiles_of_block = p.result.gated ? Traits::kFeatureTiles / 2 : Traits::kFeatureTiles;
  const auto tile_at = [&](int32_t index) {
    const int32_t part = index / tiles, tile = index % tiles;
    const auto begin_of = [&](int32_t i) {
      return static_cast<int32_t>(int64_t{k_stages} * i / p.parts);
    };
    return ManyRowsTile{{begin_of(part), begin_of(part + 1)},
                        (tile / token_tiles * 2 + rank) * tiles_of_block,
                        tile % token_tiles * Traits::kTokens,
                        part};
  };
  const int32_t all = tiles * p.parts, clusters = gridDim.x / 2, first = blockIdx.x / 2;
  const int warpgroup = ptx::same_in_warp(threadIdx.x / 128);
  if (warpgroup == Traits::kWarpgroups) {
    ptx::registers_decrease<Traits::kCopyRegisters>();
    copy_begin<Traits>(p, tile_at(first));
    Ring<Traits::kStages> stage;
    for (int32_t i = first; i < all; i += clusters) {
      copy_tile<Traits>(p, &x_map, tile_at(i), smem, stage);
    }
  } else {
    ptx::registers_increase<Traits::kRegisters>();
    ManyRowsWarpgroup<Traits> w(p, smem, warpgroup);
    for (int32_t i = first; i < all; i += clusters) {
      const ManyRowsTile tile = tile_at(i);
      w.multiply(tile);
      w.write(tile);
    }
  }
  __syncwarp();
  ptx::cluster_sync();  // the other block may still release stages here
}

}  // namespace fastinfer::cuda
