// What this library was built with, read by `fastinfer doctor` through ctypes: plain C, so that it
// needs no op.
#include "cpu/isa.h"

#ifndef FI_CUDA_ARCHS
#define FI_CUDA_ARCHS ""
#endif

#define FI_EXPORT extern "C" __attribute__((visibility("default")))

// "avx2" or "generic": what the CPU kernels run with on this processor.
FI_EXPORT const char* fastinfer_cpu_isa() {
  return fastinfer::cpu::isa_name();
}

// "90a", or "" when no CUDA kernel was built.
FI_EXPORT const char* fastinfer_cuda_archs() {
  return FI_CUDA_ARCHS;
}

// The ops with hand-written GPU kernels in this build, separated by spaces.
FI_EXPORT const char* fastinfer_cuda_ops() {
  return FI_CUDA_ARCHS[0] == '\0'
             ? ""
             : "rms_norm fused_add_rms_norm_ append_paged_kv_cache_ "
               "qk_norm_rope_append_ flash_attention flash_attention_varlen "
               "paged_attention plan_attention merge_attention_states "
               "int2_gemm int3_gemm int4_gemm int8_gemm fp8_scaled_mm int8_scaled_mm";
}
