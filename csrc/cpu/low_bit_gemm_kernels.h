#pragma once

#include <cstdint>

#include "epilogue_args.h"
#include "isa.h"

namespace fastinfer::cpu {

constexpr int64_t kGemmTile = 64;       // columns of a work item, and features of a packed tile
constexpr int64_t kGemmRowBlock = 256;  // rows of x for which a tile is decoded once

// y = x W^T + bias, and what follows. Types of elements are indices: fp32, bf16, fp16.
struct LowBitGemmArgs {
  const void* x;  // [M, K]
  int x_type;
  int64_t x_row_stride;
  const int32_t* qweight;  // [ceil(N / 64), ceil(K / 64), bits * 128]
  const void* scales;      // [groups, N]
  const void* zeros;       // [groups, N] or null
  int scale_type;
  const int32_t* perm;  // [K] or null
  const void* bias;     // [N] or null
  int bias_type;
  const int32_t* outlier_offsets;  // [N + 1], or null: there are no outliers
  const int32_t* outlier_columns;
  const void* outlier_values;
  int outlier_type;
  int64_t n, k;
  int64_t group_size;  // a multiple of 16
  EpilogueArgs epilogue;
};

// Rows [row_begin, row_end) of a tile of the result; at most kGemmRowBlock of them.
using LowBitGemmFunction = void (*)(const LowBitGemmArgs& args, int64_t tile, int64_t row_begin,
                                    int64_t row_end);

struct LowBitGemmKernels {
  LowBitGemmFunction bits2;
  LowBitGemmFunction bits3;
  LowBitGemmFunction bits4;
  LowBitGemmFunction bits8;
};

FI_ISA_TABLE(LowBitGemmKernels, low_bit_gemm_kernels)

}  // namespace fastinfer::cpu
