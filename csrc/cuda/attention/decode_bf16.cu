#include "decode_launch.cuh"

namespace fastinfer::cuda {

cudaError_t launch_decode_bf16(const DecodeShape& shape, const DecodeParams& params, int blocks,
                               int device, cudaStream_t stream) {
  return launch_decode<KvFormat::kBf16, KvFormat::kBf16>(shape, params, blocks, device, stream);
}

}  // namespace fastinfer::cuda
