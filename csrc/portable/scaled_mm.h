// The portable scaled product, for hand-written kernels that do not take a problem.
#pragma once

#include "../checks/scaled_mm.h"

namespace fastinfer::portable {

void scaled_mm_out(const ScaledMmInputs& inputs, const Tensor& out);

}  // namespace fastinfer::portable
