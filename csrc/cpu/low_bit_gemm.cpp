// CPU: int2_gemm, int3_gemm, int4_gemm, int8_gemm.
#include "../checks/low_bit_gemm.h"

#include <torch/csrc/stable/library.h>

#include "../functional.h"
#include "../portable/portable.h"
#include "elements.h"
#include "epilogue.h"
#include "low_bit_gemm_kernels.h"
#include "norm.h"
#include "parallel.h"

namespace fastinfer::cpu {
namespace {

LowBitGemmFunction function_of(int bits) {
  const LowBitGemmKernels& kernels = low_bit_gemm_kernels();
  switch (bits) {
    case 2: return kernels.bits2;
    case 3: return kernels.bits3;
    case 4: return kernels.bits4;
    default: return kernels.bits8;
  }
}

void check_perm(const LowBitGemmProblem& p) {
  if (p.perm == nullptr) return;
  for (int64_t i = 0; i < p.k; ++i) {
    FI_CHECK(p.perm[i] >= 0 && p.perm[i] < p.k, p.op, "perm: expected values in [0, ", p.k,
             ") as x has columns, got ", p.perm[i], " at index ", i);
  }
}

void check_outlier_contents(const LowBitGemmProblem& p) {
  const Outliers& o = p.outliers;
  if (o.offsets == nullptr) return;
  FI_CHECK(o.offsets[0] == 0, p.op, "outlier_offsets: expected 0 at first, got ", o.offsets[0]);
  for (int64_t i = 1; i <= p.n; ++i) {
    FI_CHECK(o.offsets[i] >= o.offsets[i - 1], p.op,
             "outlier_offsets: expected ascending numbers, got ", o.offsets[i], " after ",
             o.offsets[i - 1], " at index ", i);
  }
  FI_CHECK(o.offsets[p.n] == o.count, p.op, "outlier_offsets: expected ", o.count,
           " at last, as outlier_columns has entries, got ", o.offsets[p.n]);
  for (int64_t i = 0; i < o.count; ++i) {
    FI_CHECK(o.columns[i] >= 0 && o.columns[i] < p.k, p.op,
             "outlier_columns: expected values in [0, ", p.k, ") as x has columns, got ",
             o.columns[i], " at index ", i);
  }
}

void low_bit_gemm_out(const LowBitGemmInputs& inputs, const Tensor& out) {
  const LowBitGemmProblem p = check_low_bit_gemm(inputs, out);
  check_perm(p);
  check_outlier_contents(p);
  if (p.m == 0) return;
  const auto& norm = inputs.norm;
  const Tensor x = p.norm_weight == nullptr
                       ? inputs.x
                       : functional::rms_norm<&rms_norm_out>(inputs.x, *norm.weight, norm.eps,
                                                             norm.weight_offset);
  const LowBitGemmArgs args{x.data_ptr(),
                            element_index(p.dtype),
                            x.stride(0),
                            p.qweight,
                            p.scales,
                            p.zeros,
                            element_index(p.scale_dtype),
                            p.perm,
                            p.bias,
                            element_index(p.bias_dtype),
                            p.outliers.offsets,
                            p.outliers.columns,
                            p.outliers.values,
                            element_index(p.outliers.dtype),
                            p.n,
                            p.k,
                            p.group_size,
                            epilogue_args(p.epilogue, p.out_dtype, p.out, p.out_row_stride)};
  const LowBitGemmFunction function = function_of(p.bits);
  const int64_t tiles = (p.epilogue.width - 1) / kGemmTile + 1;
  const int64_t blocks = (p.m - 1) / kGemmRowBlock + 1;
  const int64_t cost = (p.epilogue.gated ? 2 : 1) * kGemmTile * p.k * std::min(p.m, kGemmRowBlock);
  parallel_for(tiles * blocks, cost, [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      const int64_t row = item % blocks * kGemmRowBlock;
      function(args, item / blocks, row, std::min(row + kGemmRowBlock, p.m));
    }
  });
}

}  // namespace
}  // namespace fastinfer::cpu

STABLE_TORCH_LIBRARY_IMPL(fastinfer, CPU, m) {
  if (fastinfer::portable_forced_on_cpu()) return;
  fastinfer::functional::register_low_bit_gemm<&fastinfer::cpu::low_bit_gemm_out>(m);
}
