// CPU: append_paged_kv_cache_.
#include "../checks/kv_cache.h"

#include <torch/csrc/stable/library.h>

#include "../functional.h"
#include "../portable/portable.h"
#include "elements.h"
#include "kv_cache_kernels.h"
#include "parallel.h"

namespace fastinfer::cpu {
namespace {

int64_t element_size(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Float: return 4;
    case ScalarType::BFloat16:
    case ScalarType::Half: return 2;
    default: return 1;
  }
}

// One side (K or V) of one call: chooses the kernel once and walks heads.
class Writer {
 public:
  Writer(const AppendSide& side, const AppendProblem& p)
      : side_(side),
        heads_(p.heads),
        x_size_(element_size(p.dtype)),
        cache_size_(element_size(side.cache_dtype)) {
    const int format = side.cache_dtype == p.dtype            ? 0
                       : side.cache_dtype == ScalarType::Char ? 1
                                                              : 2;
    append_ = kv_cache_kernels().append[format][element_index(p.dtype)];
  }

  void write(int64_t token, int64_t block, int64_t offset) const {
    const char* x = static_cast<const char*>(side_.x) + token * side_.x_token_stride * x_size_;
    char* cache =
        static_cast<char*>(side_.cache) +
        (block * side_.cache_block_stride + offset * side_.cache_slot_stride) * cache_size_;
    float* scale = side_.scale;
    if (scale != nullptr)
      scale += block * side_.scale_block_stride + offset * side_.scale_slot_stride;
    for (int64_t h = 0; h < heads_; ++h) {
      append_({x + h * side_.x_head_stride * x_size_,
               cache + h * side_.cache_head_stride * cache_size_, side_.dim,
               scale == nullptr ? nullptr : scale + h * side_.scale_head_stride,
               side_.scale_is_dynamic});
    }
  }

 private:
  const AppendSide& side_;
  int64_t heads_;
  int64_t x_size_;
  int64_t cache_size_;
  AppendFunction append_;
};

void append_paged_kv_cache_(const Tensor& k, const Tensor& v, const Tensor& k_cache,
                            const Tensor& v_cache, const Tensor& slot_mapping,
                            const std::optional<Tensor>& k_scale,
                            const std::optional<Tensor>& v_scale) {
  const AppendProblem p = check_append(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale);
  const int64_t capacity = p.num_blocks * p.block_size;
  for (int64_t t = 0; t < p.tokens; ++t) {
    FI_CHECK(p.slot_mapping[t] < capacity, "append_paged_kv_cache_",
             "slot_mapping: expected slots below ", capacity, " (", p.num_blocks, " blocks of ",
             p.block_size, "), got ", p.slot_mapping[t], " at index ", t);
  }
  const Writer k_writer(p.k, p);
  const Writer v_writer(p.v, p);
  parallel_for(p.tokens, p.heads * (p.k.dim + p.v.dim), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const int64_t slot = p.slot_mapping[t];
      if (slot < 0) continue;
      k_writer.write(t, slot / p.block_size, slot % p.block_size);
      v_writer.write(t, slot / p.block_size, slot % p.block_size);
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
