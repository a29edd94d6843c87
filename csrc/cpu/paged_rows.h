// Rows of new tokens on their way into pages.
#pragma once

#include "../checks/kv_cache.h"
#include "elements.h"
#include "kv_cache_kernels.h"

namespace fastinfer::cpu {

// One side (K or V) of one call: chooses the kernel once and walks heads.
class PageWriter {
 public:
  PageWriter(const AppendSide& side, const AppendProblem& p)
      : side_(side),
        heads_(p.heads),
        block_size_(p.block_size),
        x_size_(element_size(p.dtype)),
        cache_size_(element_size(side.cache_dtype)) {
    const int format = side.cache_dtype == p.dtype            ? 0
                       : side.cache_dtype == ScalarType::Char ? 1
                                                              : 2;
    append_ = kv_cache_kernels().append[format][element_index(p.dtype)];
  }

  // Token `token` of the side's tensor to its slot.
  void write(int64_t token, int64_t slot) const {
    const char* x = static_cast<const char*>(side_.x) + token * side_.x_token_stride * x_size_;
    write_heads(x, side_.x_head_stride, slot);
  }

  // heads rows [heads, dim] from anywhere; the stride is in elements.
  void write_heads(const char* x, int64_t head_stride, int64_t slot) const {
    const int64_t block = slot / block_size_, offset = slot % block_size_;
    char* cache =
        static_cast<char*>(side_.cache) +
        (block * side_.cache_block_stride + offset * side_.cache_slot_stride) * cache_size_;
    float* scale = side_.scale;
    if (scale != nullptr)
      scale += block * side_.scale_block_stride + offset * side_.scale_slot_stride;
    for (int64_t h = 0; h < heads_; ++h) {
      append_({x + h * head_stride * x_size_, cache + h * side_.cache_head_stride * cache_size_,
               side_.dim, scale == nullptr ? nullptr : scale + h * side_.scale_head_stride,
               side_.scale_is_dynamic});
    }
  }

 private:
  const AppendSide& side_;
  int64_t heads_;
  int64_t block_size_;
  int64_t x_size_;
  int64_t cache_size_;
  AppendFunction append_;
};

// Before anything is written.
inline void check_slots(const char* op, const AppendProblem& p) {
  const int64_t capacity = p.num_blocks * p.block_size;
  for (int64_t t = 0; t < p.tokens; ++t) {
    FI_CHECK(p.slot_mapping[t] < capacity, op, "slot_mapping: expected slots below ", capacity,
             " (", p.num_blocks, " blocks of ", p.block_size, "), got ", p.slot_mapping[t],
             " at index ", t);
  }
}

}  // namespace fastinfer::cpu
