// Weight-only quantized products for few rows of x: out = x W^T, the weights read once, at the
// speed of memory. Raw pointers only; checks, choice and launch live in low_bit_gemm.cu.
//
// The weights are operand A of mma.m16n8k16, rows of x its n = 8 columns. A cluster of blocks takes
// 16 kRows output features; its blocks cut K into ranges of tiles of 64, and the warps of a block
// take the tiles of its range in turn. Warps are on their own until the end: each has its tiles of
// weights and of x copied a few tiles ahead (low_bit_few_rows_copy.cuh), and adds up products of
// codes in fp32, group by group:
//
//     sum_k W[n, k] x[k] = sum_g scale[g, n] (sum_k code[n, k] x[k] - zero[g, n] sum_k x[k])
//
// where sum_k x[k] is a product with ones. What the codes' offset, and a zero that all groups
// share, make of it is what the sum of a group's products begins with, so that neither costs an
// instruction. Then warps are added through shared memory, and blocks through the cluster's. Which
// sums are formed in which order depends on N and K alone: a row's bits are the same in any batch.
// What is not finite in a row without NaN is formed again, term by term: of an infinite x the
// codes' offset makes NaN, and of a large one infinity.
//
// Rows of x may be normalised on their way (RMSNorm): they are multiplied by the norm's weight
// where they become operands, their squares are summed beside, and what 1 / rms is multiplies the
// result.
#pragma once

#include "../ptx/grid_dependency.h"
#include "../ptx/lane_id.h"
#include "../ptx/ldmatrix.h"
#include "../ptx/mma.h"
#include "cluster_result.cuh"
#include "low_bit_few_rows_copy.cuh"
#include "low_bit_scales.cuh"
#include "result.cuh"

namespace fastinfer::cuda {

template <class T, int kBits>
__device__ float term_by_term(const LowBitParams& p, int32_t token, int32_t n) {
  constexpr FloatFormat kFormat =
      LowBitCodes<T, kBits>::kBf16 ? FloatFormat::kBf16 : FloatFormat::kFp16;
  float sum = 0.0f;
  for (int32_t k = 0; k < p.k; ++k) {
    const int64_t i = int64_t{p.group_size.quotient(k)} * p.n + n;
    const float zero =
        p.zeros == nullptr ? 1 << (kBits - 1) : load_scalar(p.zeros, p.scale_format, i);
    const int code =
        low_bit_code<kBits>(reinterpret_cast<const uint32_t*>(p.qweight), p.k_tiles, n, k);
    const float weight = load_scalar(p.scales, p.scale_format, i) * (code - zero);
    sum = fmaf(weight, half_to_float(element_of_x(p, token, k), kFormat), sum);
  }
  return sum;
}

// Whether a row of x has a NaN; called by all threads of a block.
template <class Traits>
__device__ bool row_has_nan(const LowBitParams& p, int token) {
  bool nan = false;
  for (int32_t k = threadIdx.x; k < p.k; k += Traits::kThreads) {
    // Of either 16-bit type a number is NaN if its magnitude is above infinity's.
    constexpr uint16_t kInfinity = Traits::Codes::kBf16 ? 0x7f80 : 0x7c00;
    nan = nan || (element_of_x(p, token, k) & 0x7fff) > kInfinity;
  }
  return __syncthreads_or(nan);
}

// What one warp does until its sums are complete.
template <class Traits>
struct FewRowsWarp {
  using T = typename Traits::T;
  using Codes = typename Traits::Codes;
  static constexpr int kScales = Traits::kScalesPerTile;

  const LowBitParams& p;
  typename Traits::Smem& smem;
  int warp, lane;
  int32_t first_feature;                          // of the cluster's
  uint2 raw_scales[kScales], raw_zeros[kScales];  // of the next tile of K to be multiplied
  uint32_t norm_weights[Traits::kNorm ? 8 : 1];   // likewise, pairs for this lane's columns
  float squares[Traits::kTokenTiles];             // of this lane's elements of a row
  float sums[Traits::kRows][Traits::kTokenTiles][4];

  // Where those of a tile, and of groups that begin in it, stand.
  __device__ int64_t place_of_scales(int32_t tile, int i) const {
    const int32_t group = p.group_size.quotient(min(tile * kTile + 16 * i, p.k - 1));
    return int64_t{group} * p.n + (first_feature + 4 * lane);
  }

