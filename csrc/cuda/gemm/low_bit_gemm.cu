// CUDA: int2_gemm, int3_gemm, int4_gemm and int8_gemm on Hopper.
#include <torch/csrc/stable/library.h>

#include "../../checks/low_bit_gemm.h"
#include "../../functional.h"
#include "../../portable/low_bit_gemm.h"
#include "../../portable/portable.h"
#include "../runtime.h"
#include "../tensor_map.h"
#include "low_bit_gemm.h"
#include "result_params.h"
#include "tuned_configs.h"

namespace fastinfer::cuda {
namespace {

bool has_norm(const LowBitGemmProblem& p) {
  return p.norm_weight != nullptr;
}

bool x_in_vectors(const LowBitGemmProblem& p) {
  return p.perm == nullptr && p.k % 8 == 0 &&
         aligned_to(16, p.x, 2, {p.m > 1 ? p.x_row_stride : 0});
}

// Whether the product itself normalises x.
bool norm_is_fused(const LowBitGemmProblem& p) {
  return has_norm(p) && p.m <= kMostNormRows && p.dtype == ScalarType::BFloat16 &&
         p.norm_weight_dtype == p.dtype && aligned_to(4, p.norm_weight, 1, {}) &&
         p.group_size % 64 == 0 && x_in_vectors(p) && !p.epilogue.gated &&
         p.outliers.offsets == nullptr;
}

// Few rows take any x; many rows, and gates, come by TMA, and their groups by tiles of 64.
bool takes_few_rows(const LowBitGemmProblem& p) {
  return p.m <= kFewRows && !p.epilogue.gated;
}

// Weights are copied in vectors of 16 bytes, which are counted in 32 bits. Gates are whole tiles.
bool supports(const LowBitGemmProblem& p, int32_t device_index) {
  if (capability(p.op, device_index) != 90 || p.dtype == ScalarType::Float) return false;
  if (p.outliers.offsets != nullptr) return false;
  if (p.epilogue.gated && p.epilogue.width % 64 != 0) return false;
  const int64_t vectors = (p.n + 63) / 64 * ((p.k + 63) / 64) * p.bits * 32;
  const bool counted = vectors <= kMostIndices && p.m <= kMostIndices / 2 &&
                       p.k <= kMostIndices / 2 && p.n <= kMostIndices / 2;
  const bool by_tma =
      p.perm == nullptr && p.group_size % 64 == 0 && suits_tma(p.x, 2, {{p.m, p.x_row_stride}});
  return counted && aligned_to(16, p.qweight, 1, {}) && (takes_few_rows(p) || by_tma);
}

LowBitParams params_of(const LowBitGemmProblem& p) {
  const int64_t bytes_of_four = 4 * element_size(p.scale_dtype);
  const bool aligned = p.n % 4 == 0 && aligned_to(bytes_of_four, p.scales, 1, {}) &&
                       (p.zeros == nullptr || aligned_to(bytes_of_four, p.zeros, 1, {}));
  const auto in_rows_of_16_bytes = [&](const void* scales) {
    const int64_t size = element_size(p.scale_dtype);
    return scales == nullptr || (p.n * size % 16 == 0 && aligned_to(16, scales, 1, {}));
  };
  return {
      p.x,
      p.x_row_stride,
      p.perm,
      reinterpret_cast<const uint4*>(p.qweight),
      p.scales,
      p.zeros,
      result_params(p.epilogue, p.bias, p.bias_dtype, p.out, p.out_row_stride, p.out_dtype, p.m),
      static_cast<int32_t>(p.m),
      static_cast<int32_t>(p.n),
      static_cast<int32_t>(p.k),
      static_cast<int32_t>((p.n + 63) / 64),
      static_cast<int32_t>((p.k + 63) / 64),
      Divider(static_cast<int32_t>(p.group_size)),
      x_in_vectors(p),
      float_format_of(p.scale_dtype),
      aligned,
      in_rows_of_16_bytes(p.scales) && in_rows_of_16_bytes(p.zeros),
      norm_is_fused(p) ? p.norm_weight : nullptr,
      static_cast<float>(p.norm_eps),
      static_cast<float>(p.norm_weight_offset),
      1,
      nullptr};
}

// The number of its name among those that have tables.
int look_up_name(const char* op, int32_t device_index) {
  cudaDeviceProp properties;
  FI_CUDA_CHECK(cudaGetDeviceProperties(&properties, device_index), op);
  return device_name_number(properties.name);
}

// Parts of K as sums of their own, which are then added up. The first kernel knows no gates: they
// come with what follows.
template <int kBits>
cudaError_t launch_parts(const LowBitGemmProblem& p, LowBitParams params, const Tensor& like,
                         const CUtensorMap& x_map, int groups, const ManyRowsConfig& config,
                         int sms, int device, cudaStream_t stream) {
  const Tensor partial = torch::stable::new_empty(
      like, {config.cluster, p.m, int64_t{params.n_tiles} * 64}, ScalarType::Float);
  params.parts = config.cluster;
  params.partial = static_cast<float*>(partial.data_ptr());
  LowBitParams ungated = params;
  ungated.result.gated = false;
  const bool bf16 = p.dtype == ScalarType::BFloat16;
  const cudaError_t error =
      low_bit_many_rows<kBits>(ungated, bf16, x_map, groups, config, sms, device, stream);
  return error != cudaSuccess ? error : low_bit_add_parts(params, sms, stream);
}

template <int kBits>
cudaError_t launch(const LowBitGemmProblem& p, const Tensor& out, int device, cudaStream_t stream) {
  const LowBitParams params = params_of(p);
  const bool bf16 = p.dtype == ScalarType::BFloat16;
  const int sms = num_sms(p.op, device);
  const LowBitShape shape{kBits, p.m, p.n, p.k, p.group_size};
  const auto name = [&] { return kept_of_device<look_up_name>(p.op, device); };
  if (takes_few_rows(p)) {
    const bool many_scales = shape.many_scales();
    const auto tuned = tuned_config<FewRowsConfig>(name, shape);
    const auto config =
        tuned ? *tuned : few_rows_config(kBits, many_scales, params.n_tiles, params.k_tiles, sms);
    return low_bit_few_rows<kBits>(params, bf16, many_scales, config, device, stream);
  }
  const int groups = shape.stage_groups();
  auto tuned = params.result.plain ? tuned_config<ManyRowsConfig>(name, shape) : std::nullopt;
  if (tuned && tuned->shape.shared && !many_rows_parts_fit(p.m, params.n_tiles, tuned->cluster)) {
    tuned.reset();  // measured with fewer rows
  }
  const auto config = tuned ? *tuned
                            : many_rows_config(p.m, params.n_tiles, params.k_tiles, groups, sms,
                                               params.result.light, p.epilogue.gated);
  const CUtensorMap x_map = make_tensor_map(
      p.op, p.dtype,
      {p.x, {p.k, p.m, 1, 1}, {1, p.x_row_stride, 0, 0}, {64, many_rows_box(config.shape), 1, 1}});
  if (config.shape.shared && config.cluster > 1) {
    return launch_parts<kBits>(p, params, out, x_map, groups, config, sms, device, stream);
  }
  return low_bit_many_rows<kBits>(params, bf16, x_map, groups, config, sms, device, stream);
}

cudaError_t launch(const LowBitGemmProblem& p, const Tensor& out, int device, cudaStream_t stream) {
  switch (p.bits) {
    case 2: return launch<2>(p, out, device, stream);
    case 3: return launch<3>(p, out, device, stream);
    case 4: return launch<4>(p, out, device, stream);
    default: return launch<8>(p, out, device, stream);
  }
}

// x with its rows normalised, by the op of that name.
Tensor normalised(const LowBitGemmInputs& inputs) {
  const auto& norm = inputs.norm;
  using torch::stable::detail::from;
  StableIValue stack[] = {from(inputs.x), from(*norm.weight), from(norm.eps),
                          from(norm.weight_offset)};
  if (torch_call_dispatcher("fastinfer::rms_norm", "", stack, TORCH_ABI_VERSION) !=
      AOTI_TORCH_SUCCESS) {
    throw std::runtime_error("fastinfer::rms_norm failed");
  }
  return torch::stable::detail::to<Tensor>(stack[0]);
}

void low_bit_gemm_out(const LowBitGemmInputs& inputs, const Tensor& out) {
  const LowBitGemmProblem p = check_low_bit_gemm(inputs, out);
  if (p.m == 0) return;
  const int32_t device_index = inputs.x.get_device_index();
  if (has_norm(p) && !norm_is_fused(p)) {
    const Tensor x = normalised(inputs);
    const std::optional<Tensor> none;
    return low_bit_gemm_out({inputs.bits,
                             x,
                             inputs.qweight,
                             inputs.scales,
                             inputs.zeros,
                             inputs.group_size,
                             inputs.perm,
                             inputs.bias,
                             inputs.epilogue,
                             {none, 0.0, 0.0},
                             inputs.outliers},
                            out);
  }
  if (!supports(p, device_index)) return portable::low_bit_gemm_out(inputs, out);
  const DeviceGuard guard(p.op, device_index);
  FI_CUDA_CHECK(launch(p, out, device_index, current_stream(p.op, device_index)), p.op);
}

}  // namespace
}  // namespace fastinfer::cuda

STABLE_TORCH_LIBRARY_IMPL(fastinfer, CUDA, m) {
  if (fastinfer::portable_forced()) return;
  fastinfer::functional::register_low_bit_gemm<&fastinfer::cuda::low_bit_gemm_out>(m);
}
