// The norm that may come before a matrix product.
#pragma once

#include "../torch_utils.h"

namespace fastinfer::cpu {

void rms_norm_out(const Tensor& x, const Tensor& weight, double eps, double weight_offset,
                  const Tensor& out);

}  // namespace fastinfer::cpu
