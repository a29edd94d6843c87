// Low-bit products whose K was cut in parts that no cluster spans: the sum of the parts, and what
// follows it.
#include <algorithm>

#include "../ptx/grid_dependency.h"
#include "low_bit_gemm.h"
#include "result.cuh"

namespace fastinfer::cuda {
namespace {

constexpr int kThreads = 256;

// Rows of the partial sums are a multiple of 64 long: four of them are one load.
__global__ void __launch_bounds__(kThreads)
    low_bit_add_parts_kernel(const __grid_constant__ LowBitParams p) {
  const ResultParams& r = p.result;
  const int64_t pitch = int64_t{p.n_tiles} * 64, part = p.m * pitch;
  ptx::grid_dependency_wait();
  ptx::grid_dependency_launch();
  const bool eights = r.light && r.out_in_eights;
  const int32_t items = eights ? r.columns / 8 : r.columns;  // of a row
  const int64_t all = int64_t{p.m} * items, step = int64_t{gridDim.x} * kThreads;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < all; i += step) {
    const int64_t row = i / items;
    const int32_t column = static_cast<int32_t>(i % items) * (eights ? 8 : 1);
    const float* from = p.partial + row * pitch + column;
    if (eights) {
      finish_eight(r, row, column, [&](bool second, float (&values)[8]) {
        const float* of_part = from + (second ? r.columns : 0);
#pragma unroll
        for (float& value : values) value = 0.0f;
        for (int32_t k = 0; k < p.parts; ++k, of_part += part) {
#pragma unroll
          for (int j = 0; j < 8; j += 4) {
            const float4 four = *reinterpret_cast<const float4*>(of_part + j);
            values[j] += four.x, values[j + 1] += four.y;
            values[j + 2] += four.z, values[j + 3] += four.w;
          }
        }
      });
    } else {
      finish_one(r, row, column, [&](bool second) {
        float value = 0.0f;
        const float* of_part = from + (second ? r.columns : 0);
        for (int32_t k = 0; k < p.parts; ++k, of_part += part) value += *of_part;
        return value;
      });
    }
  }
}

}  // namespace

cudaError_t low_bit_add_parts(const LowBitParams& params, int sms, cudaStream_t stream) {
  constexpr int64_t kBlocksOfSm = 8;
  const int64_t items = int64_t{params.m} * ((params.result.columns + 7) / 8);
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(
      std::min((items + kThreads - 1) / kThreads, kBlocksOfSm * int64_t{sms})));
  config.blockDim = dim3(kThreads);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, low_bit_add_parts_kernel, params);
}

}  // namespace fastinfer::cuda
