// Weight-only quantized products for more rows of x: out = x W^T by wgmma. Raw pointers only;
// checks, choice and launch live in low_bit_gemm.cu.
//
// A warpgroup makes a tile of 64 output features by some rows of x. It decodes the features' codes,
// less their zeros, to the first operand of wgmma, in registers, where a warp finds its 16 features
// as they are packed; rows of x are the second, in shared memory. So the product is transposed.
// Codes are multiplied exactly. Sums are kept in fp32 in units of the group's scale, and are
// multiplied by what it is to the next group's when that begins: so they need no registers beside
// those of the product. Warps of a fifth warpgroup copy: x by TMA, weights and scales as they are.
//
// Two kernels share this. While the weights' bytes are what takes time, the warpgroups share out a
// block's features and its part of K, and the blocks of a cluster cut K further. For more rows
// blocks go from tile to tile, and two share the rows of x they copy.
//
// What a zero is more than an integer is a product of its own, with the sum of x.
#pragma once

#include "../ptx/named_barrier.h"
#include "../ptx/setmaxnreg.h"
#include "../ptx/stmatrix.h"
#include "cluster_result.cuh"
#include "low_bit_many_rows_copy.cuh"
#include "result.cuh"

namespace fastinfer::cuda {

// Named barriers, of a warpgroup each; 0 is __syncthreads.
constexpr int kRestBarrier = 1;
constexpr int kStagingBarrier = 5;
constexpr int kTurnBarrier = 9;

template <class Traits>
struct ManyRowsWarpgroup {
  using T = typename Traits::T;
  using Codes = typename Traits::Codes;
  using Stage = typename Traits::Stage;
  static constexpr int kElements = Traits::kTokens / 2;  // of a lane
  static constexpr int kGroups = Traits::kGroups;
  static constexpr int kGroupTiles = Traits::kStageTiles / kGroups;

  using Operands = uint32_t[4][4];  // A, of the steps of a tile

  // Of a group and the lane's two features, which are 8 apart. Codes have an offset and units of
  // their own (LowBitCodes).
  struct Group {
    float unit[2];           // that sums are in: the scale, for codes in their units
    float ratio[2];          // of the unit before to this one
    uint32_t zero_pairs[2];  // offset and integer part of the zero, twice
    uint32_t factors[2];     // of the codes, twice, where scales are too far apart
    bool has_factors;        // some of the warp's are not 1
    bool has_rest;           // some zero of the warpgroup is more than an integer
  };

  const LowBitParams& p;
  typename Traits::Smem& smem;
  int warpgroup, warp, lane;
  Ring<Traits::kStages> stage;
  float sums[kElements];

  // `thread`: among those of all warpgroups.
  __device__ ManyRowsWarpgroup(const LowBitParams& params, typename Traits::Smem& memory,
                               int thread)
      : p(params),
        smem(memory),
        warpgroup(thread / 128),
        warp(thread / 32 % 4),
        lane(thread % 32) {}

  __device__ static uint32_t subtract(uint32_t a, uint32_t b) {
    return Codes::kBf16 ? ptx::sub_bf16x2(a, b) : ptx::sub_f16x2(a, b);
  }

  __device__ static uint32_t pair_of_both(float value) {
    return ptx::pack<Codes::kBf16>(value, value);
  }

  // Scales, or zeros, of the lane's features.
  __device__ void load_two(const uint32_t (&from)[Traits::kTile], float (&two)[2]) const {
    const int feature = 16 * warp + lane / 4;
    const uint16_t* halves = reinterpret_cast<const uint16_t*>(from);
    if (p.scale_format == FloatFormat::kBf16) {
      two[0] = __uint_as_float(uint32_t{halves[feature]} << 16);
      two[1] = __uint_as_float(uint32_t{halves[feature + 8]} << 16);
    } else if (p.scale_format == FloatFormat::kFp16) {
      two[0] = half_to_float(halves[feature], FloatFormat::kFp16);
      two[1] = half_to_float(halves[feature + 8], FloatFormat::kFp16);
    } else {
      two[0] = __uint_as_float(from[feature]), two[1] = __uint_as_float(from[feature + 8]);
    }
  }

