// The door of the attention ops, the same for every backend: tensors in, a problem of raw pointers
// out. Lengths and block tables are contents and are checked where they can be read
// (cpu/attention_plan.cpp).
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <tuple>

#include "../torch_utils.h"
#include "attention_plan.h"

namespace fastinfer {

constexpr int64_t kMaxHeadDim = 512;
constexpr int64_t kMaxTreeTokens = 64;

// Strides in elements. `outer` is the sequence of a dense tensor, the block of a paged one, and 0
// for ragged ones.
struct AttentionStrides {
  int64_t outer = 0;
  int64_t token = 0;
  int64_t head = 0;
};

struct AttentionKv {
  const void* data;
  ScalarType dtype;
  AttentionStrides strides;
  const float* scale;  // null, [num_blocks, Hk, block_size] or [Hk]
  AttentionStrides scale_strides;
};

// Where a problem keeps its lengths.
enum class AttentionLayout { kDense, kRagged, kPaged };

struct AttentionProblem {
  const char* op;
  AttentionLayout layout;
  ScalarType dtype;      // of q
  ScalarType out_dtype;  // q's, but bf16 or fp16 if q is e4m3
  int64_t num_sequences;
  int64_t total_q;  // query tokens of all sequences
  int64_t num_heads;
  int64_t num_kv_heads;
  int64_t head_dim;
  int64_t value_dim;
  int64_t max_seqlen_q;
  int64_t max_seqlen_k;

  const void* q;
  AttentionStrides q_strides;
  const float* q_scale;  // [H] or null, for e4m3 queries
  AttentionKv k;
  AttentionKv v;
  void* out;
  AttentionStrides out_strides;
  float* lse;  // token stride 1
  AttentionStrides lse_strides;

  // Dense: none of these. Ragged: cu_seqlens_q and cu_seqlens_k. Paged: cu_seqlens_q, seq_lens and
  // block_table.
  const int32_t* cu_seqlens_q;  // [B + 1]
  const int32_t* cu_seqlens_k;  // [B + 1]
  const int32_t* seq_lens;      // [B]
  const int32_t* block_table;   // [B, max_blocks]
  int64_t block_table_strides[2];
  int64_t max_blocks;
  int64_t num_blocks;
  int64_t block_size;
  int64_t total_k;  // key tokens of all sequences of a ragged problem

