// CUDA: fp8_scaled_mm and int8_scaled_mm on Hopper.
#include <torch/csrc/stable/library.h>

#include "../../checks/scaled_mm.h"
#include "../../functional.h"
#include "../../portable/portable.h"
#include "../../portable/scaled_mm.h"
#include "../runtime.h"
#include "../tensor_map.h"
#include "result_params.h"
#include "scaled_mm.h"

namespace fastinfer::cuda {
namespace {

// 32 bits hold the sum of so many products of -128 and -128.
constexpr int64_t kMostInt8Columns = (1 << 17) - 1;

// Both come by TMA. Where scales vary along K, those of b have one value for a tile of 64 features;
// elsewhere each feature has its own, or all have one. Blocks of scales and gates do not go
// together.
bool supports(const ScaledMmProblem& p, int32_t device_index) {
  if (capability(p.op, device_index) != 90 || p.a_zero != nullptr) return false;
  const bool b_in_blocks = p.b_scale.block_rows != 1, b_of_features = p.b_scale.row_stride != 0;
  if (p.block_scales ? b_of_features && !b_in_blocks : b_in_blocks) return false;
  if (p.epilogue.gated && p.block_scales) return false;
  const bool counted =
      p.m <= kMostIndices / 2 && p.n <= kMostIndices / 2 && p.k <= kMostIndices / 2;
  const bool exact = p.format == MmFormat::kFp8 || p.k <= kMostInt8Columns;
  return counted && exact && suits_tma(p.a, 1, {{p.m, p.a_row_stride}}) &&
         suits_tma(p.b, 1, {{p.n, p.b_row_stride}});
}

MmScaleParams scales_of(const MmScales& scales) {
  return {scales.data, scales.row_stride, scales.block_stride, scales.block_rows};
}

CUtensorMap map_of(const ScaledMmProblem& p, const uint8_t* data, int64_t rows, int64_t stride,
                   uint32_t box_rows) {
  return make_tensor_map(
      p.op, ScalarType::Byte,
      {data, {p.k, rows, 1, 1}, {1, stride, 0, 0}, {kMmColumns, box_rows, 1, 1}});
}

template <bool kFp8>
cudaError_t launch(const ScaledMmProblem& p, int device, cudaStream_t stream) {
  const ScaledMmParams params{
      scales_of(p.a_scale),
      scales_of(p.b_scale),
      result_params(p.epilogue, p.bias, p.bias_dtype, p.out, p.out_row_stride, p.dtype, p.m),
      static_cast<int32_t>(p.m),
      static_cast<int32_t>(p.n),
      static_cast<int32_t>((p.k + kMmColumns - 1) / kMmColumns)};
  const int sms = num_sms(p.op, device);
  if (p.m <= 2 * kMostFewTokens) {
    const auto config =
        few_tokens_config(p.m, (p.n + 63) / 64, params.stages, sms, p.epilogue.gated);
    const ScaledMmMaps maps{
        map_of(p, p.a, p.m, p.a_row_stride, static_cast<uint32_t>(config.shape.tokens)),
        map_of(p, p.b, p.n, p.b_row_stride, kFewTokensBoxB)};
    return scaled_mm_few_tokens<kFp8>(params, maps, p.block_scales, config, device, stream);
  }
  const int features = many_tokens_features(p.m, p.n, params.stages, sms, p.block_scales);
  const ScaledMmMaps maps{map_of(p, p.a, p.m, p.a_row_stride, kManyTokensBoxA),
                          map_of(p, p.b, p.n, p.b_row_stride, many_tokens_box_b(features))};
  return scaled_mm_many_tokens<kFp8>(params, maps, p.block_scales, features, sms, device, stream);
}

void scaled_mm_out(const ScaledMmInputs& inputs, const Tensor& out) {
  const ScaledMmProblem p = check_scaled_mm(inputs, out);
  if (p.m == 0) return;
  const int32_t device_index = inputs.a.get_device_index();
  if (!supports(p, device_index)) return portable::scaled_mm_out(inputs, out);
  const DeviceGuard guard(p.op, device_index);
  const auto stream = current_stream(p.op, device_index);
  const bool fp8 = p.format == MmFormat::kFp8;
  FI_CUDA_CHECK((fp8 ? &launch<true> : &launch<false>)(p, device_index, stream), p.op);
}

}  // namespace
}  // namespace fastinfer::cuda

STABLE_TORCH_LIBRARY_IMPL(fastinfer, CUDA, m) {
  if (fastinfer::portable_forced()) return;
  fastinfer::functional::register_scaled_mm<&fastinfer::cuda::scaled_mm_out>(m);
}
