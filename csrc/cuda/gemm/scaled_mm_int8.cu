// Scaled products of int8.
#include "scaled_mm.h"
#include "scaled_mm_launch.cuh"

namespace fastinfer::cuda {

template <>
cudaError_t scaled_mm_few_tokens<false>(const ScaledMmParams& params, const ScaledMmMaps& maps,
                                        bool /*block_scales*/, const FewTokensConfig& config,
                                        int device, cudaStream_t stream) {
  return launch_few_tokens<false, false>(params, maps, config, device, stream);
}

template <>
cudaError_t scaled_mm_many_tokens<false>(const ScaledMmParams& params, const ScaledMmMaps& maps,
                                         bool /*block_scales*/, int features, int sms, int device,
                                         cudaStream_t stream) {
  return choose_many_tokens<false, false>(params, maps, features, sms, device, stream);
}

}  // namespace fastinfer::cuda
