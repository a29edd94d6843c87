// The prefill kernel for e4m3 queries, keys and values of head sizes up to 128.
#include "prefill_launch.cuh"
#include "prefill_values.cuh"

namespace fastinfer::cuda {
namespace {

constexpr int kDim = 128, kKeys = 192;

// Blocks of keys of all sequences.
int64_t image_blocks(const AttentionProblem& a) {
  if (a.layout == AttentionLayout::kDense) {
    return a.num_sequences * ((a.max_seqlen_k + kKeys - 1) / kKeys);
  }
  return a.total_k / kKeys + a.num_sequences;
}

void make_value_images(const AttentionProblem& a, const PrefillLaunch& launch) {
  ValueImageParams p{};
  p.v = static_cast<const uint8_t*>(a.v.data);
  p.strides = {a.v.strides.outer, a.v.strides.token, a.v.strides.head};
  p.cu_seqlens_k = a.cu_seqlens_k;
  p.images = launch.value_images;
  p.num_sequences = static_cast<int32_t>(a.num_sequences);
  p.num_kv_heads = static_cast<int32_t>(a.num_kv_heads);
  p.seqlen_k = static_cast<int32_t>(a.max_seqlen_k);
  p.value_dim = static_cast<int32_t>(a.value_dim);
  p.sequence_blocks = (p.seqlen_k + kKeys - 1) / kKeys;
  const dim3 grid(static_cast<unsigned>(image_blocks(a)), static_cast<unsigned>(a.num_kv_heads));
  value_images_kernel<kKeys, kDim><<<grid, kKeys * kDim / 64, 0, launch.stream>>>(p);
  FI_CUDA_CHECK(cudaGetLastError(), a.op);
}

}  // namespace

int64_t prefill_image_bytes(const AttentionProblem& a) {
  if (a.dtype != ScalarType::Float8_e4m3fn) return 0;
  return image_blocks(a) * a.num_kv_heads * kKeys * kDim;
}

void launch_prefill_fp8(const AttentionProblem& a, const PrefillLaunch& launch) {
  make_value_images(a, launch);
  if (a.out_dtype == ScalarType::BFloat16) {
    return launch_prefill<Fp8PrefillTraits<__nv_bfloat16, kDim, kDim, kKeys>>(a, launch);
  }
  launch_prefill<Fp8PrefillTraits<__half, kDim, kDim, kKeys>>(a, launch);
}

}  // namespace fastinfer::cuda
