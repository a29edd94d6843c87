// Weight-only quantized products for few rows of x: out = x W^T, the weights read once, at the
// speed of memory. Raw pointers only; checks, choice and launch live in low_bit_gemm.cu.
//
// The weights are operand A of mma.m16n8k16, rows of x its n = 8 columns. A cluster of blocks takes
// 16 kRows output features; its blocks cut K into ranges of tiles of 64, and the warps of a block
// take the tiles of its range in turn. Warps are on their own until the end: each copies its tiles
// of weights and of x a few tiles ahead (cp.async), and adds up products of codes in fp32, group by
// group:
//
//     sum_k W[n, k] x[k] = sum_g scale[g, n] (sum_k code[n, k] x[k] - zero[g, n] sum_k x[k])
//
// where sum_k x[k] is a product with ones, so that neither zeros nor the codes' offset cost an
// instruction an element. Then warps are added through shared memory, and blocks through the
// cluster's. Which sums are formed in which order depends on N and K alone: a row's bits are the
// same in any batch. What is not finite in a row without NaN is formed again, term by term: of an
// infinite x the codes' offset makes NaN, and of a large one infinity.
//
// Rows of x may be normalised on their way (RMSNorm): they are multiplied by the norm's weight
// where they become operands, their squares are summed beside, and what 1 / rms is multiplies the
// result.
#pragma once

#include "../ptx/cp_async.h"
#include "../ptx/grid_dependency.h"
#include "../ptx/ldmatrix.h"
#include "../ptx/mma.h"
#include "cluster_result.cuh"
#include "low_bit_codes.cuh"
#include "low_bit_gemm.h"
#include "low_bit_scales.cuh"
#include "result.cuh"

namespace fastinfer::cuda {

constexpr int kTile = 64;  // features, and columns of K

struct alignas(16) TwoScales {
  float2 features[2];
};

// kTokenTiles: rows of x, by 8. kStepsPerScale: how many steps of 16 along K share their scales for
// certain, 4 or 1.
template <class T_, int kBits_, int kTokenTiles_, int kStepsPerScale_, int kRows_, int kWarps_,
          bool kNorm_ = false>
struct FewRowsTraits {
  using T = T_;
  using Codes = LowBitCodes<T, kBits_>;
  static constexpr int kBits = kBits_;
  static constexpr int kTokenTiles = kTokenTiles_;
  static constexpr int kStepsPerScale = kStepsPerScale_;
  static constexpr bool kNorm = kNorm_;
  static constexpr int kScalesPerTile = 4 / kStepsPerScale;
  static constexpr int kTokens = 8 * kTokenTiles;
  static constexpr int kWarps = kWarps_;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kStages = 2;  // more warps gain more than more stages
  static constexpr int kBlocksOfSm = kStepsPerScale == 4 ? kFewRowsWarpsOfSm / kWarps : 1;
  static constexpr int kRows = kRows_;
  static constexpr int kFeatures = 16 * kRows;
  static constexpr int kBlocks = kRows / Codes::kRows;
  static_assert(kRows % Codes::kRows == 0);
  static constexpr int kRowPitch = kFeatures % 32 == 0 ? kFeatures + 4 : kFeatures + 20;
  static_assert(kRowPitch % 32 == 4);  // no two quads of a warp meet in a bank

