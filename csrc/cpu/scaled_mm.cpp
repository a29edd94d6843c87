// CPU: fp8_scaled_mm, int8_scaled_mm.
#include "../checks/scaled_mm.h"

#include <torch/csrc/stable/library.h>

#include "../functional.h"
#include "../portable/portable.h"
#include "elements.h"
#include "epilogue.h"
#include "parallel.h"
#include "scaled_mm_kernels.h"

namespace fastinfer::cpu {
namespace {

static_assert(kMmBlock == kScaleBlock);

MmScaleArgs scale_args(const MmScales& scales) {
  return {scales.data, scales.row_stride, scales.block_stride, scales.block_rows};
}

void scaled_mm_out(const ScaledMmInputs& inputs, const Tensor& out) {
  const ScaledMmProblem p = check_scaled_mm(inputs, out);
  if (p.m == 0) return;
  const ScaledMmArgs args{p.a,
                          p.a_row_stride,
                          p.b,
                          p.b_row_stride,
                          scale_args(p.a_scale),
                          scale_args(p.b_scale),
                          p.block_scales,
                          p.a_zero,
                          p.a_zero_stride,
                          p.bias,
                          element_index(p.bias_dtype),
                          p.n,
                          p.k,
                          epilogue_args(p.epilogue, p.dtype, p.out, p.out_row_stride)};
  const ScaledMmKernels& kernels = scaled_mm_kernels();
  const ScaledMmFunction function = p.format == MmFormat::kFp8 ? kernels.fp8 : kernels.int8;
  const int64_t tiles = (p.epilogue.width - 1) / kMmTile + 1;
  const int64_t blocks = (p.m - 1) / kMmRowBlock + 1;
  const int64_t cost = (p.epilogue.gated ? 2 : 1) * kMmTile * p.k * std::min(p.m, kMmRowBlock);
  parallel_for(tiles * blocks, cost, [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      const int64_t row = item % blocks * kMmRowBlock;
      function(args, item / blocks, row, std::min(row + kMmRowBlock, p.m));
    }
  });
}

}  // namespace
}  // namespace fastinfer::cpu

STABLE_TORCH_LIBRARY_IMPL(fastinfer, CPU, m) {
  if (fastinfer::portable_forced_on_cpu()) return;
  fastinfer::functional::register_scaled_mm<&fastinfer::cpu::scaled_mm_out>(m);
}
