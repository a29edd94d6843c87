// Scaled products of e4m3.
#include "scaled_mm.h"
#include "scaled_mm_launch.cuh"

namespace fastinfer::cuda {

template <>
cudaError_t scaled_mm_few_tokens<true>(const ScaledMmParams& params, const ScaledMmMaps& maps,
                                       bool block_scales, const FewTokensConfig& config, int device,
                                       cudaStream_t stream) {
  return block_scales ? launch_few_tokens<true, true>(params, maps, config, device, stream)
                      : launch_few_tokens<true, false>(params, maps, config, device, stream);
}

template <>
cudaError_t scaled_mm_many_tokens<true>(const ScaledMmParams& params, const ScaledMmMaps& maps,
                                        bool block_scales, int features, int sms, int device,
                                        cudaStream_t stream) {
  return block_scales
             ? choose_many_tokens<true, true>(params, maps, features, sms, device, stream)
             : choose_many_tokens<true, false>(params, maps, features, sms, device, stream);
}

}  // namespace fastinfer::cuda