  struct Stage {
    uint4 weights[kBlocks][Codes::kLoads][32];  // by the lane that copies and reads them
    uint4 x[kTokens][8];                        // vector v of a row stands at v ^ (row % 8)
  };
  struct Warp {
    Stage stages[kStages];
    // For two features, 8 apart: scale in the codes' unit, and what it takes to subtract the zero.
    TwoScales scales[kScalesPerTile][kRows][8];
  };
  struct Smem {
    union {
      Warp warps[kWarps];
      float sums[kWarps][kTokens][kRowPitch];  // when all products are done
    };
    float block_sums[1][kTokens][kRowPitch];
    bool suspect[kTokens];           // rows of x of which some sum is not finite
    float squares[kWarps][kTokens];  // sums of rows of x
    float block_squares[kTokens];
  };
};

// The bits of what column k of the weight multiplies: 0 past the last, and NaN where perm is wrong.
__device__ inline uint16_t element_of_x(const LowBitParams& p, int32_t token, int32_t k) {
  if (k >= p.k) return 0;
  const int32_t column = p.perm == nullptr ? k : p.perm[k];
  if (static_cast<uint32_t>(column) >= static_cast<uint32_t>(p.k)) return 0x7fff;
  return static_cast<const uint16_t*>(p.x)[token * p.x_row_stride + column];
}

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
  typename Traits::Warp& mine;
  int lane;
  int32_t first_block;                                 // of the cluster's features
  FourScales raw_scales[kScales], raw_zeros[kScales];  // of the next tile of K to be multiplied
  uint32_t norm_weights[Traits::kNorm ? 8 : 1];        // likewise, pairs for this lane's columns
  float squares[Traits::kTokenTiles];                  // of this lane's elements of a row

  // Of the next tile to be copied: this lane's vectors.
  static constexpr int kTileVectors = 32 * Traits::kBits;
  const uint4* weights;
  int32_t offsets[Traits::kBlocks];  // of the blocks
  const T* x;
  int32_t columns_left;  // from there to the end of x's row

  __device__ int32_t first_feature() const { return first_block * (16 * Codes::kRows); }

  __device__ void begin(int32_t tile) {
    weights = p.qweight + tile * kTileVectors + lane;
    x = static_cast<const T*>(p.x) + lane / 8 * p.x_row_stride + tile * kTile + 8 * (lane % 8);
    columns_left = p.k - tile * kTile - 8 * (lane % 8);
#pragma unroll
    for (int i = 0; i < Traits::kBlocks; ++i) offsets[i] = offset(i);
  }

  // Past the last block it is read again; nobody writes what comes of it.
  __device__ int32_t offset(int i) const {
    const int32_t block = min(first_block + i, p.n_tiles * Codes::kBlocks - 1);
    return block / Codes::kBlocks * p.k_tiles * kTileVectors +
           block % Codes::kBlocks * (32 * Codes::kLoads);
  }

  // Brings the weights of the tile after `tiles` of this warp's into L2.
  __device__ void prefetch_tile(int tiles) const {
    if (lane >= Traits::kBlocks) return;
    const int32_t ahead = tiles * Traits::kWarps * kTileVectors - lane;
    ptx::prefetch_l2(weights + offset(lane) + ahead, 512 * Codes::kLoads);
  }

  // Starts the copies of the next tile of K into a stage.
  __device__ void copy_tile(typename Traits::Stage& stage) {
#pragma unroll
    for (int i = 0; i < Traits::kBlocks; ++i) {
#pragma unroll
      for (int j = 0; j < Codes::kLoads; ++j) {
        ptx::cp_async_16(ptx::shared_address(&stage.weights[i][j][lane]),
                         weights + offsets[i] + 32 * j, false);
      }
    }
    if (p.x_in_vectors) {
      copy_x(stage);
    } else {
      gather_x(stage);
    }
    weights += Traits::kWarps * kTileVectors;
    x += Traits::kWarps * kTile;
    columns_left -= Traits::kWarps * kTile;
  }

  __device__ void copy_x(typename Traits::Stage& stage) const {
    const int first_row = lane / 8;
    const uint32_t to = ptx::shared_address(&stage.x[first_row][lane % 8 ^ first_row]);
#pragma unroll
    for (int i = 0; i < Traits::kTokens / 4; ++i) {
      // Every other row of a lane is 4 further, which turns one bit of the vector's place.
      if (first_row + 4 * i < p.m) {
        ptx::cp_async_16((to ^ (i % 2 * 64)) + i * 512, x + 4 * i * p.x_row_stride,
                         columns_left <= 0);
      }
    }
  }