  float scale;
  float softcap;
  int64_t window_left;   // -1: unlimited
  int64_t window_right;  // -1: unlimited; 0 when causal
  bool causal;
  bool batch_invariant;
  const float* sinks;        // [H] or null
  const int64_t* tree_mask;  // one per query token, or null
  int64_t tree_mask_stride;  // from one sequence to the next of a dense problem
};

// Options that all attention ops share, as they come.
struct AttentionOptions {
  std::optional<double> scale;
  bool causal;
  int64_t window_left;
  int64_t window_right;
  double softcap;
  std::optional<Tensor> sinks;
  std::optional<Tensor> tree_mask;
  bool batch_invariant;
};

// Factors of e4m3 queries, keys and values: [H], [Hk] and [Hk].
struct AttentionScales {
  const std::optional<Tensor>& q;
  const std::optional<Tensor>& k;
  const std::optional<Tensor>& v;
};

inline void check_windows(const char* op, int64_t window_left, int64_t window_right) {
  FI_CHECK(window_left >= -1, op, "window_left: expected a number >= 0, or -1 for no limit, got ",
           window_left);
  FI_CHECK(window_right >= -1, op, "window_right: expected a number >= 0, or -1 for no limit, got ",
           window_right);
}

// A window beyond every position is the same as a smaller one, and sums with it must not overflow.
inline int64_t limit_window(int64_t window) {
  return std::min(window, int64_t{1} << 40);
}

inline void check_head_counts(const char* op, int64_t num_heads, int64_t num_kv_heads) {
  FI_CHECK(num_heads >= 1 && num_kv_heads >= 1, op,
           "expected at least 1 query head and 1 KV head, got ", num_heads, " and ", num_kv_heads);
  FI_CHECK(num_heads % num_kv_heads == 0, op,
           "q: expected a number of heads that is a multiple of the ", num_kv_heads,
           " KV heads, got ", num_heads);
}

inline void check_head_dim(const Arg& arg) {
  FI_CHECK(arg.size(-1) >= 1 && arg.size(-1) <= kMaxHeadDim, arg.op, arg.name,
           ": expected a last dimension of 1 to ", kMaxHeadDim, ", got shape ", shape_text(arg));
}

// Counts of tokens are int32 in plans and in cu_seqlens.
inline void check_count(const char* op, const char* name, int64_t count) {
  FI_CHECK(count >= 0 && count <= std::numeric_limits<int32_t>::max(), op, name,
           ": expected a number of 0 to 2^31 - 1, got ", count);
}

inline Arg read_vector(const char* op, const char* name, const Tensor& tensor, ScalarType dtype,
                       int64_t size, const Arg& like) {
  const Arg arg = read_arg(op, name, tensor);
  expect_dtype(arg, {dtype});
  expect_shape(arg, {size});
  expect_contiguous(arg);
  expect_same_device(arg, like);
  return arg;
}

inline AttentionStrides ragged_strides(const Arg& arg) {
  return {0, arg.stride(0), arg.stride(1)};
}
inline AttentionStrides dense_strides(const Arg& arg) {
  return {arg.stride(0), arg.stride(1), arg.stride(2)};
}
// Pages are [num_blocks, Hk, block_size, D], so are their scales without D.
inline AttentionStrides paged_strides(const Arg& arg) {
  return {arg.stride(0), arg.stride(2), arg.stride(1)};
}

// Options, and everything about q, out and lse; layout, k and v are set already.
inline void check_queries_and_options(AttentionProblem* p, const Arg& q,
                                      const AttentionOptions& options, const Tensor& out_tensor,
                                      const Tensor& lse_tensor) {
  const char* op = q.op;
  const bool dense = p->layout == AttentionLayout::kDense;
  p->op = op;
  p->dtype = q.dtype;
  p->q = q.data;
  p->q_strides = dense ? dense_strides(q) : ragged_strides(q);
  p->num_heads = q.size(-2);
  p->head_dim = q.size(-1);
  check_head_counts(op, p->num_heads, p->num_kv_heads);

  const Arg out = read_arg(op, "out", out_tensor);
  p->out_dtype = out.dtype;
  if (q.dtype == ScalarType::Float8_e4m3fn) {
    expect_dtype(out, {ScalarType::BFloat16, ScalarType::Half});
  } else {
    expect_same_dtype(out, q);
  }
  const Arg lse = read_arg(op, "lse", lse_tensor);
  expect_dtype(lse, {ScalarType::Float});
  if (dense) {
    expect_shape(out, {q.size(0), q.size(1), p->num_heads, p->value_dim});
    expect_shape(lse, {q.size(0), p->num_heads, q.size(1)});
    p->out_strides = dense_strides(out);
    p->lse_strides = {lse.stride(0), 1, lse.stride(1)};
  } else {
    expect_shape(out, {q.size(0), p->num_heads, p->value_dim});
    expect_shape(lse, {p->num_heads, q.size(0)});
    p->out_strides = ragged_strides(out);
    p->lse_strides = {0, 1, lse.stride(0)};
  }
  for (const Arg* written : {&out, &lse}) {
    expect_dense_last(*written);
    expect_writable(*written);
    expect_same_device(*written, q);
  }
  p->out = out.data;
  p->lse = static_cast<float*>(lse.data);

  const double scale = options.scale.value_or(1.0 / std::sqrt(static_cast<double>(p->head_dim)));
  p->scale = static_cast<float>(scale);
  p->softcap = static_cast<float>(options.softcap);
  FI_CHECK(std::isfinite(p->scale), op, "scale: expected a finite float32 number, got ", scale);
  FI_CHECK(options.softcap == 0.0 || (options.softcap > 0.0 && std::isnormal(p->softcap)), op,
           "softcap: expected a finite float32 number >= 0 (0: off), got ", options.softcap);
  check_windows(op, options.window_left, options.window_right);
  p->causal = options.causal;
  p->window_left = limit_window(options.window_left);
  p->window_right = options.causal ? 0 : limit_window(options.window_right);
  p->batch_invariant = options.batch_invariant;

  if (options.sinks.has_value()) {
    const Arg sinks = read_vector(op, "sinks", *options.sinks, ScalarType::Float, p->num_heads, q);
    p->sinks = static_cast<const float*>(sinks.data);
  }
  if (options.tree_mask.has_value()) {
    const Arg mask = read_arg(op, "tree_mask", *options.tree_mask);
    expect_dtype(mask, {ScalarType::Long});
    if (dense) {
      expect_shape(mask, {q.size(0), q.size(1)});
    } else {
      expect_shape(mask, {q.size(0)});
    }
    expect_dense_last(mask);
    expect_same_device(mask, q);
    FI_CHECK(p->max_seqlen_q <= kMaxTreeTokens, op, "tree_mask: expected at most ", kMaxTreeTokens,
             " query tokens a sequence with a tree mask, got ", p->max_seqlen_q);
    p->tree_mask = static_cast<const int64_t*>(mask.data);
    p->tree_mask_stride = dense ? mask.stride(0) : 0;
    p->window_right = limit_window(options.window_right);  // a tree mask takes the place of causal
  }
}

// q, k and v of the ops without pages.
inline Arg read_unpaged(const char* op, const char* name, const Tensor& tensor, int64_t rank,
                        const char* layout) {
  const Arg arg = read_arg(op, name, tensor);
  expect_rank(arg, rank, layout);
  expect_dtype(
      arg, {ScalarType::Float, ScalarType::BFloat16, ScalarType::Half, ScalarType::Float8_e4m3fn});
  expect_dense_last(arg);
  check_head_dim(arg);
  return arg;
}

// The scale of each of the heads of `stored`; null: 1.
inline const float* check_head_scale(const char* name, const std::optional<Tensor>& tensor,
                                     const Arg& stored) {
  if (!tensor.has_value()) return nullptr;
  FI_CHECK(stored.dtype == ScalarType::Float8_e4m3fn, stored.op, name, ": expected no scale since ",
           stored.name, " is ", dtype_name(stored.dtype), ", got a tensor");
  const Arg scale =
      read_vector(stored.op, name, *tensor, ScalarType::Float, stored.size(-2), stored);
  return static_cast<const float*>(scale.data);
}

inline AttentionKv unpaged_kv(const Arg& stored, const AttentionStrides& strides,
                              const char* scale_name, const std::optional<Tensor>& scale) {
  return {
      stored.data, stored.dtype, strides, check_head_scale(scale_name, scale, stored), {0, 0, 1}};
}

inline AttentionProblem check_flash_attention(const Tensor& q_tensor, const Tensor& k_tensor,
                                              const Tensor& v_tensor,
                                              const AttentionOptions& options,
                                              const AttentionScales& scales, const Tensor& out,
                                              const Tensor& lse) {
  constexpr const char* op = "flash_attention";
  const Arg q = read_unpaged(op, "q", q_tensor, 4, "[batch, seqlen_q, heads, head_dim]");
  const Arg k = read_unpaged(op, "k", k_tensor, 4, "[batch, seqlen_k, kv_heads, head_dim]");
  const Arg v = read_unpaged(op, "v", v_tensor, 4, "[batch, seqlen_k, kv_heads, value_dim]");
  for (const Arg* arg : {&k, &v}) {
    expect_same_dtype(*arg, q);
    expect_same_device(*arg, q);
  }
  expect_shape(k, {q.size(0), k.size(1), k.size(2), q.size(3)});
  expect_shape(v, {q.size(0), k.size(1), k.size(2), v.size(3)});
  check_count(op, "q: seqlen_q", q.size(1));
  check_count(op, "k: seqlen_k", k.size(1));
  check_count(op, "q: batch * seqlen_q", q.size(0) * q.size(1));

  AttentionProblem p{};
  p.layout = AttentionLayout::kDense;
  p.num_sequences = q.size(0);
  p.total_q = q.size(0) * q.size(1);
  p.num_kv_heads = k.size(2);
  p.value_dim = v.size(3);
  p.max_seqlen_q = q.size(1);
  p.max_seqlen_k = k.size(1);
  p.q_scale = check_head_scale("q_scale", scales.q, q);
  p.k = unpaged_kv(k, dense_strides(k), "k_scale", scales.k);
  p.v = unpaged_kv(v, dense_strides(v), "v_scale", scales.v);
  check_queries_and_options(&p, q, options, out, lse);
  return p;
}

inline AttentionProblem check_flash_attention_varlen(
    const Tensor& q_tensor, const Tensor& k_tensor, const Tensor& v_tensor,
    const Tensor& cu_seqlens_q_tensor, const Tensor& cu_seqlens_k_tensor, int64_t max_seqlen_q,
    int64_t max_seqlen_k, const AttentionOptions& options, const AttentionScales& scales,
    const Tensor& out, const Tensor& lse) {
  constexpr const char* op = "flash_attention_varlen";
  const Arg q = read_unpaged(op, "q", q_tensor, 3, "[total_q, heads, head_dim]");
  const Arg k = read_unpaged(op, "k", k_tensor, 3, "[total_k, kv_heads, head_dim]");
  const Arg v = read_unpaged(op, "v", v_tensor, 3, "[total_k, kv_heads, value_dim]");
  for (const Arg* arg : {&k, &v}) {
    expect_same_dtype(*arg, q);
    expect_same_device(*arg, q);
  }
  expect_shape(k, {k.size(0), k.size(1), q.size(2)});
  expect_shape(v, {k.size(0), k.size(1), v.size(2)});
  check_count(op, "q: total_q", q.size(0));
  check_count(op, "k: total_k", k.size(0));
  check_count(op, "max_seqlen_q", max_seqlen_q);
  check_count(op, "max_seqlen_k", max_seqlen_k);

  const Arg cu_q = read_arg(op, "cu_seqlens_q", cu_seqlens_q_tensor);
  expect_rank(cu_q, 1, "[batch + 1]");
  FI_CHECK(cu_q.size(0) >= 1, op, "cu_seqlens_q: expected at least 1 element, got 0");
  read_vector(op, "cu_seqlens_q", cu_seqlens_q_tensor, ScalarType::Int, cu_q.size(0), q);
  const Arg cu_k =
      read_vector(op, "cu_seqlens_k", cu_seqlens_k_tensor, ScalarType::Int, cu_q.size(0), q);

  AttentionProblem p{};
  p.layout = AttentionLayout::kRagged;
  p.num_sequences = cu_q.size(0) - 1;
  p.total_q = q.size(0);
  p.total_k = k.size(0);
  p.num_kv_heads = k.size(1);
  p.value_dim = v.size(2);
  p.max_seqlen_q = max_seqlen_q;
  p.max_seqlen_k = max_seqlen_k;
  p.q_scale = check_head_scale("q_scale", scales.q, q);
  p.k = unpaged_kv(k, ragged_strides(k), "k_scale", scales.k);
  p.v = unpaged_kv(v, ragged_strides(v), "v_scale", scales.v);
  p.cu_seqlens_q = static_cast<const int32_t*>(cu_q.data);
  p.cu_seqlens_k = static_cast<const int32_t*>(cu_k.data);
  check_queries_and_options(&p, q, options, out, lse);
  return p;
}

inline AttentionKv check_pages(const Arg& cache, const char* scale_name,
                               const std::optional<Tensor>& scale_tensor, const Arg& q) {
  expect_rank(cache, 4, "[num_blocks, kv_heads, block_size, head_dim]");
  expect_dtype(cache, {q.dtype, ScalarType::Char, ScalarType::Float8_e4m3fn});
  expect_dense_last(cache);
  check_head_dim(cache);
  expect_same_device(cache, q);
  AttentionKv kv{cache.data, cache.dtype, paged_strides(cache), nullptr, {}};
  const bool quantized = cache.dtype != q.dtype;
  FI_CHECK(scale_tensor.has_value() == quantized, cache.op, scale_name, ": expected ",
           quantized ? "a scale since " : "no scale since ", cache.name, " is ",
           dtype_name(cache.dtype), ", got ", quantized ? "None" : "a tensor");
  if (!quantized) return kv;
  const Arg scale = read_arg(cache.op, scale_name, *scale_tensor);
  expect_dtype(scale, {ScalarType::Float});
  expect_same_device(scale, q);
  if (scale.rank == 1) {
    expect_shape(scale, {cache.size(1)});
    expect_contiguous(scale);
    kv.scale_strides = {0, 0, 1};
  } else {
    expect_shape(scale, {cache.size(0), cache.size(1), cache.size(2)});
    expect_dense_last(scale);
    kv.scale_strides = paged_strides(scale);
  }
  kv.scale = static_cast<const float*>(scale.data);
  return kv;
}

struct PagedTensors {
  const Tensor& q;
  const Tensor& k_cache;
  const Tensor& v_cache;
  const Tensor& block_table;
  const Tensor& cu_seqlens_q;
  const Tensor& seq_lens;
  const std::optional<Tensor>& k_scale;
  const std::optional<Tensor>& v_scale;
};

inline AttentionProblem check_paged_attention(const PagedTensors& tensors, int64_t max_seqlen_q,
                                              int64_t max_seqlen_k, const AttentionOptions& options,
                                              const Tensor& out, const Tensor& lse) {
  constexpr const char* op = "paged_attention";
  const Arg q = read_arg(op, "q", tensors.q);
  expect_rank(q, 3, "[total_q, heads, head_dim]");
  expect_float(q);
  expect_dense_last(q);
  check_head_dim(q);
  const Arg k = read_arg(op, "k_cache", tensors.k_cache);
  const Arg v = read_arg(op, "v_cache", tensors.v_cache);
  AttentionProblem p{};
  p.layout = AttentionLayout::kPaged;
  p.k = check_pages(k, "k_scale", tensors.k_scale, q);
  p.v = check_pages(v, "v_scale", tensors.v_scale, q);
  expect_shape(k, {k.size(0), k.size(1), k.size(2), q.size(2)});
  expect_shape(v, {k.size(0), k.size(1), k.size(2), v.size(3)});
  FI_CHECK(
      k.size(2) >= 8 && k.size(2) <= 512 && k.size(2) % 8 == 0, op,
      "k_cache: expected a block size (dimension 2) that is a multiple of 8 from 8 to 512, got ",
      k.size(2));
  check_count(op, "q: total_q", q.size(0));
  check_count(op, "max_seqlen_q", max_seqlen_q);
  check_count(op, "max_seqlen_k", max_seqlen_k);

  const Arg table = read_arg(op, "block_table", tensors.block_table);
  expect_rank(table, 2, "[batch, max_blocks]");
  expect_dtype(table, {ScalarType::Int});
  expect_same_device(table, q);
  const int64_t batch = table.size(0);
  const Arg cu_q =
      read_vector(op, "cu_seqlens_q", tensors.cu_seqlens_q, ScalarType::Int, batch + 1, q);
  const Arg seq_lens = read_vector(op, "seq_lens", tensors.seq_lens, ScalarType::Int, batch, q);

  p.num_sequences = batch;
  p.total_q = q.size(0);
  p.num_kv_heads = k.size(1);
  p.value_dim = v.size(3);
  p.max_seqlen_q = max_seqlen_q;
  p.max_seqlen_k = max_seqlen_k;
  p.cu_seqlens_q = static_cast<const int32_t*>(cu_q.data);
  p.seq_lens = static_cast<const int32_t*>(seq_lens.data);
  p.block_table = static_cast<const int32_t*>(table.data);
  p.block_table_strides[0] = table.stride(0);
  p.block_table_strides[1] = table.stride(1);
  p.max_blocks = table.size(1);
  p.num_blocks = k.size(0);
  p.block_size = k.size(2);
  check_queries_and_options(&p, q, options, out, lse);
  return p;
}

// What planning needs of a paged problem; the rest stays empty.
inline AttentionProblem check_plan_attention(const Tensor& cu_seqlens_q_tensor,
                                             const Tensor& seq_lens_tensor, int64_t total_q,
                                             int64_t num_heads, int64_t num_kv_heads,
                                             int64_t max_seqlen_q, int64_t max_seqlen_k,
                                             bool causal, int64_t window_left, int64_t window_right,
                                             bool batch_invariant) {
  constexpr const char* op = "plan_attention";
  const Arg seq_lens = read_arg(op, "seq_lens", seq_lens_tensor);
  expect_rank(seq_lens, 1, "[batch]");
  expect_dtype(seq_lens, {ScalarType::Int});
  expect_contiguous(seq_lens);
  const Arg cu_q = read_vector(op, "cu_seqlens_q", cu_seqlens_q_tensor, ScalarType::Int,
                               seq_lens.size(0) + 1, seq_lens);
  check_head_counts(op, num_heads, num_kv_heads);
  check_count(op, "total_q", total_q);
  check_count(op, "max_seqlen_q", max_seqlen_q);
  check_count(op, "max_seqlen_k", max_seqlen_k);
  check_windows(op, window_left, window_right);
  AttentionProblem p{};
  p.layout = AttentionLayout::kPaged;
  p.op = op;
  p.num_sequences = seq_lens.size(0);
  p.total_q = total_q;
  p.num_heads = num_heads;
  p.num_kv_heads = num_kv_heads;
  p.max_seqlen_q = max_seqlen_q;
  p.max_seqlen_k = max_seqlen_k;
  p.cu_seqlens_q = static_cast<const int32_t*>(cu_q.data);
  p.seq_lens = static_cast<const int32_t*>(seq_lens.data);
  p.causal = causal;
  p.window_left = limit_window(window_left);
  p.window_right = limit_window(window_right);
  p.batch_invariant = batch_invariant;
  return p;
}

// ---- plans and scratch space

inline int64_t plan_rows(const AttentionProblem& p) {
  return plan_rows(p.num_sequences, p.total_q, p.num_heads, p.num_kv_heads, p.max_seqlen_k);
}

inline Arg check_plan_tensor(const char* op, const char* name, const Tensor& tensor,
                             const AttentionProblem& p, const Arg& like) {
  const Arg plan = read_arg(op, name, tensor);
  expect_dtype(plan, {ScalarType::Int});
  expect_shape(plan, {plan_rows(p), kPlanColumns});
  expect_contiguous(plan);
  expect_same_device(plan, like);
  return plan;
}

// Null without a workspace.
inline float* check_workspace(const std::optional<Tensor>& tensor, const AttentionProblem& p,
                              const Arg& q) {
  if (!tensor.has_value()) return nullptr;
  const Arg arg = read_arg(p.op, "workspace", *tensor);
  expect_dtype(arg, {ScalarType::Float});
  expect_rank(arg, 1, "[floats]");
  expect_contiguous(arg);
  expect_same_device(arg, q);
  const int64_t floats =
      plan_workspace_floats(plan_partial_rows(p.total_q, p.max_seqlen_k), p.num_heads, p.value_dim);
  FI_CHECK(arg.size(0) >= floats, p.op, "workspace: expected at least ", floats,
           " elements (paged_attention_workspace_size), got ", arg.size(0));
  return static_cast<float*>(arg.data);
}

// Fresh out and lse for q [B, Sq, H, D] or [T, H, D]; `v` is what holds the values. Of e4m3 queries
// the result is bf16.
inline std::tuple<Tensor, Tensor> new_attention_outputs(const char* op, const Tensor& q_tensor,
                                                        const char* v_name, const Tensor& v_tensor,
                                                        bool dense) {
  const Arg q = read_arg(op, "q", q_tensor);
  expect_rank(q, dense ? 4 : 3,
              dense ? "[batch, seqlen_q, heads, head_dim]" : "[total_q, heads, head_dim]");
  const Arg v = read_arg(op, v_name, v_tensor);
  FI_CHECK(v.rank >= 1, op, v_name, ": expected at least 1 dimension, got a scalar");
  const int64_t value_dim = v.size(-1);
  const ScalarType dtype = q.dtype == ScalarType::Float8_e4m3fn ? ScalarType::BFloat16 : q.dtype;
  if (dense) {
    return {
        torch::stable::new_empty(q_tensor, {q.size(0), q.size(1), q.size(2), value_dim}, dtype),
        torch::stable::new_empty(q_tensor, {q.size(0), q.size(2), q.size(1)}, ScalarType::Float)};
  }
  return {torch::stable::new_empty(q_tensor, {q.size(0), q.size(1), value_dim}, dtype),
          torch::stable::new_empty(q_tensor, {q.size(1), q.size(0)}, ScalarType::Float)};
}

}  // namespace fastinfer
