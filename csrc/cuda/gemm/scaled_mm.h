// What scaled_mm.cu asks of the kernels, which are compiled in a file for each format.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include "../indexing.h"
#include "result.h"
#include "scaled_mm_config.h"

namespace fastinfer::cuda {

// As MmScales of checks/scaled_mm.h.
struct MmScaleParams {
  const float* data;
  int64_t row_stride, block_stride;
  int64_t block_rows;

  __host__ __device__ const float* at(int64_t row, int64_t block) const {
    return data + row / block_rows * row_stride + block * block_stride;
  }
};

struct ScaledMmParams {
  MmScaleParams a_scale;  // of rows of a
  MmScaleParams b_scale;  // of rows of b, which are output features
  ResultParams result;
  int32_t m, n;
  int32_t stages;  // of K
};

// Maps show a, and b, in boxes of 128 columns; rows as the functions below say.
struct ScaledMmMaps {
  CUtensorMap a, b;
};

constexpr uint32_t kFewTokensBoxB = 64;
constexpr uint32_t kManyTokensBoxA = 128;
constexpr uint32_t many_tokens_box_b(int features) {
  return static_cast<uint32_t>(features / 2);
}

template <bool kFp8>
cudaError_t scaled_mm_few_tokens(const ScaledMmParams& params, const ScaledMmMaps& maps,
                                 bool block_scales, const FewTokensConfig& config, int device,
                                 cudaStream_t stream);
template <bool kFp8>
cudaError_t scaled_mm_many_tokens(const ScaledMmParams& params, const ScaledMmMaps& maps,
                                  bool block_scales, int features, int sms, int device,
                                  cudaStream_t stream);

}  // namespace fastinfer::cuda
