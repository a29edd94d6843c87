// What low-bit products of few rows have in shared memory, and how a warp has its tiles copied
// there.
#pragma once

#include "../ptx/cp_async.h"
#include "low_bit_codes.cuh"
#include "low_bit_gemm.h"

namespace fastinfer::cuda {

constexpr int kTile = 64;  // features, and columns of K

// For two features, 8 apart: scales in the codes' unit, and zeros by their scales.
struct alignas(16) TwoScales {
  float scales[2];
  float zeros[2];
};

// kTokenTiles: rows of x, by 8. kStepsPerScale: how many steps of 16 along K share their scales for
// certain, 4 or 1. kZeros: groups have zeros of their own.
template <class T_, int kBits_, int kTokenTiles_, int kStepsPerScale_, int kRows_, int kWarps_,
          bool kZeros_, bool kNorm_>
struct FewRowsTraits {
  using T = T_;
  using Codes = LowBitCodes<T, kBits_>;
  static constexpr int kBits = kBits_;
  static constexpr int kTokenTiles = kTokenTiles_;
  static constexpr int kStepsPerScale = kStepsPerScale_;
  static constexpr bool kZeros = kZeros_;
  static constexpr bool kNorm = kNorm_;
  static constexpr int kScalesPerTile = 4 / kStepsPerScale;
  static constexpr int kTokens = 8 * kTokenTiles;
  static constexpr int kWarps = kWarps_;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kStages = 2;  // more warps gain more than more stages
  static constexpr int kBlocksOfSm = kStepsPerScale == 4 ? kFewRowsWarpsOfSm / kWarps : 1;
  static constexpr int kRows = kRows_;
  static constexpr int kFeatures = 16 * kRows;
  static constexpr int kBlocks = kRows / Codes::kRows;  // of codes
  static_assert(kRows % Codes::kRows == 0);
  static constexpr int kRowPitch = kFeatures % 32 == 0 ? kFeatures + 4 : kFeatures + 20;
  static_assert(kRowPitch % 32 == 4);  // no two quads of a warp meet in a bank

  using X = uint4[kTokens][8];                        // vector v of a row stands at v ^ (row % 8)
  using Weights = uint4[kBlocks][Codes::kLoads][32];  // by the lane that reads them
  struct Tiles {
    X x[kWarps][kStages];
    Weights weights[kWarps][kStages];
    TwoScales scales[kWarps][kScalesPerTile][kRows][8];
  };
  struct Smem {
    union {
      Tiles tiles;
      // When all products are done.
      struct {
        float sums[kWarps][kTokens][kRowPitch];
        float block_sums[1][kTokens][kRowPitch];
      };
    };
    // Of the blocks of codes from a warp's first, in bytes: there are no registers to spare.
    alignas(16) uint32_t offsets[kWarps][(kBlocks + 3) / 4 * 4];
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

// Copies the tiles of one warp, every kWarps-th of K.
template <class Traits>
struct FewRowsCopy {
  using T = typename Traits::T;
  using Codes = typename Traits::Codes;
  static constexpr int kTileVectors = 32 * Traits::kBits;
  static constexpr int kBlockVectors = 32 * Codes::kLoads;

  const LowBitParams& p;
  typename Traits::Smem& smem;
  int warp, lane;
  // Of the next tile, this lane's first vectors: of its first block of codes, and of x.
  const char* weights;
  const T* x;

  // Of a block of codes in the first tile of K. The last is read again past it; nobody writes what
  // comes of that.
  __device__ int32_t vector_of(int32_t block) const {
    const int32_t within = min(block, p.n_tiles * Codes::kBlocks - 1);
    return within / Codes::kBlocks * p.k_tiles * kTileVectors +
           within % Codes::kBlocks * kBlockVectors;
  }

  // `any`: whether this warp has tiles.
  __device__ void begin(int32_t first_block, int32_t first_tile, bool any) {
    const int32_t first = vector_of(first_block);
    weights = reinterpret_cast<const char*>(p.qweight + first + first_tile * kTileVectors + lane);
    x = static_cast<const T*>(p.x) + lane / 8 * p.x_row_stride + first_tile * kTile +
        8 * (lane % 8);
    if (lane < Traits::kBlocks) {
      const int32_t vector = vector_of(first_block + lane);
      smem.offsets[warp][lane] = 16 * static_cast<uint32_t>(vector - first);
      // The weights of the first tile into L2.
      if (any) ptx::prefetch_l2(p.qweight + vector + first_tile * kTileVectors, 16 * kBlockVectors);
    }
    // Rows that x does not have stay zero in every stage.
    for (int s = 0; s < Traits::kStages; ++s) {
      for (int i = lane + 8 * p.m; i < 8 * Traits::kTokens; i += 32) {
        smem.tiles.x[warp][s][i / 8][i % 8] = make_uint4(0, 0, 0, 0);
      }
    }
    __syncwarp();
  }

  // The next tile, which is `tile` of K, into a stage.
  __device__ void copy(int32_t tile, int stage) {
    uint32_t offsets[Traits::kBlocks];  // all are loaded before one is waited for
#pragma unroll
    for (int i = 0; i < Traits::kBlocks; ++i) offsets[i] = smem.offsets[warp][i];
#pragma unroll
    for (int i = 0; i < Traits::kBlocks; ++i) {
      const char* from = weights + offsets[i];
#pragma unroll
      for (int j = 0; j < Codes::kLoads; ++j) {
        ptx::cp_async_16(ptx::shared_address(&smem.tiles.weights[warp][stage][i][j][lane]),
                         from + 512 * j, false);
      }
    }
    if (p.x_in_vectors) {
      copy_x(tile, stage);
    } else {
      gather_x(tile, stage);
    }
    weights += 16 * Traits::kWarps * kTileVectors;
    x += Traits::kWarps * kTile;
  }

  __device__ void copy_x(int32_t tile, int stage) const {
    const int first_row = lane / 8, vector = lane % 8;
    const bool past_end = tile * kTile + 8 * vector >= p.k;
    const uint32_t to =
        ptx::shared_address(&smem.tiles.x[warp][stage][first_row][vector ^ first_row]);
#pragma unroll
    for (int i = 0; i < Traits::kTokens / 4; ++i) {
      // Every other row of a lane is 4 further, which turns one bit of the vector's place.
      ptx::cp_async_16_if(first_row + 4 * i < p.m, (to ^ (i % 2 * 64)) + i * 512,
                          x + 4 * i * p.x_row_stride, past_end);
    }
  }

  // x element by element.
  __device__ void gather_x(int32_t tile, int stage) const {
#pragma unroll 1
    for (int row = lane / 8; row < p.m; row += 4) {
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const uint32_t bits = element_of_x(p, row, tile * kTile + 8 * (lane % 8) + i);
        words[i / 2] = i % 2 == 0 ? bits : words[i / 2] | bits << 16;
      }
      smem.tiles.x[warp][stage][row][lane % 8 ^ row % 8] =
          make_uint4(words[0], words[1], words[2], words[3]);
    }
  }
};

}  // namespace fastinfer::cuda
