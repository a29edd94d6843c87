// Launches the kernels of scaled products of one format.
#pragma once

#include <algorithm>

#include "cluster_launch.cuh"
#include "scaled_mm_few.cuh"
#include "scaled_mm_many.cuh"

namespace fastinfer::cuda {

// Tries the shapes from kIndex on until it is the configuration's.
template <bool kFp8, bool kBlocks, int kIndex = 0>
cudaError_t launch_few_tokens(const ScaledMmParams& params, const ScaledMmMaps& maps,
                              const FewTokensConfig& config, int device, cudaStream_t stream) {
  constexpr FewTokensShape kShape = kFewTokensShapes[kIndex];
  constexpr int kShapes = sizeof(kFewTokensShapes) / sizeof(kFewTokensShapes[0]);
  if (config.shape.tokens == kShape.tokens && config.shape.splits == kShape.splits) {
    using Traits = FewTokensTraits<kFp8, kBlocks, kShape.tokens, kShape.splits>;
    constexpr int kBytes = sizeof(typename Traits::Smem);
    static_assert(kBytes <= 227 * 1024);
    const int32_t token_tiles = (params.m + Traits::kTokens - 1) / Traits::kTokens;
    const int columns = params.result.gated ? Traits::kFeatures / 2 : Traits::kFeatures;
    const int64_t tiles = int64_t{(params.result.columns + columns - 1) / columns} * token_tiles;
    return launch_clusters<&scaled_mm_few_tokens_kernel<Traits>, kBytes>(
        tiles, Traits::kThreads, config.cluster, device, stream, params, maps, token_tiles);
  }
  if constexpr (kIndex + 1 < kShapes) {
    return launch_few_tokens<kFp8, kBlocks, kIndex + 1>(params, maps, config, device, stream);
  }
  return cudaErrorInvalidConfiguration;
}

template <class Traits>
cudaError_t launch_many_tokens(const ScaledMmParams& params, const ScaledMmMaps& maps, int sms,
                               int device, cudaStream_t stream) {
  constexpr int kBytes = sizeof(typename Traits::Smem);
  static_assert(kBytes <= 227 * 1024);
  const int32_t token_tiles = (params.m + kManyTokensRows - 1) / kManyTokensRows;
  const int columns = params.result.gated ? Traits::kFeatures / 2 : Traits::kFeatures;
  const int64_t tiles = int64_t{(params.result.columns + columns - 1) / columns} * token_tiles;
  return launch_clusters<&scaled_mm_many_tokens_kernel<Traits>, kBytes>(
      std::min<int64_t>(tiles, sms / 2), Traits::kThreads, 2, device, stream, params, maps,
      token_tiles, static_cast<int32_t>(tiles));
}

// Tries the numbers of features from kIndex on until it is the one asked for.
template <bool kFp8, bool kBlocks, int kIndex = 0>
cudaError_t choose_many_tokens(const ScaledMmParams& params, const ScaledMmMaps& maps, int features,
                               int sms, int device, cudaStream_t stream) {
  constexpr std::span<const int> kWidths = many_tokens_widths(kBlocks);
  constexpr int kFeatures = kWidths[kIndex];
  if (features == kFeatures) {
    return launch_many_tokens<ManyTokensTraits<kFp8, kBlocks, kFeatures>>(params, maps, sms, device,
                                                                          stream);
  }
  if constexpr (kIndex + 1 < kWidths.size()) {
    return choose_many_tokens<kFp8, kBlocks, kIndex + 1>(params, maps, features, sms, device,
                                                         stream);
  }
  return cudaErrorInvalidConfiguration;
}

}  // namespace fastinfer::cuda
