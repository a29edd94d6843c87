// CPU: rotary_embedding_.
#include "../checks/rotary.h"

#include <torch/csrc/stable/library.h>

#include "../functional.h"
#include "../portable/portable.h"
#include "elements.h"
#include "parallel.h"
#include "rotary_kernels.h"

namespace fastinfer::cpu {
namespace {

void rotary_embedding_(const Tensor& q, const std::optional<Tensor>& k, const Tensor& positions,
                       const Tensor& cos_sin, bool interleaved) {
  const RotaryProblem p = check_rotary(q, k, positions, cos_sin);
  for (int64_t t = 0; t < p.tokens; ++t) {
    FI_CHECK(p.positions[t] >= 0 && p.positions[t] < p.num_positions, "rotary_embedding_",
             "positions: expected values in [0, ", p.num_positions, ") as cos_sin has rows, got ",
             p.positions[t], " at index ", t);
  }
  const int element = element_index(p.dtype);
  const int64_t size = p.dtype == ScalarType::Float ? 4 : 2;
  const RotaryFunction rotate = rotary_kernels().rotate[interleaved ? 1 : 0][element];
  const int64_t pairs = p.rotary_dim / 2;
  parallel_for(p.tokens, (p.q_heads + p.k_heads) * p.rotary_dim, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const float* cos = p.cos_sin + p.positions[t] * p.cos_sin_stride;
      char* q_row = static_cast<char*>(p.q) + t * p.q_token_stride * size;
      rotate({q_row, p.q_head_stride, p.q_heads, cos, cos + pairs, pairs});
      if (p.k == nullptr) continue;
      char* k_row = static_cast<char*>(p.k) + t * p.k_token_stride * size;
      rotate({k_row, p.k_head_stride, p.k_heads, cos, cos + pairs, pairs});
    }
  });
}

}  // namespace
}  // namespace fastinfer::cpu

STABLE_TORCH_LIBRARY_IMPL(fastinfer, CPU, m) {
  if (fastinfer::portable_forced_on_cpu()) return;
  using namespace fastinfer::cpu;
  m.impl("rotary_embedding_", TORCH_BOX(&rotary_embedding_));
}
