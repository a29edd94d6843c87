// Launching a kernel whose blocks come in clusters.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "../launch.h"

namespace fastinfer::cuda {

// In clusters of neighbours in x, brought up while the kernel before ends.
template <auto kKernel, int kBytes, class... Args>
cudaError_t launch_clusters(int64_t blocks, int threads, int cluster, int device,
                            cudaStream_t stream, const Args&... args) {
  const cudaError_t error = allow_shared_memory<kKernel, kBytes>(device);
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute attributes[2];
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks * cluster));
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = kBytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = 2;
  return cudaLaunchKernelEx(&config, kKernel, args...);
}

}  // namespace fastinfer::cuda
