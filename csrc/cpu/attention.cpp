// CPU: flash_attention, flash_attention_varlen, and the threading of every attention op.
#include "attention.h"

#include <torch/csrc/stable/library.h>

#include <atomic>
#include <memory>

#include "../functional.h"
#include "../portable/portable.h"
#include "attention_kernels.h"
#include "elements.h"
#include "merge_kernels.h"
#include "parallel.h"

namespace fastinfer::cpu {
namespace {

// Each thread keeps its scratch space from call to call; the largest tile needs a few MB.
class Scratch {
 public:
  float* get(int64_t floats) {
    if (floats > capacity_) {
      data_.reset(static_cast<float*>(::operator new(floats * sizeof(float), kAlignment)));
      capacity_ = floats;
    }
    return data_.get();
  }

 private:
  static constexpr std::align_val_t kAlignment{64};
  struct Free {
    void operator()(float* p) const { ::operator delete(p, kAlignment); }
  };
  std::unique_ptr<float, Free> data_;
  int64_t capacity_ = 0;
};

thread_local Scratch scratch;

int format_of(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Char: return kInt8;
    case ScalarType::Float8_e4m3fn: return kFp8E4m3;
    default: return element_index(dtype);
  }
}

KvSource kv_source(const AttentionKv& kv) {
  return {kv.data,
          format_of(kv.dtype),
          kv.strides.outer,
          kv.strides.token,
          kv.strides.head,
          kv.scale,
          kv.scale_strides.outer,
          kv.scale_strides.token,
          kv.scale_strides.head};
}

AttentionArgs attention_args(const AttentionProblem& p) {
  AttentionArgs args{};
  args.group = p.num_heads / p.num_kv_heads;
  args.num_heads = p.num_heads;
  args.head_dim = p.head_dim;
  args.value_dim = p.value_dim;
  args.scale = p.scale;
  args.softcap = p.softcap;
  args.window_left = p.window_left;
  args.window_right = p.window_right;
  args.batch_invariant = p.batch_invariant;
  args.q_token_stride = p.q_strides.token;
  args.q_head_stride = p.q_strides.head;
  args.q_format = format_of(p.dtype);
  args.q_scale = p.q_scale;
  args.k = kv_source(p.k);
  args.v = kv_source(p.v);
  args.block_size = p.block_size;
  args.block_table_stride = p.block_table_strides[1];
  args.out_token_stride = p.out_strides.token;
  args.out_head_stride = p.out_strides.head;
  args.lse_head_stride = p.lse_strides.head;
  args.sinks = p.sinks;
  return args;
}

char* advance(const void* base, ScalarType dtype, int64_t elements) {
  return static_cast<char*>(const_cast<void*>(base)) + elements * element_size(dtype);
}

// An item of the plan for one KV head.
AttentionWork attention_work(const AttentionProblem& p, const AttentionLengths& lengths,
                             const PlanItem& item, int64_t kv_head, float* partial_out,
                             float* partial_lse) {
  const int64_t b = item.sequence;
  const bool dense = p.layout == AttentionLayout::kDense;
  const int64_t first =
      dense ? 0 : lengths.q_begin[b];  // the sequence's first row in ragged tensors
  const int64_t first_key = p.layout == AttentionLayout::kRagged ? p.cu_seqlens_k[b] : 0;
  AttentionWork work{};
  work.num_queries = lengths.queries(b);
  work.num_keys = lengths.keys[b];
  work.q_begin = item.q_begin;
  work.q_count = item.q_count;
  work.k_begin = item.k_begin;
  work.k_end = item.k_end;
  work.kv_head = kv_head;
  work.q = advance(p.q, p.dtype, b * p.q_strides.outer + first * p.q_strides.token);
  work.out = advance(p.out, p.out_dtype, b * p.out_strides.outer + first * p.out_strides.token);
  work.lse = p.lse + b * p.lse_strides.outer + first;
  if (p.layout == AttentionLayout::kPaged) {
    work.block_table = p.block_table + b * p.block_table_strides[0];
  } else {
    work.k_offset = b * p.k.strides.outer + first_key * p.k.strides.token;
    work.v_offset = b * p.v.strides.outer + first_key * p.v.strides.token;
  }
  if (p.tree_mask != nullptr) work.tree_mask = p.tree_mask + b * p.tree_mask_stride + first;
  if (item.num_splits > 1) {
    work.partial_out = partial_out + item.partial_row * p.num_heads * p.value_dim;
    work.partial_lse = partial_lse + item.partial_row * p.num_heads;
  }
  return work;
}

// Merges the splits of the tile whose split 0 is `item`.
void merge_splits(const AttentionProblem& p, const AttentionWork& work, const PlanItem& item) {
  MergeArgs args{};
  args.outs = work.partial_out;
  args.lses = work.partial_lse;
  args.out = advance(work.out, p.out_dtype, item.q_begin * p.out_strides.token);
  args.lse = work.lse + item.q_begin;
  args.sinks = p.sinks;
  args.splits = item.num_splits;
  args.tokens = item.q_count;
  args.heads = p.num_heads;
  args.value_dim = p.value_dim;
  args.outs_split = item.q_count * p.num_heads * p.value_dim;
  args.outs_token = p.num_heads * p.value_dim;
  args.outs_head = p.value_dim;
  args.lses_split = item.q_count * p.num_heads;
  args.lses_token = p.num_heads;
  args.lses_head = 1;
  args.out_token = p.out_strides.token;
  args.out_head = p.out_strides.head;
  args.lse_token = 1;
  args.lse_head = p.lse_strides.head;
  merge_kernels().from_fp32[element_index(p.out_dtype)](args, 0, item.q_count * p.num_heads);
}

// f(i) for i in [0, count), taken one by one by the threads, since items differ in length.
template <class F>
void for_each_item(int64_t count, int64_t cost, const F& f) {
  constexpr int64_t kParallelCost =
      1 << 17;  // multiply-adds: about what waking the other threads costs
  const int64_t threads = std::min<int64_t>(count, torch::stable::get_num_threads());
  if (threads <= 1 || cost < kParallelCost) {
    for (int64_t i = 0; i < count; ++i) f(i);
    return;
  }
  std::atomic<int64_t> next{0};
  torch::stable::parallel_for(0, threads, 1, [&](int64_t, int64_t) {
    for (int64_t i = next.fetch_add(1); i < count; i = next.fetch_add(1)) f(i);
  });
}

}  // namespace