  __device__ Group load_group(const Stage& stage, int index, const float (&before)[2]) const {
    Group group;
    load_two(stage.scales[warpgroup][index][0], group.unit);
    bool far = false;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (Codes::unit(i) != 1.0f) group.unit[i] *= 1.0f / Codes::unit(i);
      group.ratio[i] = before[i] * ptx::reciprocal(group.unit[i]);
      far = far || !(fabsf(group.ratio[i]) <= kFar);
    }
    group.has_factors = __any_sync(~0u, far);
    if (group.has_factors) keep_units(group, before);
    group.has_rest = false;
    if (p.zeros == nullptr) {
#pragma unroll
      for (int i = 0; i < 2; ++i) group.zero_pairs[i] = zero_pair(1 << (Traits::kBits - 1), i);
    } else {
      float zero[2];
      load_two(stage.scales[warpgroup][index][1], zero);
      const float whole[2] = {rintf(zero[0]), rintf(zero[1])};
#pragma unroll
      for (int i = 0; i < 2; ++i) group.zero_pairs[i] = zero_pair(whole[i], i);
      const bool some = zero[0] != whole[0] || zero[1] != whole[1];
      group.has_rest = ptx::named_barrier_any(kRestBarrier + warpgroup, 128, some);
    }
    return group;
  }

  __device__ static uint32_t zero_pair(float whole, int i) {
    return pair_of_both(Codes::kOffset + whole * Codes::unit(i));
  }

  // Where the scale is nothing beside the unit before, that remains the unit.
  __device__ static void keep_units(Group& group, const float (&before)[2]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      group.factors[i] = Codes::kOnePair;
      if (fabsf(group.unit[i]) > fabsf(before[i]) * (1.0f / kFar) || isnan(group.unit[i])) {
        group.ratio[i] = before[i] == 0.0f ? 0.0f : before[i] / group.unit[i];
        continue;
      }
      group.factors[i] = pair_of_both(before[i] == 0.0f ? 0.0f : group.unit[i] / before[i]);
      group.unit[i] = before[i];
      group.ratio[i] = 1.0f;
    }
  }
  static constexpr float kFar = 0x1p64f;

  __device__ void apply_factors(const Group& group, Operands& a) const {
    if (!group.has_factors) return;
#pragma unroll
    for (int step = 0; step < 4; ++step) {
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        a[step][r] = Codes::kBf16 ? ptx::mul_bf16x2(a[step][r], group.factors[r % 2])
                                  : ptx::mul_f16x2(a[step][r], group.factors[r % 2]);
      }
    }
  }

  __device__ void decode(const Stage& stage, int tile, const Group& group, Operands& a) const {
    uint32_t words[Codes::kWords];
    load(stage, tile, words);
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      Codes::operand(words, 0, step, a[step]);
#pragma unroll
      for (int r = 0; r < 4; ++r) a[step][r] = subtract(a[step][r], group.zero_pairs[r % 2]);
    }
    apply_factors(group, a);
  }

  // The words of this warp's features, in the place of the block's first.
  __device__ void load(const Stage& stage, int tile, uint32_t (&words)[Codes::kWords]) const {
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
  __device__ void multiply_tile(const Operands& a, uint64_t x, int tile) {
    constexpr int kTileBytes = sizeof(T) * Traits::kTokens * Traits::kTile;
    ptx::wgmma_pin(sums);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      Traits::Mma::registers_k_major(sums, a[step], x + (tile * kTileBytes + step * 32) / 16, true);
    }
    ptx::wgmma_commit();
  }

  __device__ void wait_for_all() {
    ptx::wgmma_wait<0>();
    ptx::wgmma_pin(sums);
  }

  // Adds what is left of a group's zeros; `a` is free.
  __device__ void multiply_rest(const Group& group, int stage_index, uint64_t x, int index,
                                Operands& a) {
    float zero[2];
    load_two(smem.stages[stage_index].scales[warpgroup][index][1], zero);
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      a[0][r] = pair_of_both((rintf(zero[r % 2]) - zero[r % 2]) * Codes::unit(r % 2));
#pragma unroll
      for (int step = 1; step < 4; ++step) a[step][r] = a[0][r];
    }
    apply_factors(group, a);
