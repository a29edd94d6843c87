// The way from a public op to its portable implementation: the private op `_portable_<op>`, whose
// kernels are the Triton launchers of fastinfer/triton_kernels.
#pragma once

#include <torch/csrc/stable/library.h>

#include <cstdlib>
#include <stdexcept>
#include <string>
#include <string_view>

#include "../torch_utils.h"

namespace fastinfer {

inline bool environment_is(const char* name, std::string_view wanted) {
  const char* value = std::getenv(name);
  return value != nullptr && value == wanted;
}

// FASTINFER_BACKEND=triton: the portable implementation also where a hand-written kernel exists.
// Read when the library is loaded, as the next one.
inline bool portable_forced() {
  return environment_is("FASTINFER_BACKEND", "triton");
}

// The same for CPU tensors, on which Triton kernels run in its interpreter alone.
inline bool portable_forced_on_cpu() {
  return portable_forced() && environment_is("TRITON_INTERPRET", "1");
}

// Why the last launcher of this thread failed: an error from Python crosses the stable ABI without
// its text, so the launcher leaves it here.
std::string& portable_error();

// Calls fastinfer::<op> through the dispatcher; it returns nothing.
template <class... Args>
void call_portable(const char* op, const Args&... args) {
  StableIValue stack[] = {torch::stable::detail::from(args)...};
  portable_error().clear();
  if (torch_call_dispatcher(op, "", stack, TORCH_ABI_VERSION) != AOTI_TORCH_SUCCESS) {
    throw std::runtime_error(std::string(op) + ": " + portable_error());
  }
}

}  // namespace fastinfer