  // The same, element by element.
  __device__ void gather_x(typename Traits::Stage& stage) const {
    const int32_t first_column = p.k - columns_left;
#pragma unroll 1
    for (int row = lane / 8; row < p.m; row += 4) {
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const uint32_t bits = element_of_x(p, row, first_column + i);
        words[i / 2] = i % 2 == 0 ? bits : words[i / 2] | bits << 16;
      }
      stage.x[row][lane % 8 ^ row % 8] = make_uint4(words[0], words[1], words[2], words[3]);
    }
  }

  // Rows that x does not have stay zero in every stage.
  __device__ void clear_missing_rows() const {
    for (int s = 0; s < Traits::kStages; ++s) {
      for (int i = lane + 8 * p.m; i < 8 * Traits::kTokens; i += 32) {
        mine.stages[s].x[i / 8][i % 8] = make_uint4(0, 0, 0, 0);
      }
    }
  }

  __device__ void load_scales(int32_t tile) {
    if (4 * lane >= Traits::kFeatures) return;
    const int32_t feature = first_feature() + 4 * lane;
#pragma unroll
    for (int i = 0; i < kScales; ++i) {
      const int32_t column = min(tile * kTile + 16 * i, p.k - 1);
      const int64_t first = int64_t{p.group_size.quotient(column)} * p.n + feature;
      raw_scales[i] =
          load_four_scales(p.scales, p.scale_format, first, p.n - feature, p.scales_aligned);
      if (p.zeros != nullptr) {
        raw_zeros[i] =
            load_four_scales(p.zeros, p.scale_format, first, p.n - feature, p.scales_aligned);
      }
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

  __device__ void publish_scales() const {
    if (4 * lane >= Traits::kFeatures) return;
    constexpr float kDefaultZero = 1 << (Traits::kBits - 1);
#pragma unroll
    for (int i = 0; i < kScales; ++i) {
      float scale[4], zero[4] = {kDefaultZero, kDefaultZero, kDefaultZero, kDefaultZero};
      to_floats(raw_scales[i], p.scale_format, scale);
      if (p.zeros != nullptr) to_floats(raw_zeros[i], p.scale_format, zero);
      // A lane's four features are all of the first or all of the second 8 of 16.
      const int row16 = lane / 4, second = lane / 2 % 2;
      const float unit = second ? 1.0f / Codes::unit(true) : 1.0f / Codes::unit(false);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float in_unit = scale[j] * unit;
        // code = (number - kOffset) / unit
        mine.scales[i][row16][lane % 2 * 4 + j].features[second] =
            make_float2(in_unit, fmaf(scale[j], zero[j], in_unit * Codes::kOffset));
      }
    }
  }

  // Operand B for the four steps of a tile.
  __device__ void load_x(const typename Traits::Stage& stage,
                         uint32_t (&b)[Traits::kTokenTiles][8]) const {
#pragma unroll
    for (int t = 0; t < Traits::kTokenTiles; ++t) {
      const int row = 8 * t + lane % 8;
#pragma unroll
      for (int two = 0; two < 2; ++two) {
        const int vector = 4 * two + lane / 8;
        uint32_t four[4];
        ptx::ldmatrix_x4(four, ptx::shared_address(&stage.x[row][vector ^ (row % 8)]));
#pragma unroll
        for (int i = 0; i < 4; ++i) b[t][4 * two + i] = four[i];
      }
    }
  }

  __device__ void multiply(const typename Traits::Stage& stage,
                           float (&sums)[Traits::kRows][Traits::kTokenTiles][4]) {
    uint32_t b[Traits::kTokenTiles][8];
    load_x(stage, b);
    if constexpr (Traits::kNorm) begin_norm(b);
    const uint32_t ones[4] = {Codes::kOnePair, Codes::kOnePair, Codes::kOnePair, Codes::kOnePair};
    float x_sums[kScales][Traits::kTokenTiles][4];
#pragma unroll
    for (int step = 0; step < 4; ++step) {
#pragma unroll
      for (int t = 0; t < Traits::kTokenTiles; ++t) {
        float (&sum)[4] = x_sums[step / Traits::kStepsPerScale][t];
        multiply_step(sum, ones, b[t], step);
      }
    }
#pragma unroll
    for (int block = 0; block < Traits::kBlocks; ++block) {
      uint32_t words[Codes::kWords];
#pragma unroll
      for (int j = 0; j < Codes::kLoads; ++j) {
        const uint4 four = stage.weights[block][j][lane];
        words[4 * j] = four.x, words[4 * j + 1] = four.y;
        words[4 * j + 2] = four.z, words[4 * j + 3] = four.w;
      }
#pragma unroll
      for (int row = 0; row < Codes::kRows; ++row) {
        const int row16 = Codes::kRows * block + row;
        float part[Traits::kTokenTiles][4];
#pragma unroll
        for (int step = 0; step < 4; ++step) {
          uint32_t a[4];
          Codes::operand(words, row, step, a);
#pragma unroll
          for (int t = 0; t < Traits::kTokenTiles; ++t) {
            multiply_step(part[t], a, b[t], step);
          }
          if (step % Traits::kStepsPerScale == Traits::kStepsPerScale - 1) {
            const int i = step / Traits::kStepsPerScale;
            add_scaled(sums[row16], part, x_sums[i], mine.scales[i][row16][lane / 4]);
          }
        }
      }
    }
  }

  // The first step of those that share their scales begins a sum.
  __device__ static void multiply_step(float (&sum)[4], const uint32_t (&a)[4],
                                       const uint32_t (&b)[8], int step) {
    if (step % Traits::kStepsPerScale == 0) {
#pragma unroll
      for (float& value : sum) value = 0.0f;
    }
    ptx::mma_m16n8k16<Codes::kBf16>(sum, a, b[2 * step], b[2 * step + 1], sum);
  }

  __device__ static void add_scaled(float (&sums)[Traits::kTokenTiles][4],
                                    const float (&part)[Traits::kTokenTiles][4],
                                    const float (&x_sums)[Traits::kTokenTiles][4],
                                    const TwoScales& scales) {
    const float4 two = *reinterpret_cast<const float4*>(&scales);
    const float scale[2] = {two.x, two.z}, zero[2] = {two.y, two.w};
#pragma unroll
    for (int t = 0; t < Traits::kTokenTiles; ++t) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float without_zero = fmaf(-zero[i / 2], x_sums[t][i], sums[t][i]);
        sums[t][i] = fmaf(scale[i / 2], part[t][i], without_zero);
      }
    }
  }
};

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kBlocksOfSm)
    low_bit_few_rows_kernel(const __grid_constant__ LowBitParams p) {
  using T = typename Traits::T;
  extern __shared__ uint4 memory[];
  auto& smem = reinterpret_cast<typename Traits::Smem&>(memory);
  const int warp = threadIdx.x / 32;
  const uint32_t rank = ptx::cluster_rank(), blocks = ptx::cluster_size();
  FewRowsWarp<Traits> w{p, smem.warps[warp], static_cast<int>(threadIdx.x % 32),
                        static_cast<int32_t>(blockIdx.x / blocks * Traits::kBlocks)};
  float sums[Traits::kRows][Traits::kTokenTiles][4] = {};
  {
    const auto first_of = [&](uint32_t block) {
      return static_cast<int32_t>(int64_t{p.k_tiles} * block / blocks);
    };
    const int32_t end = first_of(rank + 1);
    int32_t tile = first_of(rank) + warp;
    constexpr int kAhead = Traits::kStages - 1;
    w.begin(tile);
#pragma unroll
    for (int s = 0; s < kAhead; ++s) {
      if (tile + s * Traits::kWarps < end) w.prefetch_tile(s);
    }
    w.clear_missing_rows();
    if (threadIdx.x < Traits::kTokens) smem.suspect[threadIdx.x] = false;
    ptx::grid_dependency_wait();  // x may be what the kernel before writes
    ptx::grid_dependency_launch();
#pragma unroll
    for (int s = 0; s < kAhead; ++s) {
      if (tile + s * Traits::kWarps < end) w.copy_tile(w.mine.stages[s]);
      ptx::cp_async_commit();
    }
    for (float& sum : w.squares) sum = 0.0f;
    if (tile < end) w.load_scales(tile), w.load_norm_weights(tile);
    for (int stage = 0; tile < end; tile += Traits::kWarps) {
      ptx::cp_async_wait<kAhead - 1>();
      w.publish_scales();
      __syncwarp();  // the tile has arrived for all lanes, and nobody reads the one before
      const int free = stage == 0 ? kAhead : stage - 1;
      if (tile + kAhead * Traits::kWarps < end) w.copy_tile(w.mine.stages[free]);
      ptx::cp_async_commit();
      if (tile + Traits::kWarps < end) w.load_scales(tile + Traits::kWarps);
      w.multiply(w.mine.stages[stage], sums);
      if (tile + Traits::kWarps < end) w.load_norm_weights(tile + Traits::kWarps);
      __syncwarp();  // the scales have been read
      stage = stage == kAhead ? 0 : stage + 1;
    }
    ptx::cp_async_wait<0>();
  }

  // Warps, then blocks. sums[i][t] are two features, 16 i + lane / 4 and 8 further, of two rows of
  // x, 8 t + 2 (lane % 4) and the next.
  __syncthreads();
#pragma unroll
  for (int row16 = 0; row16 < Traits::kRows; ++row16) {
#pragma unroll
    for (int t = 0; t < Traits::kTokenTiles; ++t) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int token = 8 * t + 2 * (w.lane % 4) + i % 2;
        smem.sums[warp][token][16 * row16 + w.lane / 4 + 8 * (i / 2)] = sums[row16][t][i];
      }
    }
  }
  if constexpr (Traits::kNorm) {
#pragma unroll
    for (int t = 0; t < Traits::kTokenTiles; ++t) {
      float sum = w.squares[t];
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      if (w.lane % 4 == 0) smem.squares[warp][8 * t + w.lane / 4] = sum;
    }
  }
  __syncthreads();
  if (Traits::kNorm && threadIdx.x < Traits::kTokens) {
    float sum = 0.0f;
#pragma unroll
    for (int other = 0; other < Traits::kWarps; ++other) sum += smem.squares[other][threadIdx.x];
    smem.block_squares[threadIdx.x] = sum;
  }
  for (int i = threadIdx.x; i < Traits::kFeatures * p.m; i += Traits::kThreads) {
    const int token = i / Traits::kFeatures, feature = i % Traits::kFeatures;
    float sum = 0.0f;
#pragma unroll
    for (int other = 0; other < Traits::kWarps; ++other) sum += smem.sums[other][token][feature];
    smem.block_sums[0][token][feature] = sum;
  }
  // What is not finite is kept back, a bit for each sum of this thread.
  static_assert(Traits::kFeatures * Traits::kTokens <= 32 * Traits::kThreads);
  uint32_t kept = 0, bit = 1;
  add_up_cluster<Traits::kFeatures, Traits::kThreads>(
      smem.block_sums, w.first_feature(), p.n, p.m, [&](float sum, int token, int32_t n) {
        if constexpr (Traits::kNorm) {
          float squares = 0.0f;
          for (uint32_t block = 0; block < blocks; ++block) {
            squares += ptx::cluster_load(&smem.block_squares[token], block);
          }
          const float rms = sqrtf(squares / static_cast<float>(p.k) + p.norm_eps);
          store_sum(p.result, sum / rms, token, n);
        } else if (isfinite(sum)) {
          store_sum(p.result, sum, token, n);
        } else {
          smem.suspect[token] = true;
          kept |= bit;
        }
        bit <<= 1;
      });
  __syncthreads();
  for (int token = 0; token < p.m; ++token) {
    if (!smem.suspect[token]) continue;
    const bool nan = row_has_nan<Traits>(p, token);
    bit = 1;
    each_of_cluster<Traits::kFeatures, Traits::kThreads>(
        w.first_feature(), p.n, p.m, [&](int of_token, int32_t n) {
          if (of_token == token && (kept & bit) != 0) {
            store_sum(p.result, nan ? NAN : term_by_term<T, Traits::kBits>(p, token, n), token, n);
          }
          bit <<= 1;
        });
  }
}

}  // namespace fastinfer::cuda
