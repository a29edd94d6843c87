// The portable low-bit matrix product, for hand-written kernels that do not take a problem.
#pragma once

#include "../checks/low_bit_gemm.h"

namespace fastinfer::portable {

void low_bit_gemm_out(const LowBitGemmInputs& inputs, const Tensor& out);

}  // namespace fastinfer::portable
