// From products of tiles of features to results; for kernel files, which are compiled once per
// instruction set. A row's bits do not depend on the rows that share its block.
#pragma once

#include "activation_functions.h"
#include "epilogue_args.h"
#include "quantize_row.h"
#include "typed_elements.h"

namespace fastinfer::cpu::FI_ISA {
namespace {

constexpr int64_t kResultTile = 64;  // features of a product, and columns of a result

template <class Act>
void apply(float* y) {
  for (int64_t i = 0; i < kResultTile; i += kLanes) store(y + i, Act::apply(load(y + i)));
}

// Columns [first, first + width) of a row of results, of y [64] or of y as the gate of up [64]. y
// is overwritten.
void finish_row(const EpilogueArgs& args, int64_t row, int64_t first, int64_t width, float* y,
                const float* up) {
  switch (args.activation) {
    case Activation::kNone: break;
    case Activation::kSilu: apply<Silu>(y); break;
    case Activation::kGelu: apply<GeluErf>(y); break;
    case Activation::kGeluTanh: apply<GeluTanh>(y); break;
  }
  if (up != nullptr) {
    for (int64_t i = 0; i < kResultTile; i += kLanes) store(y + i, load(y + i) * load(up + i));
  }
  if (args.residual != nullptr) {
    alignas(32) float residual[kResultTile] = {};
    read(args.residual, args.residual_type, row * args.residual_row_stride + first, nullptr, width,
         residual);
    for (int64_t i = 0; i < kResultTile; i += kLanes) {
      store(y + i, load(y + i) + load(residual + i));
    }
  }
  const int64_t at = row * args.out_row_stride + first;
  if (args.out_type == kInt8Result) {
    quantize_row<Int8>(y, width, *args.out_scale, static_cast<uint8_t*>(args.out) + at);
  } else if (args.out_type == kFp8Result) {
    quantize_row<Fp8>(y, width, *args.out_scale, static_cast<uint8_t*>(args.out) + at);
  } else {
    write(args.out, args.out_type, at, y, width);
  }
}

// What the tile's columns are multiplied with: features from width + 64 * tile on, which need not
// begin where a tile of features does.
template <int64_t kRows, class Product>
void up_of_tile(int64_t n, int64_t begin, int64_t rows, const Product& product, float* up) {
  const int64_t tile = begin / kResultTile, shift = begin % kResultTile;
  if (shift == 0) return product(tile, up);
  alignas(32) float part[kRows * kResultTile];
  product(tile, part);
  for (int64_t i = 0; i < rows * kResultTile; i += kResultTile) {
    std::memcpy(up + i, part + i + shift, (kResultTile - shift) * sizeof(float));
  }
  const bool another = (tile + 1) * kResultTile < n;
  if (another) product(tile + 1, part);
  for (int64_t i = 0; i < rows * kResultTile; i += kResultTile) {
    float* rest = up + i + kResultTile - shift;
    if (another) {
      std::memcpy(rest, part + i, shift * sizeof(float));
    } else {
      std::memset(rest, 0, shift * sizeof(float));
    }
  }
}

// Columns [64 * tile, 64 * tile + 64) of rows [row_begin, row_end) of the results, at most kRows of
// them. `product(i, y)` gives y [rows, 64] of features [64 * i, 64 * i + 64) of n, bias included.
template <int64_t kRows, class Product>
void finish_tile(const EpilogueArgs& args, int64_t n, int64_t tile, int64_t row_begin,
                 int64_t row_end, const Product& product) {
  const int64_t first = tile * kResultTile, rows = row_end - row_begin;
  const int64_t width = args.width - first < kResultTile ? args.width - first : kResultTile;
  alignas(32) float y[kRows * kResultTile];
  alignas(32) float up[kRows * kResultTile];
  product(tile, y);
  if (args.gated) up_of_tile<kRows>(n, args.width + first, rows, product, up);
  for (int64_t i = 0; i < rows; ++i) {
    const float* factor = args.gated ? up + i * kResultTile : nullptr;
    finish_row(args, row_begin + i, first, width, y + i * kResultTile, factor);
  }
}

}  // namespace
}  // namespace fastinfer::cpu::FI_ISA
