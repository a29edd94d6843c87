// Launches the kernels for codes of one width.
#pragma once

#include <algorithm>

#include "cluster_launch.cuh"
#include "low_bit_few_rows.cuh"
#include "low_bit_many_rows.cuh"

namespace fastinfer::cuda {

// ---- few rows

template <class Traits>
cudaError_t launch_few_rows_kernel(const LowBitParams& params, int cluster, int device,
                                   cudaStream_t stream) {
  constexpr int kBytes = sizeof(typename Traits::Smem);
  static_assert(kBytes * Traits::kBlocksOfSm <= 227 * 1024);
  const int64_t groups =
      (int64_t{params.n_tiles} * Traits::Codes::kBlocks + Traits::kBlocks - 1) / Traits::kBlocks;
  return launch_clusters<&low_bit_few_rows_kernel<Traits>, kBytes>(groups, Traits::kThreads,
                                                                   cluster, device, stream, params);
}

// Tries the shapes from kIndex on until it is the configuration's.
template <class T, int kBits, int kTokenTiles, int kStepsPerScale, bool kZeros, bool kNorm,
          int kIndex = 0>
cudaError_t launch_few_rows_shape(const LowBitParams& params, const FewRowsConfig& config,
                                  int device, cudaStream_t stream) {
  constexpr FewRowsShape kShape = kFewRowsShapes[kIndex];
  constexpr int kShapes = sizeof(kFewRowsShapes) / sizeof(kFewRowsShapes[0]);
  if constexpr (few_rows_shape_usable(kBits, kStepsPerScale == 1, kShape)) {
    if (config.shape.rows == kShape.rows && config.shape.warps == kShape.warps) {
      using Traits = FewRowsTraits<T, kBits, kTokenTiles, kStepsPerScale, kShape.rows, kShape.warps,
                                   kZeros, kNorm>;
      return launch_few_rows_kernel<Traits>(params, config.cluster, device, stream);
    }
  }
  if constexpr (kIndex + 1 < kShapes) {
    return launch_few_rows_shape<T, kBits, kTokenTiles, kStepsPerScale, kZeros, kNorm, kIndex + 1>(
        params, config, device, stream);
  }
  return cudaErrorInvalidConfiguration;
}

template <class T, int kBits, bool kZeros>
cudaError_t launch_few_rows_of(const LowBitParams& params, bool many_scales,
                               const FewRowsConfig& config, int device, cudaStream_t stream) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    if (params.norm_weight != nullptr) {
      return launch_few_rows_shape<T, kBits, 1, 4, kZeros, true>(params, config, device, stream);
    }
  }
  const auto launch = params.m > 8
                          ? (many_scales ? &launch_few_rows_shape<T, kBits, 2, 1, kZeros, false>
                                         : &launch_few_rows_shape<T, kBits, 2, 4, kZeros, false>)
                          : (many_scales ? &launch_few_rows_shape<T, kBits, 1, 1, kZeros, false>
                                         : &launch_few_rows_shape<T, kBits, 1, 4, kZeros, false>);
  return launch(params, config, device, stream);
}

template <class T, int kBits>
cudaError_t launch_few_rows(const LowBitParams& params, bool many_scales,
                            const FewRowsConfig& config, int device, cudaStream_t stream) {
  const auto launch = params.zeros == nullptr ? &launch_few_rows_of<T, kBits, false>
                                              : &launch_few_rows_of<T, kBits, true>;
  return launch(params, many_scales, config, device, stream);
}

// ---- many rows

template <class Traits>
cudaError_t launch_some_rows_kernel(const LowBitParams& params, const CUtensorMap& x_map,
                                    int cluster, int device, cudaStream_t stream) {
  constexpr int kBytes = sizeof(typename Traits::Smem);
  static_assert(kBytes <= 227 * 1024);
  const int32_t token_tiles = (params.m + Traits::kTokens - 1) / Traits::kTokens;
  // Gates and what they multiply are shared out alike.
  const int halves = params.result.gated ? 2 : 1;
  const int32_t of_n = params.n_tiles / halves, of_block = Traits::kFeatureTiles / halves;
  if (of_block == 0) return cudaErrorInvalidConfiguration;
  const int64_t tiles = int64_t{(of_n + of_block - 1) / of_block} * token_tiles;
  return launch_clusters<&low_bit_some_rows_kernel<Traits>, kBytes>(
      tiles, Traits::kThreads, cluster, device, stream, params, x_map, token_tiles);
}

template <class Traits>
cudaError_t launch_many_rows_kernel(const LowBitParams& params, const CUtensorMap& x_map, int sms,
                                    int device, cudaStream_t stream) {
  constexpr int kBytes = sizeof(typename Traits::Smem);
  static_assert(kBytes <= 227 * 1024);
  const int32_t token_tiles = (params.m + Traits::kTokens - 1) / Traits::kTokens;
  const int halves = params.result.gated ? 2 : 1;
  const int32_t of_n = params.n_tiles / halves, of_cluster = 2 * Traits::kFeatureTiles / halves;
  const int32_t tiles = (of_n + of_cluster - 1) / of_cluster * token_tiles;
  return launch_clusters<&low_bit_many_rows_kernel<Traits>, kBytes>(
      std::min<int64_t>(int64_t{tiles} * params.parts, sms / 2), Traits::kThreads, 2, device,
      stream, params, x_map, token_tiles, tiles);
}

// Tries the shapes from kIndex on until it is the configuration's. kGroups: of 128 columns.
template <class T, int kBits, int kGroups, int kIndex = 0>
cudaError_t launch_many_rows_shape(const LowBitParams& params, const CUtensorMap& x_map,
                                   const ManyRowsConfig& config, int sms, int device,
                                   cudaStream_t stream) {
  constexpr ManyRowsShape kShape = kManyRowsShapes[kIndex];
  constexpr int kShapes = sizeof(kManyRowsShapes) / sizeof(kManyRowsShapes[0]);
  if constexpr (many_rows_shape_usable(kGroups, kShape)) {
    const ManyRowsShape& shape = config.shape;
    if (shape.tokens == kShape.tokens && shape.splits == kShape.splits &&
        shape.shared == kShape.shared) {
      using Traits = ManyRowsTraits<T, kBits, kShape.tokens, kShape.warpgroups, kShape.splits,
                                    kGroups, kShape.shared>;
      if constexpr (kShape.shared) {
        return launch_many_rows_kernel<Traits>(params, x_map, sms, device, stream);
      } else {
        return launch_some_rows_kernel<Traits>(params, x_map, config.cluster, device, stream);
      }
    }
  }
  if constexpr (kIndex + 1 < kShapes) {
    return launch_many_rows_shape<T, kBits, kGroups, kIndex + 1>(params, x_map, config, sms, device,
                                                                 stream);
  }
  return cudaErrorInvalidConfiguration;
}

template <class T, int kBits>
cudaError_t launch_many_rows(const LowBitParams& params, const CUtensorMap& x_map, int groups,
                             const ManyRowsConfig& config, int sms, int device,
                             cudaStream_t stream) {
  return groups == 1
             ? launch_many_rows_shape<T, kBits, 1>(params, x_map, config, sms, device, stream)
             : launch_many_rows_shape<T, kBits, 2>(params, x_map, config, sms, device, stream);
}

}  // namespace fastinfer::cuda
