#include "isa.h"

#include <cstdlib>
#include <cstring>

namespace fastinfer::cpu {

bool use_avx2() {
#ifdef FI_HAVE_AVX2
  static const bool chosen = [] {
    const char* forced = std::getenv("FASTINFER_CPU_ISA");
    if (forced != nullptr && std::strcmp(forced, "generic") == 0) return false;
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
           __builtin_cpu_supports("f16c");
  }();
  return chosen;
#else
  return false;
#endif
}

const char* isa_name() {
  return use_avx2() ? "avx2" : "generic";
}

}  // namespace fastinfer::cpu
