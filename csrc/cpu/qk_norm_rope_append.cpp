// CPU: qk_norm_rope_append_. A token at a time, by the kernels of the ops that it stands for, so
// the results are those of the ops in turn.
#include "../checks/qk_norm_rope_append.h"

#include <torch/csrc/stable/library.h>

#include <cstring>

#include "../portable/portable.h"
#include "norm_kernels.h"
#include "paged_rows.h"
#include "parallel.h"
#include "qk_norm_rope_append_kernels.h"
#include "rotary_kernels.h"

namespace fastinfer::cpu {
namespace {

// What the steps before the pages do to the rows of a token.
class QkRows {
 public:
  explicit QkRows(const QkNormRopeAppendProblem& p)
      : p_(p), element_(element_index(p.append.dtype)), size_(element_size(p.append.dtype)) {
    if (p.q_weight != nullptr) {
      q_weight_ = as_float_vector(p.q_weight, p.q_weight_dtype, p.dim, p.weight_offset);
    }
    if (p.k_weight != nullptr) {
      k_weight_ = as_float_vector(p.k_weight, p.k_weight_dtype, p.dim, p.weight_offset);
    }
  }

  // heads rows of q, or of k, of token t: columns of qkv from `column` on, to rows at `out`.
  void run(int64_t t, int64_t column, int64_t heads, bool is_q, char* out,
           int64_t head_stride) const {
    const char* x = row(t) + column * size_;
    for (int64_t h = 0; h < heads; ++h) {
      copy_with_bias(x + h * p_.dim * size_, column + h * p_.dim, p_.dim,
                     out + h * head_stride * size_);
    }
    const std::vector<float>& weight = is_q ? q_weight_ : k_weight_;
    if (!weight.empty()) {
      NormArgs args{};
      args.x = args.out = out;
      args.weight = weight.data();
      args.x_rows.count = heads;
      args.x_rows.dims = 1;
      args.x_rows.sizes[0] = heads;
      args.x_rows.strides[0] = head_stride;
      args.out_rows = args.x_rows;
      args.hidden = p_.dim;
      args.eps = p_.eps;
      norm_kernels().rms_norm[element_](args, 0, heads);
    }
    if (p_.positions != nullptr) {
      const float* cos = p_.cos_sin + p_.positions[t] * p_.cos_sin_stride;
      const int64_t pairs = p_.rotary_dim / 2;
      rotary_kernels().rotate[p_.interleaved ? 1 : 0][element_](
          {out, head_stride, heads, cos, cos + pairs, pairs});
    }
  }

  const char* row(int64_t t) const {
    return static_cast<const char*>(p_.qkv) + t * p_.qkv_token_stride * size_;
  }

  // n elements of qkv from `column` on; x may be out.
  void copy_with_bias(const char* x, int64_t column, int64_t n, char* out) const {
    if (p_.bias != nullptr) {
      const char* bias = static_cast<const char*>(p_.bias) + column * size_;
      add_bias_kernels().add[element_](x, bias, out, n);
    } else if (x != out) {
      std::memcpy(out, x, static_cast<size_t>(n * size_));
    }
  }

 private:
  const QkNormRopeAppendProblem& p_;
  int element_;
  int64_t size_;
  std::vector<float> q_weight_;  // the offset already added; empty: not normalised
  std::vector<float> k_weight_;
};

void check_positions(const QkNormRopeAppendProblem& p) {
  if (p.positions == nullptr) return;
  for (int64_t t = 0; t < p.append.tokens; ++t) {
    FI_CHECK(p.positions[t] >= 0 && p.positions[t] < p.num_positions, "qk_norm_rope_append_",
             "positions: expected values in [0, ", p.num_positions, ") as cos_sin has rows, got ",
             p.positions[t], " at index ", t);
  }
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
  const AppendProblem& a = p.append;
  check_slots("qk_norm_rope_append_", a);
  check_positions(p);
  const QkRows qk(p);
  const PageWriter k_writer(a.k, a);
  const PageWriter v_writer(a.v, a);
  const int64_t size = element_size(a.dtype);
  const int64_t k_column = p.heads * p.dim, v_column = k_column + a.heads * p.dim;
  const int64_t v_columns = a.heads * a.v.dim;
  parallel_for(a.tokens, v_column + v_columns, [&](int64_t begin, int64_t end) {
    std::vector<char> rows(static_cast<size_t>(a.heads * std::max(p.dim, a.v.dim) * size));
    for (int64_t t = begin; t < end; ++t) {
      const int64_t slot = a.slot_mapping[t];
      if (slot >= 0) {
        qk.run(t, k_column, a.heads, false, rows.data(), p.dim);
        k_writer.write_heads(rows.data(), p.dim, slot);
        const char* v = qk.row(t) + v_column * size;
        if (p.bias != nullptr) {
          qk.copy_with_bias(v, v_column, v_columns, rows.data());
          v = rows.data();
        }
        v_writer.write_heads(v, a.v.dim, slot);
      }
      char* q = static_cast<char*>(p.q_out) + t * p.q_token_stride * size;
      qk.run(t, 0, p.heads, true, q, p.q_head_stride);
    }
  });
}

}  // namespace
}  // namespace fastinfer::cpu

STABLE_TORCH_LIBRARY_IMPL(fastinfer, CPU, m) {
  if (fastinfer::portable_forced_on_cpu()) return;
  using namespace fastinfer::cpu;
  m.impl("qk_norm_rope_append_", TORCH_BOX(&qk_norm_rope_append_));
}
