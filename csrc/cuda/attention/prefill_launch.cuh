// Launch of one instantiation of the prefill kernel.
#pragma once

#include <algorithm>
#include <type_traits>

#include "../../checks/attention.h"
#include "../launch.h"
#include "../tensor_map.h"
#include "prefill.cuh"
#include "prefill.h"

namespace fastinfer::cuda {

// Bytes of keys and values that the tiles in flight should share: half the L2 cache.
constexpr int64_t kSectionBytes = 24 << 20;

// Over many keys larger blocks win, and over few under a causal mask smaller ones, whose part that
// nobody sees is smaller. How many a ragged batch has depends on its longest sequence, and the size
// of blocks must not if bits may not. Pages fit into blocks of one size.
inline bool may_choose_key_blocks(const AttentionProblem& a) {
  if (a.layout == AttentionLayout::kRagged) return !a.batch_invariant;
  return a.layout == AttentionLayout::kDense;
}
inline bool large_key_blocks(const AttentionProblem& a) {
  constexpr int64_t kMany = 2048;
  return may_choose_key_blocks(a) && a.max_seqlen_k > kMany;
}
inline bool small_key_blocks(const AttentionProblem& a) {
  constexpr int64_t kFew = 1024;
  return may_choose_key_blocks(a) && a.causal && a.max_seqlen_k <= kFew;
}

inline PrefillParams prefill_params(const AttentionProblem& a, int tile_rows) {
  constexpr int64_t kMaxWindow = 1 << 29;  // beyond any length, and sums with it stay in 32 bits
  constexpr double kLog2e = 1.4426950408889634;
  const auto strides = [](const AttentionStrides& s) {
    return PrefillStrides{s.outer, s.token, s.head};
  };
  PrefillParams p{};
  p.q = a.q;
  p.k = a.k.data;
  p.v = a.v.data;
  p.out = a.out;
  p.lse = a.lse;
  p.q_strides = strides(a.q_strides);
  p.k_strides = strides(a.k.strides);
  p.v_strides = strides(a.v.strides);
  p.out_strides = strides(a.out_strides);
  p.lse_outer = a.lse_strides.outer;
  p.lse_head = a.lse_strides.head;
  p.cu_seqlens_q = a.cu_seqlens_q;
  p.cu_seqlens_k = a.cu_seqlens_k;
  p.seq_lens = a.seq_lens;
  p.block_table = a.block_table;
  p.table_sequence = a.block_table_strides[0];
  p.table_block = a.block_table_strides[1];
  p.num_blocks = static_cast<int32_t>(a.num_blocks);
  p.block_size = static_cast<int32_t>(a.block_size);
  p.sinks = a.sinks;
  p.q_scale = a.q_scale;
  p.k_scale = a.k.scale;
  p.v_scale = a.v.scale;
  p.num_sequences = static_cast<int32_t>(a.num_sequences);
  p.num_kv_heads = static_cast<int32_t>(a.num_kv_heads);
  p.group = static_cast<int32_t>(a.num_heads / a.num_kv_heads);
  p.tile_tokens = tile_rows / p.group;
  p.head_dim = static_cast<int32_t>(a.head_dim);
  p.value_dim = static_cast<int32_t>(a.value_dim);
  p.window_left = static_cast<int32_t>(std::min(a.window_left, kMaxWindow));
  p.window_right = static_cast<int32_t>(std::min(a.window_right, kMaxWindow));
  p.seqlen_q = static_cast<int32_t>(a.max_seqlen_q);
  p.seqlen_k = static_cast<int32_t>(a.max_seqlen_k);
  p.tiles_per_sequence = (p.seqlen_q + p.tile_tokens - 1) / p.tile_tokens;
  p.num_tiles = prefill_tiles(a, tile_rows);
  const int64_t pairs = a.num_sequences * a.num_kv_heads;
  const int64_t pair_bytes = a.max_seqlen_k * (a.head_dim + a.value_dim) * 2;
  p.section_pairs = static_cast<int32_t>(
      std::clamp<int64_t>(kSectionBytes / std::max<int64_t>(pair_bytes, 1), 1, pairs));
  p.scale_log2 = static_cast<float>(a.scale * kLog2e);
  if (a.softcap > 0.f) {
    p.cap_scale = a.scale / a.softcap;
    p.softcap_log2 = static_cast<float>(a.softcap * kLog2e);
    p.scale_log2 = 1.f;
  }
  return p;
}

// `values` are what the kernel multiplies with: a.v, or what it was converted to.
template <class Traits>
void launch_prefill(const AttentionProblem& a, const AttentionKv& values,
                    const PrefillLaunch& launch) {
  PrefillParams p = prefill_params(a, Traits::kM);
  p.tiles_taken = launch.scratch;
  p.next_failed = reinterpret_cast<int32_t*>(launch.scratch + 1);
  const bool dense = a.layout == AttentionLayout::kDense;
  const int64_t outer = dense ? a.num_sequences : 1;
  const int64_t queries = dense ? a.max_seqlen_q : a.total_q;
  const int64_t keys = dense ? a.max_seqlen_k : a.total_k;
  const bool paged = a.layout == AttentionLayout::kPaged;
  p.page_tokens = static_cast<int32_t>(std::min<int64_t>(a.block_size, Traits::kN));
  p.narrow_rows = launch.narrow_rows;
  const auto key_map = [&](const AttentionKv& kv, int64_t dim, uint32_t slab) {
    if (paged) {
      return make_tensor_map(a.op, kv.dtype,
                             {kv.data,
                              {dim, a.block_size, a.num_kv_heads, a.num_blocks},
                              {1, kv.strides.token, kv.strides.head, kv.strides.outer},
                              {slab, static_cast<uint32_t>(p.page_tokens), 1, 1}});
    }
    return make_tensor_map(a.op, kv.dtype,
                           {kv.data,
                            {dim, keys, a.num_kv_heads, outer},
                            {1, kv.strides.token, kv.strides.head, kv.strides.outer},
                            {slab, Traits::kN, 1, 1}});
  };
  const CUtensorMap q_map =
      make_tensor_map(a.op, a.dtype,
                      {a.q,
                       {a.head_dim, a.num_heads, queries, outer},
                       {1, a.q_strides.head, a.q_strides.token, a.q_strides.outer},
                       {Traits::kKeySlab, static_cast<uint32_t>(p.group),
                        static_cast<uint32_t>(p.tile_tokens), 1}});
  const CUtensorMap k_map = key_map(a.k, a.head_dim, Traits::kKeySlab);
  const CUtensorMap v_map = key_map(values, a.value_dim, Traits::kValueSlab);

  constexpr int kSharedBytes = sizeof(PrefillShared<Traits>) + 1024;  // to align it
  static_assert(kSharedBytes <= 227 * 1024);
  constexpr auto kKernel = &prefill_kernel<Traits>;
  FI_CUDA_CHECK((allow_shared_memory<kKernel, kSharedBytes>(launch.device)), a.op);
  FI_CUDA_CHECK(cudaMemsetAsync(launch.scratch, 0, sizeof(*launch.scratch), launch.stream), a.op);
  const auto grid = static_cast<unsigned>(std::min<int64_t>(launch.num_sms, p.num_tiles));
  kKernel<<<grid, Traits::kThreads, kSharedBytes, launch.stream>>>(p, q_map, k_map, v_map);
  FI_CUDA_CHECK(cudaGetLastError(), a.op);
}

// For both 16-bit types; also with softcap where kSoftcap.
template <int kHeadDim, int kValueDim, int kM, int kN, int kQueryStages, bool kSoftcap>
void launch_prefill_for(const AttentionProblem& a, const PrefillLaunch& launch) {
  const auto run = [&](auto element, auto softcap) {
    using T = decltype(element);
    launch_prefill<PrefillTraits<T, T, T, kHeadDim, kValueDim, kM, kN, kQueryStages,
                                 decltype(softcap)::value>>(a, a.v, launch);
  };
  const auto run_element = [&](auto softcap) {
    if (a.dtype == ScalarType::BFloat16) return run(__nv_bfloat16{}, softcap);
    run(__half{}, softcap);
  };
  if constexpr (kSoftcap) {
    if (a.softcap > 0.f) return run_element(std::true_type{});
  }
  run_element(std::false_type{});
}

}  // namespace fastinfer::cuda
