// Launches the kernel for few rows, for codes of one width.
#pragma once

#include "low_bit_few_rows.cuh"

namespace fastinfer::cuda {

template <class Traits>
cudaError_t launch_few_rows_kernel(const LowBitParams& params, int cluster, int device,
                                   cudaStream_t stream) {
  constexpr int kMaxDevices = 64;
  constexpr int kBytes = sizeof(typename Traits::Smem);
  static_assert(kBytes * Traits::kBlocksOfSm <= 227 * 1024);
  static bool allowed[kMaxDevices] = {};
  const auto kernel = &low_bit_few_rows_kernel<Traits>;
  if (device >= kMaxDevices || !allowed[device]) {
    const cudaError_t error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
    if (error != cudaSuccess) return error;
    if (device < kMaxDevices) allowed[device] = true;
  }
  cudaLaunchAttribute attributes[2];
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
  const int64_t blocks =
      int64_t{params.n_tiles} * LowBitCodes<typename Traits::T, Traits::kBits>::kBlocks;
  cudaLaunchConfig_t config = {};
  config.gridDim =
      dim3(static_cast<unsigned>((blocks + Traits::kBlocks - 1) / Traits::kBlocks * cluster));
  config.blockDim = dim3(Traits::kThreads);
  config.dynamicSmemBytes = kBytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = 2;
  return cudaLaunchKernelEx(&config, kernel, params);
}

// Tries the shapes from kIndex on until it is the configuration's.
template <class T, int kBits, int kTokenTiles, int kStepsPerScale, int kIndex = 0>
cudaError_t launch_few_rows_shape(const LowBitParams& params, const FewRowsConfig& config,
                                  int device, cudaStream_t stream) {
  constexpr FewRowsShape kShape = kFewRowsShapes[kIndex];
  constexpr int kShapes = sizeof(kFewRowsShapes) / sizeof(kFewRowsShapes[0]);
  if constexpr (few_rows_shape_usable(kBits, kStepsPerScale == 1, kShape)) {
    if (config.shape.rows == kShape.rows && config.shape.warps == kShape.warps) {
      using Traits =
          FewRowsTraits<T, kBits, kTokenTiles, kStepsPerScale, kShape.rows, kShape.warps>;
      return launch_few_rows_kernel<Traits>(params, config.cluster, device, stream);
    }
  }
  if constexpr (kIndex + 1 < kShapes) {
    return launch_few_rows_shape<T, kBits, kTokenTiles, kStepsPerScale, kIndex + 1>(params, config,
                                                                                    device, stream);
  }
  return cudaErrorInvalidConfiguration;
}

template <class T, int kBits>
cudaError_t launch_few_rows(const LowBitParams& params, bool many_scales,
                            const FewRowsConfig& config, int device, cudaStream_t stream) {
  const bool two = params.m > 8;
  if (many_scales) {
    return two ? launch_few_rows_shape<T, kBits, 2, 1>(params, config, device, stream)
               : launch_few_rows_shape<T, kBits, 1, 1>(params, config, device, stream);
  }
  return two ? launch_few_rows_shape<T, kBits, 2, 4>(params, config, device, stream)
             : launch_few_rows_shape<T, kBits, 1, 4>(params, config, device, stream);
}

}  // namespace fastinfer::cuda