  // Four neighbours of 16 bits in one load.
  __device__ bool scales_are_simple() const {
    return p.scales_aligned && p.scale_format != FloatFormat::kFloat &&
           first_feature + Traits::kFeatures <= p.n;
  }

  // Simple ones are on their way while the tile before is multiplied.
  __device__ void load_scales(int32_t tile) {
    if (4 * lane >= Traits::kFeatures || !scales_are_simple()) return;
#pragma unroll
    for (int i = 0; i < kScales; ++i) {
      const int64_t place = place_of_scales(tile, i);
      const auto load = [&](const void* from) {
        return *reinterpret_cast<const uint2*>(static_cast<const uint16_t*>(from) + place);
      };
      raw_scales[i] = load(p.scales);
      if constexpr (Traits::kZeros) raw_zeros[i] = load(p.zeros);
    }
  }

  __device__ void load_norm_weights(int32_t tile) {
    if constexpr (Traits::kNorm) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int32_t column = tile * kTile + 8 * i + 2 * (lane % 4);
        norm_weights[i] = column < p.k ? *reinterpret_cast<const uint32_t*>(
                                             static_cast<const uint16_t*>(p.norm_weight) + column)
                                       : 0;
      }
    }
  }

  // Sums squares, and multiplies by the norm's weight.
  __device__ void begin_norm(uint32_t (&b)[Traits::kTokenTiles][8]) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float low = __uint_as_float(norm_weights[i] << 16) + p.norm_weight_offset;
      const float high = __uint_as_float(norm_weights[i] & 0xffff0000) + p.norm_weight_offset;
