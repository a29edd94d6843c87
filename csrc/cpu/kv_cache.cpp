// CPU: append_paged_kv_cache_.
#include "../checks/kv_cache.h"

#include <torch/csrc/stable/library.h>

#include "../portable/portable.h"
#include "paged_rows.h"
#include "parallel.h"

namespace fastinfer::cpu {
namespace {

void append_paged_kv_cache_(const Tensor& k, const Tensor& v, const Tensor& k_cache,
                            const Tensor& v_cache, const Tensor& slot_mapping,
                            const std::optional<Tensor>& k_scale,
                            const std::optional<Tensor>& v_scale) {
  const AppendProblem p = check_append(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale);
  check_slots("append_paged_kv_cache_", p);
  const PageWriter k_writer(p.k, p);
  const PageWriter v_writer(p.v, p);
  parallel_for(p.tokens, p.heads * (p.k.dim + p.v.dim), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const int64_t slot = p.slot_mapping[t];
      if (slot < 0) continue;
      k_writer.write(t, slot);
      v_writer.write(t, slot);
    }
  });
}

}  // namespace
}  // namespace fastinfer::cpu

STABLE_TORCH_LIBRARY_IMPL(fastinfer, CPU, m) {
  if (fastinfer::portable_forced_on_cpu()) return;
  using namespace fastinfer::cpu;
  m.impl("append_paged_kv_cache_", TORCH_BOX(&append_paged_kv_cache_));
}
