#pragma once

#include <cstdint>

#include "epilogue_args.h"
#include "isa.h"

namespace fastinfer::cpu {

constexpr int64_t kMmTile = 64;  // columns of a work item, and features that are decoded at once
constexpr int64_t kMmRowBlock = 128;  // rows of a for which a tile is decoded once
constexpr int64_t kMmBlock = 128;     // inputs, and features of b, that share a block's scale

// [rows / block_rows, ceil(K / 128)], strides 0 where a dimension has one scale.
struct MmScaleArgs {
  const float* data;
  int64_t row_stride;
  int64_t block_stride;
  int64_t block_rows;
};

// y = (a - a_zero) b^T, scaled, + bias, and what follows. Types of elements are indices: fp32,
// bf16, fp16.
struct ScaledMmArgs {
  const uint8_t* a;  // [M, K]
  int64_t a_row_stride;
  const uint8_t* b;  // [N, K]
  int64_t b_row_stride;
  MmScaleArgs a_scale;
  MmScaleArgs b_scale;
  bool block_scales;      // some scale varies along K
  const int32_t* a_zero;  // [M] or null
  int64_t a_zero_stride;
  const void* bias;  // [N] or null
  int bias_type;
  int64_t n, k;
  EpilogueArgs epilogue;
};

// Rows [row_begin, row_end) of a tile of the result; at most kMmRowBlock of them.
using ScaledMmFunction = void (*)(const ScaledMmArgs& args, int64_t tile, int64_t row_begin,
                                  int64_t row_end);

struct ScaledMmKernels {
  ScaledMmFunction fp8;
  ScaledMmFunction int8;
};

FI_ISA_TABLE(ScaledMmKernels, scaled_mm_kernels)

}  // namespace fastinfer::cpu