#pragma unroll
      for (int t = 0; t < Traits::kTokenTiles; ++t) {
        const float x = __uint_as_float(b[t][i] << 16);
        const float y = __uint_as_float(b[t][i] & 0xffff0000);
        squares[t] = fmaf(x, x, fmaf(y, y, squares[t]));
        b[t][i] = ptx::pack<true>(x * low, y * high);
      }
    }
  }

  __device__ void publish_scales(int32_t tile) const {
    if (4 * lane >= Traits::kFeatures) return;
#pragma unroll
    for (int i = 0; i < kScales; ++i) {
      // A lane's four features are all of the first or all of the second 8 of 16.
      const int row16 = lane / 4, second = lane / 2 % 2;
      TwoScales* two = &smem.tiles.scales[warp][i][row16][lane % 2 * 4];
      float scales[4];
      to_floats(raw_scales[i], p.scales, tile, i, scales);
#pragma unroll
      for (int j = 0; j < 4; ++j) two[j].scales[second] = scales[j] * (1.0f / Codes::unit(second));
      if constexpr (!Traits::kZeros) continue;
      float zeros[4];
      to_floats(raw_zeros[i], p.zeros, tile, i, zeros);
#pragma unroll
      for (int j = 0; j < 4; ++j) two[j].zeros[second] = scales[j] * zeros[j];
    }
  }

  // Four scales, or zeros, of a tile.
  __device__ void to_floats(uint2 raw, const void* from, int32_t tile, int i,
                            float (&four)[4]) const {
    FourScales stored{{raw.x, raw.y}};
    if (!scales_are_simple()) {
      stored = load_four_scales(from, p.scale_format, place_of_scales(tile, i),
                                p.n - (first_feature + 4 * lane), p.scales_aligned);
    }
    fastinfer::cuda::to_floats(stored, p.scale_format, four);
  }

  // Operand B for the four steps of a tile.
  __device__ void load_x(int stage, uint32_t (&b)[Traits::kTokenTiles][8]) const {
#pragma unroll
    for (int t = 0; t < Traits::kTokenTiles; ++t) {
      const int row = 8 * t + lane % 8;
#pragma unroll
      for (int two = 0; two < 2; ++two) {
        const int vector = 4 * two + lane / 8;
        uint32_t four[4];
        ptx::ldmatrix_x4(four,
                         ptx::shared_address(&smem.tiles.x[warp][stage][row][vector ^ (row % 8)]));
#pragma unroll
        for (int i = 0; i < 4; ++i) b[t][4 * two + i] = four[i];
      }
    }
  }

  __device__ static void multiply_step(float (&sum)[4], const uint32_t (&a)[4],
                                       const uint32_t (&b)[8], int step) {
    ptx::mma_m16n8k16<Codes::kBf16>(sum, a, b[2 * step], b[2 * step + 1], sum);
  }

  __device__ void multiply(int stage) {
    constexpr int kSteps = Traits::kStepsPerScale;
    uint32_t b[Traits::kTokenTiles][8];
    load_x(stage, b);
    if constexpr (Traits::kNorm) begin_norm(b);
    const uint32_t ones[4] = {Codes::kOnePair, Codes::kOnePair, Codes::kOnePair, Codes::kOnePair};
    float x_sums[kScales][Traits::kTokenTiles][4];  // of two rows of x, and again
#pragma unroll
    for (int step = 0; step < 4; ++step) {
#pragma unroll
      for (int t = 0; t < Traits::kTokenTiles; ++t) {
        float (&sum)[4] = x_sums[step / kSteps][t];
        if (step % kSteps == 0) sum[0] = sum[1] = sum[2] = sum[3] = 0.0f;
        multiply_step(sum, ones, b[t], step);
      }
    }
    // What the numbers' offset, and the default zero, take away from products with two rows of x.
    float offsets[kScales][Traits::kTokenTiles][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      constexpr float kDefaultZero = Traits::kZeros ? 0.0f : 1 << (Traits::kBits - 1);
      const float offset = Codes::kOffset + kDefaultZero * Codes::unit(i / 2 != 0);
#pragma unroll
      for (int s = 0; s < kScales; ++s) {
#pragma unroll
        for (int t = 0; t < Traits::kTokenTiles; ++t) {
          offsets[s][t][i] = -offset * x_sums[s][t][i % 2];
        }
      }
    }
#pragma unroll
    for (int block = 0; block < Traits::kBlocks; ++block) {
      uint32_t words[Codes::kWords];
#pragma unroll
      for (int j = 0; j < Codes::kLoads; ++j) {
        const uint4 four = smem.tiles.weights[warp][stage][block][j][lane];
        words[4 * j] = four.x, words[4 * j + 1] = four.y;
        words[4 * j + 2] = four.z, words[4 * j + 3] = four.w;
      }
#pragma unroll
      for (int row = 0; row < Codes::kRows; ++row) {
        const int row16 = Codes::kRows * block + row;
        float part[Traits::kTokenTiles][4];
#pragma unroll
        for (int step = 0; step < 4; ++step) {
          const int of_scale = step / kSteps;
          uint32_t a[4];
          Codes::operand(words, row, step, a);
#pragma unroll
          for (int t = 0; t < Traits::kTokenTiles; ++t) {
            if (step % kSteps == 0) {
#pragma unroll
              for (int i = 0; i < 4; ++i) part[t][i] = offsets[of_scale][t][i];
            }
            multiply_step(part[t], a, b[t], step);
          }
          if (step % kSteps == kSteps - 1) {
            const TwoScales& two = smem.tiles.scales[warp][of_scale][row16][lane / 4];
            add_scaled(sums[row16], part, x_sums[of_scale], two);
          }
        }
      }
    }
  }

  __device__ static void add_scaled(float (&sums)[Traits::kTokenTiles][4],
                                    const float (&part)[Traits::kTokenTiles][4],
                                    const float (&x_sums)[Traits::kTokenTiles][4],
                                    const TwoScales& two) {
    const float2 scales = *reinterpret_cast<const float2*>(two.scales);
#pragma unroll
    for (int t = 0; t < Traits::kTokenTiles; ++t) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if constexpr (Traits::kZeros) {
          const float2 zeros = *reinterpret_cast<const float2*>(two.zeros);
          sums[t][i] = fmaf(i < 2 ? -zeros.x : -zeros.y, x_sums[t][i % 2], sums[t][i]);
        }
        sums[t][i] = fmaf(i < 2 ? scales.x : scales.y, part[t][i], sums[t][i]);
      }
    }
  }

  // sums[i][t] are two features, 16 i + lane / 4 and 8 further, of two rows of x, 8 t + 2 (lane %
  // 4) and the next.
  __device__ void publish_sums() const {
#pragma unroll
    for (int row16 = 0; row16 < Traits::kRows; ++row16) {
#pragma unroll
      for (int t = 0; t < Traits::kTokenTiles; ++t) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int token = 8 * t + 2 * (lane % 4) + i % 2;
          smem.sums[warp][token][16 * row16 + lane / 4 + 8 * (i / 2)] = sums[row16][t][i];
        }
      }
    }
    if constexpr (Traits::kNorm) {
#pragma unroll
      for (int t = 0; t < Traits::kTokenTiles; ++t) {
        float sum = squares[t];
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        if (lane % 4 == 0) smem.squares[warp][8 * t + lane / 4] = sum;
      }
    }
  }
};

