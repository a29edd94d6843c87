// The way from a public op to its portable implementation: the private op `_portable_<op>`, whose
// kernels are the Triton launchers of fastinfer/triton_kernels.
#pragma once

#include <torch/csrc/stable/library.h>

#include <cstdlib>
#include <string_view>

#include "../torch_utils.h"

namespace fastinfer {

// FASTINFER_BACKEND=triton: the portable implementation everywhere, also for CPU tensors (under
// Triton's interpreter) and where a hand-written kernel exists. Read when the library is loaded.
inline bool portable_forced() {
  const char* wanted = std::getenv("FASTINFER_BACKEND");
  return wanted != nullptr && std::string_view(wanted) == "triton";
}

// Calls fastinfer::<op> through the dispatcher; it returns nothing.
template <class... Args>
void call_portable(const char* op, const Args&... args) {
  StableIValue stack[] = {torch::stable::detail::from(args)...};
  STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(op, "", stack, TORCH_ABI_VERSION));
}

}  // namespace fastinfer