void run_attention(const AttentionProblem& p, const AttentionLengths& lengths,
                   const AttentionPlan& plan, float* workspace) {
  const AttentionArgs args = attention_args(p);
  const AttentionKernels& kernels = attention_kernels();
  const auto attend = kernels.attend[element_index(p.out_dtype)];
  const int64_t scratch_floats = kernels.scratch_floats(args);
  float* partial_lse = workspace + plan.header.num_partial_rows * p.num_heads * p.value_dim;
  const auto work_of = [&](const PlanItem& item, int64_t kv_head) {
    return attention_work(p, lengths, item, kv_head, workspace, partial_lse);
  };

  int64_t cost = 0;
  std::vector<PlanItem> to_merge;
  for (const PlanItem& item : plan.items) {
    cost += (item.k_end - item.k_begin) * item.q_count * p.num_heads * (p.head_dim + p.value_dim);
    if (item.num_splits > 1 && item.split == 0) to_merge.push_back(item);
  }
  const int64_t num_items = static_cast<int64_t>(plan.items.size());
  for_each_item(num_items * p.num_kv_heads, cost, [&](int64_t i) {
    attend(args, work_of(plan.items[i / p.num_kv_heads], i % p.num_kv_heads),
           scratch.get(scratch_floats));
  });
  const int64_t merge_cost = plan.header.num_partial_rows * p.num_heads * p.value_dim;
  for_each_item(static_cast<int64_t>(to_merge.size()), merge_cost,
                [&](int64_t i) { merge_splits(p, work_of(to_merge[i], 0), to_merge[i]); });
}

namespace {

void run_unplanned(const AttentionProblem& p, const Tensor& like) {
  const AttentionLengths lengths = read_lengths(p);
  if (p.total_q == 0) return;
  const AttentionPlan plan =
      make_plan(plan_header(p, lengths), lengths, torch::stable::get_num_threads());
  const int64_t floats =
      plan_workspace_floats(plan.header.num_partial_rows, p.num_heads, p.value_dim);
  if (floats == 0) return run_attention(p, lengths, plan, nullptr);
  const Tensor workspace = torch::stable::new_empty(like, {floats}, ScalarType::Float);
  run_attention(p, lengths, plan, static_cast<float*>(workspace.data_ptr()));
}

void flash_attention_out(const Tensor& q, const Tensor& k, const Tensor& v,
                         std::optional<double> scale, bool causal, int64_t window_left,
                         int64_t window_right, double softcap, const std::optional<Tensor>& sinks,
                         const std::optional<Tensor>& tree_mask,
                         const std::optional<Tensor>& q_scale, const std::optional<Tensor>& k_scale,
                         const std::optional<Tensor>& v_scale, bool batch_invariant,
                         const Tensor& out, const Tensor& lse) {
  const AttentionOptions options{scale,   causal, window_left, window_right,
                                 softcap, sinks,  tree_mask,   batch_invariant};
  run_unplanned(check_flash_attention(q, k, v, options, {q_scale, k_scale, v_scale}, out, lse), q);
}

void flash_attention_varlen_out(
    const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& cu_seqlens_q,
    const Tensor& cu_seqlens_k, int64_t max_seqlen_q, int64_t max_seqlen_k,
    std::optional<double> scale, bool causal, int64_t window_left, int64_t window_right,
    double softcap, const std::optional<Tensor>& sinks, const std::optional<Tensor>& tree_mask,
    const std::optional<Tensor>& q_scale, const std::optional<Tensor>& k_scale,
    const std::optional<Tensor>& v_scale, bool batch_invariant, const Tensor& out,
    const Tensor& lse) {
  const AttentionOptions options{scale,   causal, window_left, window_right,
                                 softcap, sinks,  tree_mask,   batch_invariant};
  run_unplanned(
      check_flash_attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
                                   options, {q_scale, k_scale, v_scale}, out, lse),
      q);
}

}  // namespace
}  // namespace fastinfer::cpu

STABLE_TORCH_LIBRARY_IMPL(fastinfer, CPU, m) {
  if (fastinfer::portable_forced_on_cpu()) return;
  using namespace fastinfer::cpu;
  m.impl("flash_attention",
         TORCH_BOX(&fastinfer::functional::flash_attention<&flash_attention_out>));
  m.impl("flash_attention.out", TORCH_BOX(&flash_attention_out));
  m.impl("flash_attention_varlen",
         TORCH_BOX(&fastinfer::functional::flash_attention_varlen<&flash_attention_varlen_out>));
  m.impl("flash_attention_varlen.out", TORCH_BOX(&flash_attention_varlen_out));
}
