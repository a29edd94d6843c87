// The portable norms, for hand-written kernels that do not take a problem.
#pragma once

#include "../torch_utils.h"

namespace fastinfer::portable {

void rms_norm_out(const Tensor& x, const Tensor& weight, double eps, double weight_offset,
                  const Tensor& out);
void fused_add_rms_norm_(const Tensor& x, const Tensor& residual, const Tensor& weight, double eps,
                         double weight_offset);

}  // namespace fastinfer::portable
