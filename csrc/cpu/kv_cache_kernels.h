#pragma once

#include <cstdint>

#include "isa.h"

namespace fastinfer::cpu {

// What one row (a token's head) needs: where it comes from, where it goes, and its scale.
struct AppendRow {
  const void* x;  // [dim]
  void* cache;    // [dim]
  int64_t dim;
  float* scale;           // null for a float cache
  bool scale_is_dynamic;  // written from the row's largest magnitude; otherwise read
};

using AppendFunction = void (*)(const AppendRow& row);

// Indexed by the cache's format (as k, int8, float8_e4m3fn), then by element type (fp32, bf16,
// fp16).
struct KvCacheKernels {
  AppendFunction append[3][3];
};

FI_ISA_TABLE(KvCacheKernels, kv_cache_kernels)

}  // namespace fastinfer::cpu
