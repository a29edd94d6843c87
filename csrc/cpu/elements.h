// Element types as the kernel tables index them, and small vectors converted to fp32 on the way in.
#pragma once

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <vector>

#include "../torch_utils.h"

namespace fastinfer::cpu {

// fp32, bf16, fp16: the order of every kernel table.
inline int element_index(ScalarType dtype) {
  return dtype == ScalarType::Float ? 0 : dtype == ScalarType::BFloat16 ? 1 : 2;
}

inline std::vector<float> as_float_vector(const void* data, ScalarType dtype, int64_t n,
                                          float offset = 0.0f) {
  std::vector<float> result(static_cast<size_t>(n));
  for (int64_t i = 0; i < n; ++i) {
    if (dtype == ScalarType::Float) {
      result[i] = static_cast<const float*>(data)[i] + offset;
    } else if (dtype == ScalarType::BFloat16) {
      result[i] =
          static_cast<float>(static_cast<const torch::headeronly::BFloat16*>(data)[i]) + offset;
    } else {
      result[i] = static_cast<float>(static_cast<const torch::headeronly::Half*>(data)[i]) + offset;
    }
  }
  return result;
}

}  // namespace fastinfer::cpu
