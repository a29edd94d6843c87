// CUDA: qk_norm_rope_append_ on Hopper.
#include <torch/csrc/stable/library.h>

#include "../../checks/qk_norm_rope_append.h"
#include "../../portable/kv_cache.h"
#include "../../portable/portable.h"
#include "../runtime.h"
#include "pages.h"
#include "qk_norm_rope_append.cuh"

namespace fastinfer::cuda {
namespace {

constexpr const char* kOp = "qk_norm_rope_append_";

// A row of at most a warp of 16-byte vectors, all loads and stores aligned to their size, and pairs
// whose members lie in vectors at the same place.
// The kernels are compiled for sm_90a, which runs on compute capability 9.0 alone.
bool supports(const QkNormRopeAppendProblem& p, int32_t device_index) {
  const AppendProblem& a = p.append;
  const int64_t size = element_size(a.dtype), vector = 16 / size;
  return capability(kOp, device_index) == 90 && a.tokens <= kMostIndices &&
         p.heads * p.dim + a.heads * (p.dim + a.v.dim) <= kMostIndices &&
         a.num_blocks * a.block_size <= kMostIndices && std::max(p.dim, a.v.dim) <= 32 * vector &&
         aligned_to(16, p.qkv, size, {p.qkv_token_stride, p.dim, a.v.dim}) &&
         aligned_to(16, p.q_out, size, {p.q_token_stride, p.q_head_stride}) &&
         pages_aligned(a.k, vector) && pages_aligned(a.v, vector) &&
         aligned_to(16, p.bias, size, {}) && p.rotary_dim % (2 * vector) == 0 &&
         aligned_to(16, p.cos_sin, sizeof(float), {p.cos_sin_stride});
}

QkNormRopeAppendParams params_of(const QkNormRopeAppendProblem& p, int lanes, int warps) {
  const AppendProblem& a = p.append;
  const int64_t vector = 16 / element_size(a.dtype);
  const int rows_of_unit = 32 / lanes;
  const auto units = [&](int rows) { return (rows + rows_of_unit - 1) / rows_of_unit; };
  const int heads = static_cast<int>(p.heads), kv_heads = static_cast<int>(a.heads);
  const int q_units = units(heads), kv_units = units(kv_heads);
  const int vectors = static_cast<int>(p.dim / vector);
  const int v_vectors = static_cast<int>(a.v.dim / vector);
  const int v_steps = p.bias != nullptr ? kAddBias : 0;
  const int steps = v_steps | (p.positions != nullptr ? kTurn : 0);
  return {p.qkv,
          p.qkv_token_stride,
          p.q_out,
          p.q_token_stride,
          p.q_head_stride,
          a.slot_mapping,
          p.positions,
          p.cos_sin,
          p.cos_sin_stride,
          p.num_positions,
          p.bias,
          {p.q_weight, p.k_weight},
          {p.q_weight_dtype == ScalarType::Float, p.k_weight_dtype == ScalarType::Float},
          p.interleaved,
          p.eps,
          p.weight_offset,
          {{0, heads, 0, vectors, steps | (p.q_weight != nullptr ? kNormalise : 0)},
           {q_units, kv_heads, heads * vectors, vectors,
            steps | (p.k_weight != nullptr ? kNormalise : 0)},
           {q_units + kv_units, kv_heads, (heads + kv_heads) * vectors, v_vectors, v_steps}},
          q_units + 2 * kv_units,
          warps,
          static_cast<int>(p.rotary_dim),
          ceil_log2(lanes),
          static_cast<int32_t>(a.num_blocks * a.block_size),
          Divider(static_cast<int32_t>(a.block_size)),
          {page_side(a.k, a.dtype), page_side(a.v, a.dtype)}};
}

template <class T, int kLanes>
void launch(const QkNormRopeAppendProblem& p, cudaStream_t stream) {
  const AppendProblem& a = p.append;
  const int64_t vectors = std::max(p.dim, a.v.dim) / Pack<T>::kSize;
  const int lanes = kLanes > 0 ? kLanes : 1 << ceil_log2((vectors + kQkvVectors - 1) / kQkvVectors);
  const int warps = a.tokens <= kQkvFewTokens ? kQkvMostWarps : kQkvWarps;
  const QkNormRopeAppendParams params = params_of(p, lanes, warps);
  auto* kernel = qk_norm_rope_append_kernel<T, kLanes, false>;
  if (a.k.scale != nullptr || a.v.scale != nullptr) {
    kernel = qk_norm_rope_append_kernel<T, kLanes, true>;
  }
  kernel<<<static_cast<unsigned>(a.tokens), warps * 32, warps * sizeof(QkvWarp<T, kLanes>),
           stream>>>(params);
  FI_CUDA_CHECK(cudaGetLastError(), kOp);
}

template <class T>
void launch_for_rows(const QkNormRopeAppendProblem& p, cudaStream_t stream) {
  const bool halves = p.rotary_dim == 0 || (p.rotary_dim == p.dim && !p.interleaved);
  if (p.append.v.dim == p.dim && halves) {
    switch (p.dim / Pack<T>::kSize) {
      case 2 * kQkvVectors: return launch<T, 2>(p, stream);
      case 4 * kQkvVectors: return launch<T, 4>(p, stream);
      case 8 * kQkvVectors: return launch<T, 8>(p, stream);
    }
  }
  launch<T, 0>(p, stream);
}

void qk_norm_rope_append_(const Tensor& qkv, const Tensor& q_out, const Tensor& k_cache,
                          const Tensor& v_cache, const Tensor& slot_mapping,
                          const std::optional<Tensor>& positions,
                          const std::optional<Tensor>& cos_sin, const std::optional<Tensor>& bias,
                          const std::optional<Tensor>& q_weight,
                          const std::optional<Tensor>& k_weight, double eps, double weight_offset,
                          bool interleaved, const std::optional<Tensor>& k_scale,
                          const std::optional<Tensor>& v_scale) {
  const QkNormRopeAppendProblem p = check_qk_norm_rope_append(
      qkv, q_out, k_cache, v_cache, slot_mapping, positions, cos_sin, bias, q_weight, k_weight, eps,
      weight_offset, interleaved, k_scale, v_scale);
  const int32_t device_index = qkv.get_device_index();
  if (!supports(p, device_index)) {
    return portable::qk_norm_rope_append_(qkv, q_out, k_cache, v_cache, slot_mapping, positions,
                                          cos_sin, bias, q_weight, k_weight, eps, weight_offset,
                                          interleaved, k_scale, v_scale);
  }
  if (p.append.tokens == 0) return;
  const DeviceGuard guard(kOp, device_index);
  const cudaStream_t stream = current_stream(kOp, device_index);
  switch (p.append.dtype) {
    case ScalarType::Float: return launch_for_rows<float>(p, stream);
    case ScalarType::BFloat16: return launch_for_rows<__nv_bfloat16>(p, stream);
    default: return launch_for_rows<__half>(p, stream);
  }
}

}  // namespace
}  // namespace fastinfer::cuda

STABLE_TORCH_LIBRARY_IMPL(fastinfer, CUDA, m) {
  if (fastinfer::portable_forced()) return;
  using namespace fastinfer::cuda;
  m.impl("qk_norm_rope_append_", TORCH_BOX(&qk_norm_rope_append_));
}
