// CPU: quantize_fp8, quantize_int8, quantize_int8_asymmetric.
#include "../checks/quantize.h"

#include <torch/csrc/stable/library.h>

#include <mutex>
#include <tuple>

#include "../functional.h"
#include "../portable/portable.h"
#include "elements.h"
#include "parallel.h"
#include "quantize_kernels.h"

namespace fastinfer::cpu {
namespace {

// A block of the grid, cut into pieces: columns of a row, few enough to stay in the nearest cache.
struct Block {
  static constexpr int64_t kPiece = 4096;

  int64_t grid_row;
  int64_t grid_column;
  int64_t row;
  int64_t rows;
  int64_t column;
  int64_t columns;

  int64_t pieces_of_row() const { return (columns + kPiece - 1) / kPiece; }
  int64_t pieces() const { return rows * pieces_of_row(); }
};

void include(Magnitudes part, Magnitudes* whole) {
  whole->high = std::max(whole->high, part.high);
  whole->low = std::max(whole->low, part.low);
}

class Quantizer {
 public:
  Quantizer(const QuantizeProblem& p, const QuantizeFormat& format)
      : p_(p),
        magnitudes_(format.magnitudes[element_index(p.dtype)]),
        coding_(format.coding),
        encode_(format.encode[element_index(p.dtype)]) {}

  void run() const {
    // Threads share the pieces of a block if there are fewer blocks than threads, and else the
    // blocks.
    const int64_t blocks = p_.grid.count();
    if (blocks < static_cast<int64_t>(torch::stable::get_num_threads())) {
      for (int64_t i = 0; i < blocks; ++i) {
        const Block block = block_at(i);
        quantize(block, [&](const auto& f) {
          parallel_for(block.pieces(), std::min(block.columns, Block::kPiece), f);
        });
      }
      return;
    }
    parallel_for(blocks, p_.grid.block_rows * p_.grid.block_columns,
                 [&](int64_t begin, int64_t end) {
                   for (int64_t i = begin; i < end; ++i) {
                     const Block block = block_at(i);
                     quantize(block, [&](const auto& f) { f(int64_t{0}, block.pieces()); });
                   }
                 });
  }

 private:
  Block block_at(int64_t index) const {
    const BlockGrid& grid = p_.grid;
    Block b{index / grid.columns, index % grid.columns};
    b.row = b.grid_row * grid.block_rows;
    b.rows = std::min(grid.block_rows, p_.x_rows.count - b.row);
    b.column = b.grid_column * grid.block_columns;
    b.columns = std::min(grid.block_columns, p_.columns - b.column);
    return b;
  }

  // f(row, column, size) for some pieces of a block.
  template <class F>
  static void walk(const Block& b, int64_t begin, int64_t end, const F& f) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t first = i % b.pieces_of_row() * Block::kPiece;
      f(b.row + i / b.pieces_of_row(), b.column + first,
        std::min(Block::kPiece, b.columns - first));
    }
  }

  const void* x_at(int64_t row, int64_t column) const {
    const int64_t size = element_size(p_.dtype);
    return static_cast<const char*>(p_.x) + (p_.x_rows.offset(row) + column) * size;
  }

  // `for_pieces(f)` calls f(begin, end) until all pieces were had, on one thread or on several.
  template <class ForPieces>
  void quantize(const Block& b, const ForPieces& for_pieces) const {
    const Coding coding = p_.given.data != nullptr
                              ? Coding{p_.given.at(b.grid_row, b.grid_column), 0}
                              : coding_(magnitudes(b, for_pieces));
    p_.scale.at(b.grid_row, b.grid_column) = coding.scale;
    if (p_.zero_point.data != nullptr) {
      p_.zero_point.at(b.grid_row, b.grid_column) = coding.zero_point;
    }
    for_pieces([&](int64_t begin, int64_t end) {
      walk(b, begin, end, [&](int64_t row, int64_t column, int64_t size) {
        encode_(x_at(row, column), size, coding, p_.out + p_.out_rows.offset(row) + column);
      });
    });
  }

  template <class ForPieces>
  Magnitudes magnitudes(const Block& b, const ForPieces& for_pieces) const {
    Magnitudes result;
    std::mutex guard;
    for_pieces([&](int64_t begin, int64_t end) {
      Magnitudes part;
      walk(b, begin, end, [&](int64_t row, int64_t column, int64_t size) {
        include(magnitudes_(x_at(row, column), size), &part);
      });
      const std::lock_guard lock(guard);
      include(part, &result);
    });
    return result;
  }

  const QuantizeProblem& p_;
  Magnitudes (*magnitudes_)(const void* x, int64_t n);
  Coding (*coding_)(Magnitudes block);
  void (*encode_)(const void* x, int64_t n, Coding coding, uint8_t* out);
};

void quantize_fp8_out(const Tensor& x, const std::optional<Tensor>& scale,
                      const std::vector<int64_t>& block, const Tensor& out,
                      const Tensor& out_scale) {
  const QuantizeProblem p = check_quantize_fp8(x, scale, block, out, out_scale);
  Quantizer(p, quantize_kernels().fp8).run();
}

void quantize_int8_out(const Tensor& x, const std::optional<Tensor>& scale,
                       const std::vector<int64_t>& block, const Tensor& out,
                       const Tensor& out_scale) {
  const QuantizeProblem p = check_quantize_int8(x, scale, block, out, out_scale);
  Quantizer(p, quantize_kernels().int8).run();
}

void quantize_int8_asymmetric_out(const Tensor& x, const Tensor& out, const Tensor& out_scale,
                                  const Tensor& out_zero_point) {
  const QuantizeProblem p = check_quantize_int8_asymmetric(x, out, out_scale, out_zero_point);
  Quantizer(p, quantize_kernels().int8_asymmetric).run();
}

}  // namespace
}  // namespace fastinfer::cpu

STABLE_TORCH_LIBRARY_IMPL(fastinfer, CPU, m) {
  if (fastinfer::portable_forced_on_cpu()) return;
  using namespace fastinfer::cpu;
  namespace functional = fastinfer::functional;
  m.impl("quantize_fp8", TORCH_BOX(&functional::quantize_fp8<&quantize_fp8_out>));
  m.impl("quantize_fp8.out", TORCH_BOX(&quantize_fp8_out));
  m.impl("quantize_int8", TORCH_BOX(&functional::quantize_int8<&quantize_int8_out>));
  m.impl("quantize_int8.out", TORCH_BOX(&quantize_int8_out));
  m.impl("quantize_int8_asymmetric",
         TORCH_BOX(&functional::quantize_int8_asymmetric<&quantize_int8_asymmetric_out>));
  m.impl("quantize_int8_asymmetric.out", TORCH_BOX(&quantize_int8_asymmetric_out));
}
