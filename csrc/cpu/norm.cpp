// CPU: rms_norm, fused_add_rms_norm_, layer_norm, fused_add_layer_norm_.
#include "norm.h"

#include <torch/csrc/stable/library.h>

#include "../checks/norm.h"
#include "../functional.h"
#include "../portable/portable.h"
#include "elements.h"
#include "norm_kernels.h"
#include "parallel.h"

namespace fastinfer::cpu {
namespace {

void run(const NormProblem& p, const NormFunction (&functions)[3]) {
  if (p.x_rows.count == 0) return;
  // fp32 weights without an offset are used in place; others are converted once per call.
  std::vector<float> weight, bias;
  NormArgs args{p.x,
                p.out,
                p.residual,
                static_cast<const float*>(p.weight),
                static_cast<const float*>(p.bias),
                p.x_rows,
                p.out_rows,
                p.residual_rows,
                p.hidden,
                p.eps};
  if (p.weight_dtype != ScalarType::Float || p.weight_offset != 0.0f) {
    weight = as_float_vector(p.weight, p.weight_dtype, p.hidden, p.weight_offset);
    args.weight = weight.data();
  }
  if (p.bias != nullptr && p.bias_dtype != ScalarType::Float) {
    bias = as_float_vector(p.bias, p.bias_dtype, p.hidden);
    args.bias = bias.data();
  }
  const NormFunction function = functions[element_index(p.dtype)];
  parallel_for(p.x_rows.count, p.hidden,
               [&](int64_t begin, int64_t end) { function(args, begin, end); });
}

}  // namespace

void rms_norm_out(const Tensor& x, const Tensor& weight, double eps, double weight_offset,
                  const Tensor& out) {
  run(check_norm("rms_norm", x, weight, std::nullopt, eps, weight_offset, out, nullptr),
      norm_kernels().rms_norm);
}

namespace {

void fused_add_rms_norm_(const Tensor& x, const Tensor& residual, const Tensor& weight, double eps,
                         double weight_offset) {
  run(check_norm("fused_add_rms_norm_", x, weight, std::nullopt, eps, weight_offset, x, &residual),
      norm_kernels().rms_norm);
}

void layer_norm_out(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
                    double eps, double weight_offset, const Tensor& out) {
  run(check_norm("layer_norm", x, weight, bias, eps, weight_offset, out, nullptr),
      norm_kernels().layer_norm);
}

void fused_add_layer_norm_(const Tensor& x, const Tensor& residual, const Tensor& weight,
                           const std::optional<Tensor>& bias, double eps, double weight_offset) {
  run(check_norm("fused_add_layer_norm_", x, weight, bias, eps, weight_offset, x, &residual),
      norm_kernels().layer_norm);
}

}  // namespace
}  // namespace fastinfer::cpu

STABLE_TORCH_LIBRARY_IMPL(fastinfer, CPU, m) {
  if (fastinfer::portable_forced_on_cpu()) return;
  using namespace fastinfer::cpu;
  m.impl("rms_norm", TORCH_BOX(&fastinfer::functional::rms_norm<&rms_norm_out>));
  m.impl("rms_norm.out", TORCH_BOX(&rms_norm_out));
  m.impl("fused_add_rms_norm_", TORCH_BOX(&fused_add_rms_norm_));
  m.impl("layer_norm", TORCH_BOX(&fastinfer::functional::layer_norm<&layer_norm_out>));
  m.impl("layer_norm.out", TORCH_BOX(&layer_norm_out));
  m.impl("fused_add_layer_norm_", TORCH_BOX(&fused_add_layer_norm_));
}
