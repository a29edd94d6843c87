// Which compiled variant of a kernel table this processor runs.
#pragma once

namespace fastinfer::cpu {

// "avx2" or "generic"; FASTINFER_CPU_ISA=generic forces the latter (isa.cpp).
const char* isa_name();
bool use_avx2();

}  // namespace fastinfer::cpu

// FI_ISA_TABLE(Type, name) inside namespace fastinfer::cpu declares the table that each variant of
// a *_kernels.cpp defines, and a function `name()` that picks one.
#ifdef FI_HAVE_AVX2
#define FI_ISA_TABLE(Type, name)                    \
  namespace generic { extern const Type name; }     \
  namespace avx2 { extern const Type name; }        \
  inline const Type& name() {                       \
    return use_avx2() ? avx2::name : generic::name; \
  }
#else
#define FI_ISA_TABLE(Type, name)                \
  namespace generic { extern const Type name; } \
  inline const Type& name() {                   \
    return generic::name;                       \
  }
#endif