#pragma unroll
    for (int i = 0; i < kGroupTiles; ++i) {
      multiply_tile(a, x, index * kGroupTiles + i);
    }
    wait_for_all();
  }

  __device__ void multiply_by(float first, float second) {
#pragma unroll
    for (int i = 0; i < kElements; ++i) sums[i] *= i / 2 % 2 == 0 ? first : second;
  }
  // From the unit before.
  __device__ void change_unit(const Group& group) { multiply_by(group.ratio[0], group.ratio[1]); }

  __device__ void release(int stage_index) {
    if constexpr (Traits::kShared) {
      if (lane < 2) smem.empty[stage_index].arrive_remote(lane);
    } else {
      if (lane == 0) smem.empty[stage_index].arrive();
    }
  }

  // The sums over the next `count` of `stages` stages that come.
  __device__ void multiply(int32_t count, int32_t stages) {
#pragma unroll
    for (float& sum : sums) sum = 0.0f;
    float unit[2] = {0.0f, 0.0f};
    if constexpr (Traits::kAhead) {
      multiply_ahead(count, unit);
    } else {
      multiply_in_turn(count, stages, unit);
    }
    multiply_by(unit[0], unit[1]);
    // A part of K may be a stage shorter than the others.
#pragma unroll 1
    for (int32_t j = count; j < stages; ++j, stage.next()) {
      smem.full[stage.index].wait(stage.phase);
      release(stage.index);
    }
  }

  // A tile is decoded while the one before it is multiplied.
  __device__ void multiply_ahead(int32_t count, float (&unit)[2]) {
    if (count == 0) return;
    Operands a, b;
    smem.full[stage.index].wait(stage.phase);
    Group group = load_group(smem.stages[stage.index], 0, unit);
    decode(smem.stages[stage.index], 0, group, a);
#pragma unroll 1
    for (int32_t j = 0; j < count; ++j) {
      const int here = stage.index;
      const Stage& from = smem.stages[here];
      const uint64_t x = x_descriptor(here);
      stage.next();
      multiply_tile(a, x, 0);
      if constexpr (kGroups == 1) {
        decode(from, 1, group, b);
        multiply_tile(b, x, 1);
        ptx::wgmma_wait<1>();  // a is free
      } else {
        const Group next = load_group(from, 1, group.unit);
        decode(from, 1, next, b);
        wait_for_all();
        if (group.has_rest) multiply_rest(group, here, x, 0, a);
        group = next;
        change_unit(group);
        multiply_tile(b, x, 1);
      }
      Group next = group;
      if (j + 1 < count) {
        smem.full[stage.index].wait(stage.phase);
        next = load_group(smem.stages[stage.index], 0, group.unit);
        decode(smem.stages[stage.index], 0, next, a);
      }
      wait_for_all();
      if (group.has_rest) multiply_rest(group, here, x, kGroups - 1, b);
      release(here);
      if (j + 1 < count) change_unit(next);
      group = next;
    }
    unit[0] = group.unit[0], unit[1] = group.unit[1];
  }

  // Where registers are few: two of the warpgroups multiply while the other two decode. (All four
  // at once would come to an end at once.)
  __device__ void multiply_in_turn(int32_t count, int32_t stages, float (&unit)[2]) {
    static_assert(Traits::kWarpgroups == 4);
    const int pair = warpgroup % 2, second = warpgroup / 2;
    const auto wait_for_turn = [&] {
      ptx::named_barrier_sync(kTurnBarrier + 2 * pair + second, 256);
    };
    const auto pass_turn = [&] {
      ptx::named_barrier_arrive(kTurnBarrier + 2 * pair + 1 - second, 256);
    };
    if (second) pass_turn();
#pragma unroll 1
    for (int32_t j = 0; j < count; ++j, stage.next()) {
      const int here = stage.index;
      const Stage& from = smem.stages[here];
      const uint64_t x = x_descriptor(here);
      smem.full[here].wait(stage.phase);
#pragma unroll
      for (int index = 0; index < kGroups; ++index) {
        const Group group = load_group(from, index, unit);
        change_unit(group);
        unit[0] = group.unit[0], unit[1] = group.unit[1];
        Operands a;
#pragma unroll
        for (int i = 0; i < kGroupTiles; ++i) {
          const int tile = index * kGroupTiles + i;
          decode(from, tile, group, a);
          wait_for_turn();
          multiply_tile(a, x, tile);
          wait_for_all();
          pass_turn();
        }
        if (group.has_rest) multiply_rest(group, here, x, index, a);
      }
      release(here);
    }
    for (int32_t tile = Traits::kStageTiles * count; tile < Traits::kStageTiles * stages; ++tile) {
      wait_for_turn();
      pass_turn();
    }
    if (!second) wait_for_turn();
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
    if (n < p.n && row < p.m) {
      if (p.result.out_in_eights) {
        *reinterpret_cast<uint4*>(to) = vector;
      } else {
        const T* eight_values = reinterpret_cast<const T*>(&vector);
        for (int i = 0; i < 8 && n + i < p.n; ++i) to[i] = eight_values[i];
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

  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
  if (warpgroup == Traits::kWarpgroups) {
    ptx::registers_decrease<Traits::kCopyRegisters>();
    Ring<Traits::kStages> stage;
    copy_begin<Traits>(p, tile);
    copy_tile<Traits>(p, &x_map, tile, smem, stage);
    __syncthreads();
  } else {
    ptx::registers_increase<Traits::kRegisters>();
    ManyRowsWarpgroup<Traits> w(p, smem, threadIdx.x);
    const int split = warpgroup / Traits::kFeatureTiles;
    w.multiply(tile.first_of<Traits::kSplits>(split + 1) - tile.first_of<Traits::kSplits>(split),
               tile.stages<Traits::kSplits>());
    __syncthreads();  // all stages have been read
    w.publish(smem.sums[split], warpgroup % Traits::kFeatureTiles * Traits::kTile);
  }
  const int tokens = min(Traits::kTokens, p.m - tile.first_token);
  if (p.result.gated) {
    if constexpr (Traits::kFeatureTiles > 1) {
      add_up_gated<Traits::kFeatures, Traits::kThreads>(
          smem.sums, tile.first_tile * Traits::kTile, p.result.columns, tokens,
          [&](float gate, float up, int token, int32_t column) {
            store_gated(p.result, gate, up, tile.first_token + token, column);
          });
    }
  } else {
    add_up_cluster<Traits::kFeatures, Traits::kThreads>(
        smem.sums, tile.first_tile * Traits::kTile, p.n, tokens,
        [&](float sum, int token, int32_t n) {
          store_sum(p.result, sum, tile.first_token + token, n);
        });
  }
}

// Tile after tile; two blocks have neighbouring features and share rows of x.
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
  const auto tile_at = [&](int32_t index) {
    return ManyRowsTile{{0, k_stages},
                        (index / token_tiles * 2 + rank) * Traits::kFeatureTiles,
                        index % token_tiles * Traits::kTokens};
  };
  const int32_t clusters = gridDim.x / 2, first = blockIdx.x / 2;
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
  if (warpgroup == Traits::kWarpgroups) {
    ptx::registers_decrease<Traits::kCopyRegisters>();
    copy_begin<Traits>(p, tile_at(first));
    Ring<Traits::kStages> stage;
    for (int32_t i = first; i < tiles; i += clusters) {
      copy_tile<Traits>(p, &x_map, tile_at(i), smem, stage);
    }
  } else {
    ptx::registers_increase<Traits::kRegisters>();
    ManyRowsWarpgroup<Traits> w(p, smem, threadIdx.x);
    for (int32_t i = first; i < tiles; i += clusters) {
      const ManyRowsTile tile = tile_at(i);
      w.multiply(k_stages, k_stages);
      const int32_t first_feature = (tile.first_tile + warpgroup) * Traits::kTile;
      w.add_bias(first_feature);
      [&]<int... kPieces>(std::integer_sequence<int, kPieces...>) {
        (w.template write_rounded<16 * kPieces>(smem.staging[warpgroup], first_feature,
                                                tile.first_token),
         ...);
      }(std::make_integer_sequence<int, Traits::kTokens / 16>{});
    }
  }
  __syncwarp();
  ptx::cluster_sync();  // the other block may still release stages here
}

}  // namespace fastinfer::cuda
