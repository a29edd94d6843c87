// CUDA: rms_norm and fused_add_rms_norm_ on Hopper.
#include <torch/csrc/stable/library.h>

#include "../../checks/norm.h"
#include "../../functional.h"
#include "../../portable/norm.h"
#include "../../portable/portable.h"
#include "../runtime.h"
#include "rms_norm.cuh"

namespace fastinfer::cuda {
namespace {

bool aligned(const void* pointer, const Rows& rows, int64_t element_size) {
  bool ok = reinterpret_cast<uintptr_t>(pointer) % kVectorBytes == 0;
  for (int i = 0; i < rows.dims; ++i) ok = ok && rows.strides[i] * element_size % kVectorBytes == 0;
  return ok;
}

template <class T, class W>
void launch(const NormProblem& p, cudaStream_t stream, const char* op) {
  const RmsNormParams params{p.x,        p.out,           p.residual, p.weight, p.x_rows,
                             p.out_rows, p.residual_rows, p.hidden,   p.eps,    p.weight_offset};
  const bool vectorised =
      p.hidden % Vector<T>::kSize == 0 && aligned(p.x, p.x_rows, sizeof(T)) &&
      reinterpret_cast<uintptr_t>(p.weight) % kVectorBytes == 0 &&
      aligned(p.out, p.out_rows, sizeof(T)) &&
      (p.residual == nullptr || aligned(p.residual, p.residual_rows, sizeof(T)));
  FI_CHECK(p.x_rows.count <= 0x7fffffff, op, "x: expected at most 2^31 - 1 rows, got ",
           p.x_rows.count);
  const dim3 grid(static_cast<unsigned>(p.x_rows.count));
  if (vectorised) {
    rms_norm_kernel<T, W, true><<<grid, kRmsNormThreads, 0, stream>>>(params);
  } else {
    rms_norm_kernel<T, W, false><<<grid, kRmsNormThreads, 0, stream>>>(params);
  }
  FI_CUDA_CHECK(cudaGetLastError(), op);
}

template <class T>
void launch_for_weight(const NormProblem& p, cudaStream_t stream, const char* op) {
  if (p.weight_dtype == ScalarType::Float) {
    launch<T, float>(p, stream, op);
  } else {
    launch<T, T>(p, stream, op);
  }
}

// The kernels are compiled for sm_90a, which runs on compute capability 9.0 alone.
bool supports(const char* op, int32_t device_index) {
  return capability(op, device_index) == 90;
}

void run(const char* op, const NormProblem& p, int32_t device_index) {
  const DeviceGuard guard(op, device_index);
  const cudaStream_t stream = current_stream(op, device_index);
  switch (p.dtype) {
    case ScalarType::Float: return launch_for_weight<float>(p, stream, op);
    case ScalarType::BFloat16: return launch_for_weight<__nv_bfloat16>(p, stream, op);
    default: return launch_for_weight<__half>(p, stream, op);
  }
}

void rms_norm_out(const Tensor& x, const Tensor& weight, double eps, double weight_offset,
                  const Tensor& out) {
  constexpr const char* op = "rms_norm";
  if (!supports(op, x.get_device_index()))
    return portable::rms_norm_out(x, weight, eps, weight_offset, out);
  const NormProblem p = check_norm(op, x, weight, std::nullopt, eps, weight_offset, out, nullptr);
  if (p.x_rows.count > 0) run(op, p, x.get_device_index());
}

void fused_add_rms_norm_(const Tensor& x, const Tensor& residual, const Tensor& weight, double eps,
                         double weight_offset) {
  constexpr const char* op = "fused_add_rms_norm_";
  if (!supports(op, x.get_device_index()))
    return portable::fused_add_rms_norm_(x, residual, weight, eps, weight_offset);
  const NormProblem p = check_norm(op, x, weight, std::nullopt, eps, weight_offset, x, &residual);
  if (p.x_rows.count > 0) run(op, p, x.get_device_index());
}

}  // namespace
}  // namespace fastinfer::cuda

STABLE_TORCH_LIBRARY_IMPL(fastinfer, CUDA, m) {
  if (fastinfer::portable_forced()) return;
  using namespace fastinfer::cuda;
  m.impl("rms_norm", TORCH_BOX(&fastinfer::functional::rms_norm<&rms_norm_out>));
  m.impl("rms_norm.out", TORCH_BOX(&rms_norm_out));
  m.impl("fused_add_rms_norm_", TORCH_BOX(&fused_add_rms_norm_));
}
