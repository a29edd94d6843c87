// Rows of elements whose type is known at run time, from and to fp32; for kernel files, which are
// compiled once per instruction set. Types are indices: fp32, bf16, fp16 (elements.h).
#pragma once

#include "vec.h"

namespace fastinfer::cpu::FI_ISA {
namespace {

template <class T>
void read_elements(const T* p, const int32_t* index, int64_t n, float* to) {
  if (index != nullptr) {
    for (int64_t i = 0; i < n; ++i) to[i] = to_float(p[index[i]]);
    return;
  }
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(to + i, load(p + i));
  for (; i < n; ++i) to[i] = to_float(p[i]);
}

// n elements from `offset` on, or those at offset + index[i], as fp32.
void read(const void* data, int type, int64_t offset, const int32_t* index, int64_t n, float* to) {
  switch (type) {
    case 0: return read_elements(static_cast<const float*>(data) + offset, index, n, to);
    case 1: return read_elements(static_cast<const bf16*>(data) + offset, index, n, to);
    default: return read_elements(static_cast<const fp16*>(data) + offset, index, n, to);
  }
}

template <class T>
void write_elements(T* p, const float* from, int64_t n) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(p + i, load(from + i));
  for (; i < n; ++i) from_float(from[i], p + i);
}

void write(void* data, int type, int64_t offset, const float* from, int64_t n) {
  switch (type) {
    case 0: return write_elements(static_cast<float*>(data) + offset, from, n);
    case 1: return write_elements(static_cast<bf16*>(data) + offset, from, n);
    default: return write_elements(static_cast<fp16*>(data) + offset, from, n);
  }
}

}  // namespace
}  // namespace fastinfer::cpu::FI_ISA