// The sums of a block's warps.
template <class Traits>
__device__ void add_up_warps(typename Traits::Smem& smem, int tokens) {
  if (Traits::kNorm && threadIdx.x < Traits::kTokens) {
    float sum = 0.0f;
#pragma unroll
    for (int warp = 0; warp < Traits::kWarps; ++warp) sum += smem.squares[warp][threadIdx.x];
    smem.block_squares[threadIdx.x] = sum;
  }
  constexpr int kFours = Traits::kFeatures / 4;
  for (int i = threadIdx.x; i < kFours * tokens; i += Traits::kThreads) {
    const int token = i / kFours, feature = i % kFours * 4;
    float4 sum = {};
#pragma unroll
    for (int warp = 0; warp < Traits::kWarps; ++warp) {
      const float4 four = *reinterpret_cast<const float4*>(&smem.sums[warp][token][feature]);
      sum.x += four.x, sum.y += four.y, sum.z += four.z, sum.w += four.w;
    }
    *reinterpret_cast<float4*>(&smem.block_sums[0][token][feature]) = sum;
  }
}

// Results of rows that are normalised.
template <class Traits>
__device__ void finish_normalised(const LowBitParams& p, typename Traits::Smem& smem,
                                  int32_t first_feature) {
  int64_t known = -1;
  float rms = 0.0f;
  finish_cluster<Traits::kFeatures, Traits::kThreads>(
      p.result, smem.block_sums, first_feature, 0, p.m, [&](float sum, int64_t row, int32_t) {
        if (row != known) {
          float squares = 0.0f;
          for (uint32_t block = 0; block < ptx::cluster_size(); ++block) {
            squares += ptx::cluster_load(&smem.block_squares[row], block);
          }
          rms = sqrtf(squares / static_cast<float>(p.k) + p.norm_eps);
          known = row;
        }
        return sum / rms;
      });
}

// Results, but for those that are not finite: a bit for each of this thread, in their order.
template <class Traits>
__device__ uint32_t finish_finite(const LowBitParams& p, typename Traits::Smem& smem,
                                  int32_t first_feature) {
  static_assert(Traits::kFeatures * Traits::kTokens <= 32 * Traits::kThreads);
  uint32_t kept = 0, bit = 1;
  const auto is_finite = [&](float sum, int token) {
    const bool finite = isfinite(sum);
    if (!finite) {
      smem.suspect[token] = true;
      kept |= bit;
    }
    bit <<= 1;
    return finite;
  };
  if (p.result.light && p.result.out_in_eights) {
    // What is written here is written again.
    finish_cluster<Traits::kFeatures, Traits::kThreads>(p.result, smem.block_sums, first_feature, 0,
                                                        p.m, [&](float sum, int64_t row, int32_t) {
                                                          is_finite(sum, static_cast<int>(row));
                                                          return sum;
                                                        });
  } else {
    // The residual may be the result: it is read once.
    each_of_cluster<Traits::kFeatures, Traits::kThreads>(
        first_feature, p.n, p.m, [&](int token, int32_t n) {
          const float sum = whole_sum(smem.block_sums, token, n - first_feature);
          if (is_finite(sum, token)) store_sum(p.result, sum, token, n);
        });
  }
  return kept;
}

