#include "decode_launch.cuh"

namespace fastinfer::cuda {

cudaError_t launch_decode_int8(const DecodeShape& shape, const DecodeParams& params, int blocks,
                               int device, cudaStream_t stream) {
  return launch_decode<KvFormat::kInt8, KvFormat::kInt8>(shape, params, blocks, device, stream);
}

}  // namespace fastinfer::cuda
