// The portable low-bit matrix product, for hand-written kernels that do not take a problem.
#pragma once

#include "../torch_utils.h"

namespace fastinfer::portable {

void low_bit_gemm_out(int bits, const Tensor& x, const Tensor& qweight, const Tensor& scales,
                      const std::optional<Tensor>& zeros, int64_t group_size,
                      const std::optional<Tensor>& perm, const std::optional<Tensor>& bias,
                      const Tensor& out);

}  // namespace fastinfer::portable