// Those that were not.
template <class Traits>
__device__ void finish_others(const LowBitParams& p, typename Traits::Smem& smem,
                              int32_t first_feature, uint32_t kept) {
  for (int token = 0; token < p.m; ++token) {
    if (!smem.suspect[token]) continue;
    const bool nan = row_has_nan<Traits>(p, token);
    uint32_t bit = 1;
    const auto finish = [&](int of_token, int32_t n) {
      if (of_token == token && (kept & bit) != 0) {
        const float sum = nan ? NAN : term_by_term<typename Traits::T, Traits::kBits>(p, token, n);
        store_sum(p.result, sum, token, n);
      }
      bit <<= 1;
    };
    if (p.result.light && p.result.out_in_eights) {
      each_of_cluster<Traits::kFeatures / 8, Traits::kThreads>(first_feature / 8, p.n / 8, p.m,
                                                               [&](int of_token, int32_t eighth) {
                                                                 for (int i = 0; i < 8; ++i)
                                                                   finish(of_token, 8 * eighth + i);
                                                               });
    } else {
      each_of_cluster<Traits::kFeatures, Traits::kThreads>(first_feature, p.n, p.m, finish);
    }
  }
}

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kBlocksOfSm)
    low_bit_few_rows_kernel(const __grid_constant__ LowBitParams p) {
  extern __shared__ uint4 memory[];
  auto& smem = reinterpret_cast<typename Traits::Smem&>(memory);
  const int warp = ptx::same_in_warp(threadIdx.x / 32), lane = threadIdx.x % 32;
  const uint32_t rank = ptx::cluster_rank(), blocks = ptx::cluster_size();
  const int32_t first_block = blockIdx.x / blocks * Traits::kBlocks;
  const int32_t first_feature = first_block * (16 * Traits::Codes::kRows);
  {
    const auto first_of = [&](uint32_t block) {
      return static_cast<int32_t>(int64_t{p.k_tiles} * block / blocks);
    };
    const int32_t end = first_of(rank + 1);
    int32_t tile = first_of(rank) + warp;
    FewRowsWarp<Traits> w{p, smem, warp, lane, first_feature};
    FewRowsCopy<Traits> next{p, smem, warp, lane};
    next.begin(first_block, tile, tile < end);
    if (threadIdx.x < Traits::kTokens) smem.suspect[threadIdx.x] = false;
    ptx::grid_dependency_wait();  // x may be what the kernel before writes
    ptx::grid_dependency_launch();
    constexpr int kAhead = Traits::kStages - 1;
#pragma unroll
    for (int s = 0; s < kAhead; ++s) {
      if (tile + s * Traits::kWarps < end) next.copy(tile + s * Traits::kWarps, s);
      ptx::cp_async_commit();
    }
    for (float& sum : w.squares) sum = 0.0f;
    for (auto& row : w.sums)
      for (auto& tokens : row)
        for (float& sum : tokens) sum = 0.0f;
    if (tile < end) w.load_scales(tile), w.load_norm_weights(tile);
#pragma unroll 1
    for (int stage = 0; tile < end; tile += Traits::kWarps) {
      w.publish_scales(tile);
      ptx::cp_async_wait<kAhead - 1>();
      __syncwarp();  // the tile has arrived for all lanes, and nobody reads the one before
      const int free = stage == 0 ? kAhead : stage - 1;
      if (tile + kAhead * Traits::kWarps < end) next.copy(tile + kAhead * Traits::kWarps, free);
      ptx::cp_async_commit();
      if (tile + Traits::kWarps < end) w.load_scales(tile + Traits::kWarps);
      w.multiply(stage);
      if (tile + Traits::kWarps < end) w.load_norm_weights(tile + Traits::kWarps);
      __syncwarp();  // the scales have been read
      stage = stage == kAhead ? 0 : stage + 1;
    }
    __syncthreads();
    w.publish_sums();
  }
  __syncthreads();
  add_up_warps<Traits>(smem, p.m);
  sums_are_written<Traits::kThreads>();
  if constexpr (Traits::kNorm) {
    finish_normalised<Traits>(p, smem, first_feature);
    sums_are_read();
  } else {
    const uint32_t kept = finish_finite<Traits>(p, smem, first_feature);
    sums_are_read();
    if (__syncthreads_or(kept != 0)) finish_others<Traits>(p, smem, first_feature, kept);
  }
}

}  // namespace fastinfer::cuda
