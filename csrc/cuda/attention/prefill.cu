// Which prefill kernel takes a problem, if any.
#include <limits>

#include "../tensor_map.h"
#include "prefill.h"

namespace fastinfer::cuda {

void launch_prefill_d64(const AttentionProblem& a, const PrefillLaunch& launch);
void launch_prefill_d96(const AttentionProblem& a, const PrefillLaunch& launch);
void launch_prefill_d128(const AttentionProblem& a, const PrefillLaunch& launch);
void launch_prefill_d192(const AttentionProblem& a, const PrefillLaunch& launch);
void launch_prefill_d256(const AttentionProblem& a, const PrefillLaunch& launch);
void launch_prefill_fp8(const AttentionProblem& a, const PrefillLaunch& launch);

namespace {

// Smaller heads are padded in shared memory. The first that is large enough is taken.
struct PrefillKernel {
  int64_t head_dim, value_dim;
  int64_t tile_rows;
  int64_t paged_keys;  // in a block of keys of a paged problem
  bool softcap;        // whether it is compiled: few models need it
  void (*launch)(const AttentionProblem&, const PrefillLaunch&);
  bool fp8 = false;
};
constexpr PrefillKernel kKernels[] = {
    {64, 64, 192, 128, false, launch_prefill_d64},
    {96, 96, 128, 128, false, launch_prefill_d96},
    {128, 128, 128, 128, true, launch_prefill_d128},
    {192, 128, 128, 128, false, launch_prefill_d192},
    {256, 256, 128, 64, true, launch_prefill_d256},
    {128, 128, 128, 0, false, launch_prefill_fp8, true},
};

const PrefillKernel* choose_kernel(const AttentionProblem& p) {
  for (const PrefillKernel& kernel : kKernels) {
    if (kernel.fp8 == (p.dtype == ScalarType::Float8_e4m3fn) && p.head_dim <= kernel.head_dim &&
        p.value_dim <= kernel.value_dim && (p.softcap == 0.f || kernel.softcap)) {
      return &kernel;
    }
  }
  return nullptr;
}

// Splitting keys, which this kernel does not do, pays where there are fewer tiles than SMs and keys
// enough to split.
bool should_split(const AttentionProblem& p, const PrefillKernel& kernel, int num_sms) {
  constexpr int64_t kShort = 512;
  if (p.batch_invariant || p.max_seqlen_k <= kShort) return false;
  int64_t tiles = prefill_tiles(p, kernel.tile_rows);
  // Of a ragged batch that is the most there can be; with one sequence's partial tile, the least.
  if (p.layout != AttentionLayout::kDense) tiles -= (p.num_sequences - 1) * p.num_kv_heads;
  return 2 * tiles < num_sms;
}

}  // namespace

bool prefill_supports(const AttentionProblem& p, int num_sms) {
  const bool fp8 = p.dtype == ScalarType::Float8_e4m3fn;
  if (!fp8 && p.dtype != ScalarType::BFloat16 && p.dtype != ScalarType::Half) return false;
  const int64_t bytes = fp8 ? 1 : 2;
  if (p.head_dim * bytes % 16 != 0 || p.value_dim * bytes % 16 != 0) return false;
  const PrefillKernel* kernel = choose_kernel(p);
  if (kernel == nullptr || p.num_heads / p.num_kv_heads > kernel->tile_rows) return false;
  if (p.tree_mask != nullptr || !(p.scale > 0.f)) return false;
  // Positions, with windows added, are 32-bit numbers.
  constexpr int64_t kLongest = 1 << 29;
  if (p.max_seqlen_q > kLongest || p.max_seqlen_k > kLongest) return false;
  if (prefill_tiles(p, kernel->tile_rows) > std::numeric_limits<int32_t>::max()) return false;
  const bool dense = p.layout == AttentionLayout::kDense;
  const bool paged = p.layout == AttentionLayout::kPaged;
  const int64_t queries = dense ? p.max_seqlen_q : p.total_q;
  const int64_t keys = dense ? p.max_seqlen_k : paged ? p.block_size : p.total_k;
  if (queries == 0 || keys == 0 || (paged && p.num_blocks == 0)) return false;
  if (paged) {
    if (p.k.dtype != p.dtype || p.v.dtype != p.dtype) return false;
    const int64_t page = std::min(p.block_size, kernel->paged_keys);
    if (kernel->paged_keys % page != 0 || p.block_size % page != 0) return false;
  }
  const auto suits = [](const void* data, int64_t element_bytes, const AttentionStrides& s,
                        int64_t outer, int64_t tokens, int64_t heads) {
    return suits_tma(data, element_bytes, {{outer, s.outer}, {tokens, s.token}, {heads, s.head}});
  };
  const int64_t q_outer = dense ? p.num_sequences : 1;
  const int64_t k_outer = paged ? p.num_blocks : q_outer;
  if (!suits(p.q, bytes, p.q_strides, q_outer, queries, p.num_heads) ||
      !suits(p.k.data, bytes, p.k.strides, k_outer, keys, p.num_kv_heads) ||
      !suits(p.v.data, bytes, p.v.strides, k_outer, keys, p.num_kv_heads) ||
      !suits(p.out, 2, p.out_strides, q_outer, queries, p.num_heads)) {
    return false;
  }
  return !should_split(p, *kernel, num_sms);
}

int64_t prefill_scratch_words(const AttentionProblem& p) {
  return 1 + prefill_tiles(p, choose_kernel(p)->tile_rows);
}

void run_prefill(const AttentionProblem& p, const PrefillLaunch& launch) {
  choose_kernel(p)->launch(p, launch);
}

}  // namespace fastinfer::cuda
