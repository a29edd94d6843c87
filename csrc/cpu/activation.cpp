// CPU: silu_and_mul, gelu_and_mul.
#include "../checks/activation.h"

#include <torch/csrc/stable/library.h>

#include <vector>

#include "../functional.h"
#include "../portable/portable.h"
#include "activation_kernels.h"
#include "elements.h"
#include "parallel.h"

namespace fastinfer::cpu {
namespace {

void run(const ActivationProblem& p, const ActivationFunction (&functions)[3]) {
  if (p.width == 0) return;
  // Items are pieces of rows, so that one wide row is shared by the threads as well.
  constexpr int64_t kPiece = 2048;
  const int64_t pieces = (p.width + kPiece - 1) / kPiece;
  const int64_t size = p.dtype == ScalarType::Float ? 4 : 2;
  const ActivationFunction function = functions[element_index(p.dtype)];
  parallel_for(p.x_rows.count * pieces, std::min(p.width, kPiece), [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      const int64_t row = item / pieces;
      const int64_t first = item % pieces * kPiece;
      const char* gate = static_cast<const char*>(p.x) + (p.x_rows.offset(row) + first) * size;
      char* out = static_cast<char*>(p.out) + (p.out_rows.offset(row) + first) * size;
      function(gate, gate + p.width * size, out, std::min(kPiece, p.width - first));
    }
  });
}

void silu_and_mul_out(const Tensor& x, const Tensor& out) {
  run(check_activation("silu_and_mul", x, out), activation_kernels().silu);
}

void gelu_and_mul_out(const Tensor& x, bool tanh_approx, const Tensor& out) {
  run(check_activation("gelu_and_mul", x, out),
      tanh_approx ? activation_kernels().gelu_tanh : activation_kernels().gelu_erf);
}

}  // namespace
}  // namespace fastinfer::cpu

STABLE_TORCH_LIBRARY_IMPL(fastinfer, CPU, m) {
  if (fastinfer::portable_forced_on_cpu()) return;
  using namespace fastinfer::cpu;
  m.impl("silu_and_mul", TORCH_BOX(&fastinfer::functional::silu_and_mul<&silu_and_mul_out>));
  m.impl("silu_and_mul.out", TORCH_BOX(&silu_and_mul_out));
  m.impl("gelu_and_mul", TORCH_BOX(&fastinfer::functional::gelu_and_mul<&gelu_and_mul_out>));
  m.impl("gelu_and_mul.out", TORCH_BOX(&gelu_and_mul_out));
}
