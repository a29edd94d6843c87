// Launches the decode or the extend kernel for one pair of element formats.
#pragma once

#include "../launch.h"
#include "decode.cuh"
#include "extend.cuh"

namespace fastinfer::cuda {

template <class T, auto kKernel, int kThreads>
cudaError_t launch_units(const DecodeParams& params, int blocks, int device, cudaStream_t stream) {
  constexpr int kBytes = sizeof(typename T::Smem);
  static_assert(kBytes <= kMaxSharedBytes);
  const cudaError_t error = allow_shared_memory<kKernel, kBytes>(device);
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = kBytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kKernel, params);
}

template <KvFormat kK, KvFormat kV, int kRows, int kHeadDim, int kValueDim>
cudaError_t launch_decode_kernel(const DecodeParams& params, int blocks, int device,
                                 cudaStream_t stream) {
  if constexpr (is_byte(kK) && is_byte(kV) && kRows >= 32) {
    using T = ExtendTraits<kK, kV, kRows, kHeadDim, kValueDim>;
    return launch_units<T, &extend_kernel<T>, T::kBlockThreads>(params, blocks, device, stream);
  } else {
    using T = DecodeTraits<kK, kV, kRows, kHeadDim, kValueDim>;
    return launch_units<T, &decode_kernel<T>, T::kThreads>(params, blocks, device, stream);
  }
}

template <KvFormat kK, KvFormat kV, int kRows>
cudaError_t launch_decode_rows(const DecodeShape& shape, const DecodeParams& params, int blocks,
                               int device, cudaStream_t stream) {
  if (shape.head_dim == 64) {
    return launch_decode_kernel<kK, kV, kRows, 64, 64>(params, blocks, device, stream);
  }
  if (shape.head_dim == 128) {
    return launch_decode_kernel<kK, kV, kRows, 128, 128>(params, blocks, device, stream);
  }
  if (shape.head_dim == 192) {
    return launch_decode_kernel<kK, kV, kRows, 192, 128>(params, blocks, device, stream);
  }
  return launch_decode_kernel<kK, kV, kRows, 256, 256>(params, blocks, device, stream);
}

template <KvFormat kK, KvFormat kV>
cudaError_t launch_decode(const DecodeShape& shape, const DecodeParams& params, int blocks,
                          int device, cudaStream_t stream) {
  switch (shape.rows) {
    case 16: return launch_decode_rows<kK, kV, 16>(shape, params, blocks, device, stream);
    case 32: return launch_decode_rows<kK, kV, 32>(shape, params, blocks, device, stream);
    default: return launch_decode_rows<kK, kV, 64>(shape, params, blocks, device, stream);
  }
}

}  // namespace fastinfer::cuda
