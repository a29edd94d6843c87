// The prefill kernel for e4m3 queries, keys and values of head sizes up to 128.
//
// Scores come from e4m3 tensor cores. Values are converted to bf16 first, once: tensor cores add
// e4m3 products with 14 bits, too few for the sum over a long sequence, and want e4m3 values
// transposed, and e4m3 probabilities would need the highest score exactly.
#include "../ptx/convert.h"
#include "prefill_launch.cuh"

namespace fastinfer::cuda {
namespace {

constexpr int kVector = 16;  // elements that a thread converts
constexpr int kThreads = 256;

struct ConvertParams {
  const uint8_t* from;  // [outer, tokens, heads, dim] with strides
  uint32_t* to;         // the same, contiguous, in bf16
  PrefillStrides strides;
  int64_t count;  // of vectors
  int64_t tokens;
  int32_t heads, vectors;  // of a head
};

__global__ __launch_bounds__(kThreads) void convert_kernel(
    const __grid_constant__ ConvertParams p) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= p.count) return;
  const int64_t row = i / p.vectors;
  const int64_t token = row / p.heads, outer = token / p.tokens;
  const uint4 bytes = *reinterpret_cast<const uint4*>(
      p.from + outer * p.strides.outer + (token - outer * p.tokens) * p.strides.token +
      (row - token * p.heads) * p.strides.head + (i - row * p.vectors) * kVector);
  const uint32_t words[4] = {bytes.x, bytes.y, bytes.z, bytes.w};
  uint32_t pairs[8];
#pragma unroll
  for (int j = 0; j < 8; j += 2) {
    uint32_t f16[2];
    ptx::e4m3x4_to_f16x4(words[j / 2], f16[0], f16[1]);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float2 x = __half22float2(reinterpret_cast<const __half2&>(f16[h]));
      pairs[j + h] = ptx::pack<true>(x.x, x.y);
    }
  }
  auto* to = reinterpret_cast<uint4*>(p.to + i * (kVector / 2));
  to[0] = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
  to[1] = make_uint4(pairs[4], pairs[5], pairs[6], pairs[7]);
}

int64_t key_rows(const AttentionProblem& a) {
  return a.layout == AttentionLayout::kDense ? a.num_sequences * a.max_seqlen_k : a.total_k;
}

AttentionKv convert_values(const AttentionProblem& a, const PrefillLaunch& launch) {
  ConvertParams p{};
  p.from = static_cast<const uint8_t*>(a.v.data);
  p.to = static_cast<uint32_t*>(launch.values);
  p.strides = {a.v.strides.outer, a.v.strides.token, a.v.strides.head};
  p.count = prefill_value_elements(a) / kVector;
  p.tokens = a.layout == AttentionLayout::kDense ? a.max_seqlen_k : a.total_k;
  p.heads = static_cast<int32_t>(a.num_kv_heads);
  p.vectors = static_cast<int32_t>(a.value_dim / kVector);
  const auto blocks = static_cast<unsigned>((p.count + kThreads - 1) / kThreads);
  convert_kernel<<<blocks, kThreads, 0, launch.stream>>>(p);
  FI_CUDA_CHECK(cudaGetLastError(), a.op);
  const int64_t token = a.num_kv_heads * a.value_dim;
  return {launch.values, ScalarType::BFloat16, {p.tokens * token, token, a.value_dim}, nullptr, {}};
}

template <class Out>
void launch_with(const AttentionProblem& a, const PrefillLaunch& launch) {
  const AttentionKv values = convert_values(a, launch);
  if (large_key_blocks(a)) {
    return launch_prefill<
        PrefillTraits<__nv_fp8_e4m3, __nv_bfloat16, Out, 128, 128, 128, 160, 2, false>>(a, values,
                                                                                        launch);
  }
  launch_prefill<PrefillTraits<__nv_fp8_e4m3, __nv_bfloat16, Out, 128, 128, 128, 128, 2, false>>(
      a, values, launch);
}

}  // namespace

int64_t prefill_value_elements(const AttentionProblem& a) {
  if (a.dtype != ScalarType::Float8_e4m3fn) return 0;
  return key_rows(a) * a.num_kv_heads * a.value_dim;
}

void launch_prefill_fp8(const AttentionProblem& a, const PrefillLaunch& launch) {
  return a.out_dtype == ScalarType::BFloat16 ? launch_with<__nv_bfloat16>(a, launch)
                                             : launch_with<__half>(a, launch);
}

}  // namespace fastinfer::cuda
