// CUDA: int2_gemm, int3_gemm, int4_gemm and int8_gemm on Hopper, for few rows of x.
#include <torch/csrc/stable/library.h>

#include "../../checks/low_bit_gemm.h"
#include "../../functional.h"
#include "../../portable/low_bit_gemm.h"
#include "../../portable/portable.h"
#include "../runtime.h"
#include "low_bit_gemm.h"

namespace fastinfer::cuda {
namespace {

// Vectors of the weight are counted in 32 bits.
bool supports(const LowBitGemmProblem& p, int32_t device_index) {
  if (capability(p.op, device_index) != 90 || p.dtype == ScalarType::Float) return false;
  const int64_t vectors = (p.n + 63) / 64 * ((p.k + 63) / 64) * p.bits * 32;
  return p.m <= kFewRows && vectors <= kMostIndices && p.k <= kMostIndices / 2 &&
         p.n <= kMostIndices / 2;
}

ScaleFormat format_of(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Float: return ScaleFormat::kFloat;
    case ScalarType::BFloat16: return ScaleFormat::kBf16;
    default: return ScaleFormat::kFp16;
  }
}

LowBitParams params_of(const LowBitGemmProblem& p) {
  const int64_t four = 4 * element_size(p.scale_dtype);
  const bool aligned = p.n % 4 == 0 && aligned_to(four, p.scales, 1, {}) &&
                       (p.zeros == nullptr || aligned_to(four, p.zeros, 1, {}));
  const bool in_vectors =
      p.perm == nullptr && p.k % 8 == 0 && aligned_to(16, p.x, 2, {p.m > 1 ? p.x_row_stride : 0});
  return {p.x,
          p.x_row_stride,
          p.perm,
          reinterpret_cast<const uint4*>(p.qweight),
          p.scales,
          p.zeros,
          p.bias,
          p.out,
          p.out_row_stride,
          static_cast<int32_t>(p.m),
          static_cast<int32_t>(p.n),
          static_cast<int32_t>(p.k),
          static_cast<int32_t>((p.n + 63) / 64),
          static_cast<int32_t>((p.k + 63) / 64),
          Divider(static_cast<int32_t>(p.group_size)),
          in_vectors,
          format_of(p.scale_dtype),
          aligned,
          format_of(p.bias_dtype)};
}

cudaError_t launch(const LowBitGemmProblem& p, int device, cudaStream_t stream) {
  const LowBitParams params = params_of(p);
  const bool bf16 = p.dtype == ScalarType::BFloat16;
  const bool many_scales = p.group_size % 64 != 0;
  const FewRowsConfig config =
      few_rows_config(p.bits, many_scales, params.n_tiles, params.k_tiles, num_sms(p.op, device));
  switch (p.bits) {
    case 2: return low_bit_few_rows<2>(params, bf16, many_scales, config, device, stream);
    case 3: return low_bit_few_rows<3>(params, bf16, many_scales, config, device, stream);
    case 4: return low_bit_few_rows<4>(params, bf16, many_scales, config, device, stream);
    default: return low_bit_few_rows<8>(params, bf16, many_scales, config, device, stream);
  }
}

void low_bit_gemm_out(int bits, const Tensor& x, const Tensor& qweight, const Tensor& scales,
                      const std::optional<Tensor>& zeros, int64_t group_size,
                      const std::optional<Tensor>& perm, const std::optional<Tensor>& bias,
                      const Tensor& out) {
  const LowBitGemmProblem p =
      check_low_bit_gemm(bits, x, qweight, scales, zeros, group_size, perm, bias, out);
  if (p.m == 0) return;
  const int32_t device_index = x.get_device_index();
  if (!supports(p, device_index)) {
    return portable::low_bit_gemm_out(bits, x, qweight, scales, zeros, group_size, perm, bias, out);
  }
  const DeviceGuard guard(p.op, device_index);
  FI_CUDA_CHECK(launch(p, device_index, current_stream(p.op, device_index)), p.op);
}

}  // namespace
}  // namespace fastinfer::cuda

STABLE_TORCH_LIBRARY_IMPL(fastinfer, CUDA, m) {
  if (fastinfer::portable_forced()) return;
  fastinfer::functional::register_low_bit_gemm<&fastinfer::cuda::low_bit_gemm_out>(m);
}
