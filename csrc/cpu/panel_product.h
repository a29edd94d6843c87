// Rows times an fp32 panel of decoded weights; for kernel files, which are compiled once per
// instruction set. Sums of a row are ordered by k alone, whatever the number of rows.
#pragma once

#include "vec.h"

namespace fastinfer::cpu::FI_ISA {
namespace {

constexpr int64_t kPanelWidth = 64;  // features of a panel
constexpr int kPanelRows = 4;        // at once, at most

// For kRows rows of length n: add(i, at, sums) is given row i's products with the features from
// `at` on. Inlined, it would share its registers with the constants of decoding.
template <int kRows, int kPitch, class Add>
__attribute__((noinline)) void multiply_rows(const float (*x)[kPitch], const float* panel,
                                             int64_t n, const Add& add) {
  constexpr int kVectors = kPanelWidth / kLanes;
  constexpr int kPart = kRows <= 2 ? 4 : 2;  // vectors at once, as registers allow
  for (int first = 0; first < kVectors; first += kPart) {
    vf sum[kRows][kPart] = {};
    for (int64_t k = 0; k < n; ++k) {
      for (int j = 0; j < kPart; ++j) {
        const vf w = load(panel + k * kPanelWidth + (first + j) * kLanes);
        for (int i = 0; i < kRows; ++i) sum[i][j] += splat(x[i][k]) * w;
      }
    }
    for (int i = 0; i < kRows; ++i) {
      for (int j = 0; j < kPart; ++j) add(i, (first + j) * kLanes, sum[i][j]);
    }
  }
}

// For 1 to kPanelRows rows.
template <int kPitch, class Add>
void multiply_panel(int64_t rows, const float (*x)[kPitch], const float* panel, int64_t n,
                    const Add& add) {
  switch (rows) {
    case 1: return multiply_rows<1>(x, panel, n, add);
    case 2: return multiply_rows<2>(x, panel, n, add);
    case 3: return multiply_rows<3>(x, panel, n, add);
    default: return multiply_rows<kPanelRows>(x, panel, n, add);
  }
}

}  // namespace
}  // namespace fastinfer::cpu::FI_ISA
