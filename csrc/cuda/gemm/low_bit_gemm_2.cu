// Codes of 2 bits.
#include "low_bit_gemm.h"
#include "low_bit_launch.cuh"

namespace fastinfer::cuda {

template <>
cudaError_t low_bit_few_rows<2>(const LowBitParams& params, bool bf16, bool many_scales,
                                const FewRowsConfig& config, int device, cudaStream_t stream) {
  return bf16 ? launch_few_rows<__nv_bfloat16, 2>(params, many_scales, config, device, stream)
              : launch_few_rows<__half, 2>(params, many_scales, config, device, stream);
}

template <>
cudaError_t low_bit_many_rows<2>(const LowBitParams& params, bool bf16, const CUtensorMap& x_map,
                                 int groups, const ManyRowsConfig& config, int sms, int device,
                                 cudaStream_t stream) {
  const auto launch = bf16 ? &launch_many_rows<__nv_bfloat16, 2> : &launch_many_rows<__half, 2>;
  return launch(params, x_map, groups, config, sms, device, stream);
}

}  // namespace fastinfer::cuda
