// CUDA: append_paged_kv_cache_ on Hopper.
#include <torch/csrc/stable/library.h>

#include "../../portable/kv_cache.h"
#include "../../portable/portable.h"
#include "../runtime.h"
#include "append.cuh"
#include "pages.h"

namespace fastinfer::cuda {
namespace {

constexpr const char* kOp = "append_paged_kv_cache_";

// 16-byte loads of the rows; of copied rows 16-byte stores, of quantized ones stores of 16 codes.
bool side_supported(const AppendSide& side, ScalarType dtype) {
  const int64_t size = element_size(dtype);
  const bool copied = side.cache_dtype == dtype;
  return aligned_to(16, side.x, size, {side.x_token_stride, side.x_head_stride, side.dim}) &&
         pages_aligned(side, copied ? 16 / size : kCodesOfStore);
}

// The kernels are compiled for sm_90a, which runs on compute capability 9.0 alone.
bool supports(const AppendProblem& p, int32_t device_index) {
  return capability(kOp, device_index) == 90 && p.tokens * p.heads <= kMostIndices &&
         p.num_blocks * p.block_size <= kMostIndices && side_supported(p.k, p.dtype) &&
         side_supported(p.v, p.dtype);
}

AppendRows append_rows(const AppendSide& side, ScalarType dtype) {
  return {side.x, side.x_token_stride, side.x_head_stride,
          static_cast<int>(side.dim * element_size(dtype) / 16), page_side(side, dtype)};
}

template <class T, bool kCopied>
void launch(const AppendProblem& p, cudaStream_t stream) {
  const int64_t dim = std::max(p.k.dim, p.v.dim);
  const int64_t lanes = (dim + kAppendElements<kCopied> - 1) / kAppendElements<kCopied>;
  const AppendParams params{{append_rows(p.k, p.dtype), append_rows(p.v, p.dtype)},
                            p.slot_mapping,
                            static_cast<int32_t>(p.tokens * p.heads),
                            static_cast<int32_t>(p.num_blocks * p.block_size),
                            ceil_log2(lanes),
                            Divider(static_cast<int32_t>(p.heads)),
                            Divider(static_cast<int32_t>(p.block_size))};
  const int rows_of_block = kAppendThreads >> params.lanes_log2;
  const unsigned blocks = (static_cast<unsigned>(params.rows) + rows_of_block - 1) / rows_of_block;
  const dim3 grid(blocks, 2 / kAppendSides<kCopied>);
  append_kernel<T, kCopied><<<grid, kAppendThreads, 0, stream>>>(params);
  FI_CUDA_CHECK(cudaGetLastError(), kOp);
}

template <class T>
void launch(const AppendProblem& p, cudaStream_t stream) {
  const bool copied = p.k.cache_dtype == p.dtype && p.v.cache_dtype == p.dtype;
  return copied ? launch<T, true>(p, stream) : launch<T, false>(p, stream);
}

void append_paged_kv_cache_(const Tensor& k, const Tensor& v, const Tensor& k_cache,
                            const Tensor& v_cache, const Tensor& slot_mapping,
                            const std::optional<Tensor>& k_scale,
                            const std::optional<Tensor>& v_scale) {
  const AppendProblem p = check_append(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale);
  const int32_t device_index = k.get_device_index();
  if (!supports(p, device_index)) {
    return portable::append_paged_kv_cache_(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale);
  }
  if (p.tokens * p.heads == 0 || p.num_blocks == 0) return;
  const DeviceGuard guard(kOp, device_index);
  const cudaStream_t stream = current_stream(kOp, device_index);
  switch (p.dtype) {
    case ScalarType::Float: return launch<float>(p, stream);
    case ScalarType::BFloat16: return launch<__nv_bfloat16>(p, stream);
    default: return launch<__half>(p, stream);
  }
}

}  // namespace
}  // namespace fastinfer::cuda

STABLE_TORCH_LIBRARY_IMPL(fastinfer, CUDA, m) {
  if (fastinfer::portable_forced()) return;
  using namespace fastinfer::cuda;
  m.impl("append_paged_kv_cache_", TORCH_BOX(&append_paged_kv_cache_));
}
