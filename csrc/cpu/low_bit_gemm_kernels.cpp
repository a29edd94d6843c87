// Matrix products with weights of few bits; compiled once per instruction set.
//
// A tile of 64 features is decoded step by step along K into an fp32 panel [k][64] of q - zero,
// which then serves all rows of x. A segment ends where a packed tile or a group does, so that its
// sums get one scale. A row's sums are ordered by k alone: its bits do not depend on the rows that
// share its block, nor on the threads.
#include "low_bit_gemm_kernels.h"

#include "vec.h"

namespace fastinfer::cpu::FI_ISA {
namespace {

constexpr int64_t kTile = kGemmTile;
constexpr int kVectors = kTile / kLanes;  // of a row of the panel
constexpr int kBlockRows = 4;
constexpr int64_t kStep = 16;  // the unit along K of packing and of groups

// ---- elements of any type

template <class T>
void read_elements(const T* p, const int32_t* index, int64_t n, float* to) {
  if (index != nullptr) {
    for (int64_t i = 0; i < n; ++i) to[i] = to_float(p[index[i]]);
    return;
  }
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(to + i, load(p + i));
  for (; i < n; ++i) to[i] = to_float(p[i]);
}

// n elements from `offset` on, or those at offset + index[i], as fp32.
void read(const void* data, int type, int64_t offset, const int32_t* index, int64_t n, float* to) {
  switch (type) {
    case 0: return read_elements(static_cast<const float*>(data) + offset, index, n, to);
    case 1: return read_elements(static_cast<const bf16*>(data) + offset, index, n, to);
    default: return read_elements(static_cast<const fp16*>(data) + offset, index, n, to);
  }
}

template <class T>
void write_elements(T* p, const float* from, int64_t n) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(p + i, load(from + i));
  for (; i < n; ++i) from_float(from[i], p + i);
}

void write(void* data, int type, int64_t offset, const float* from, int64_t n) {
  switch (type) {
    case 0: return write_elements(static_cast<float*>(data) + offset, from, n);
    case 1: return write_elements(static_cast<bf16*>(data) + offset, from, n);
    default: return write_elements(static_cast<fp16*>(data) + offset, from, n);
  }
}

// ---- decoding

// Word `word` of the lanes column + 4 * i, i < 8: they hold 8 features in a row.
inline vi lanes_word(const int32_t* tile, int word, int column) {
  const int32_t* p = tile + word / 4 * 128 + column * 4 + word % 4;
#ifdef __AVX2__
  return bit_cast<vi>(_mm256_i32gather_epi32(p, _mm256_setr_epi32(0, 16, 32, 48, 64, 80, 96, 112),
                                             sizeof(int32_t)));
#else
  return vi{p[0], p[16], p[32], p[48], p[64], p[80], p[96], p[112]};
#endif
}

// The codes of a step of 16 features. A word holds those of one or more steps, or of 8 bits half of
// one's.
template <int kBits>
struct Codes {
  static constexpr int kStepsOfWord = kBits < 4 ? 4 / kBits : 1;
  static constexpr int kWordsOfStep = kBits == 8 ? 2 : 1;
  static constexpr int kCodesOfStep = 4 / kWordsOfStep;  // r in one word

  vi words[kWordsOfStep];
  int shift;

  Codes(const int32_t* tile, int row16, int step, int column) {
    const int word = (row16 * (4 / kStepsOfWord) + step / kStepsOfWord) * kWordsOfStep;
    for (int i = 0; i < kWordsOfStep; ++i) words[i] = lanes_word(tile, word + i, column);
    shift = kBits * 4 * (step % kStepsOfWord);
  }

  vi code(int r, int h) const {
    return words[r / kCodesOfStep] >> (shift + kBits * (r % kCodesOfStep) + 16 * h) &
           ((1 << kBits) - 1);
  }
};

// Of 3 bits: steps 0 to 2 have a word each, four fields in either half of it; the last step's four
// stand in what these words leave, the upper four bits of each half.
template <>
struct Codes<3> {
  vi word;

  Codes(const int32_t* tile, int row16, int step, int column) {
    const auto of = [&](int i) { return lanes_word(tile, 3 * row16 + i, column); };
    if (step < 3) {
      word = of(step);
    } else {
      const vi a = of(0), b = of(1), c = of(2);
      word = (a >> 12 & 0x00070007) | (b >> 9 & 0x00380038) | (c >> 6 & 0x01c001c0) |
             (a >> 6 & 0x02000200) | (b >> 5 & 0x04000400) | (c >> 4 & 0x08000800);
    }
  }

  vi code(int r, int h) const { return word >> (3 * r + 16 * h) & 7; }
};

// q - zero of the steps [begin, end) of a packed tile, to panel [(end - begin) * 16][64].
template <int kBits>
void decode(const int32_t* tile, int begin, int end, const float* zeros, float* panel) {
  for (int step = begin; step < end; ++step, panel += kStep * kTile) {
    for (int row16 = 0; row16 < 4; ++row16) {
      const vf zero[2] = {load(zeros + 16 * row16), load(zeros + 16 * row16 + 8)};
      for (int column = 0; column < 4; ++column) {
        const Codes<kBits> codes(tile, row16, step, column);
        for (int r = 0; r < 4; ++r) {
          for (int h = 0; h < 2; ++h) {
            const vf value = __builtin_convertvector(codes.code(r, h), vf) - zero[r % 2];
            const int64_t k = 8 * (r / 2) + 2 * column + h;
            store(panel + k * kTile + 16 * row16 + 8 * (r % 2), value);
          }
        }
      }
    }
  }
}

// ---- products

// total[i][:] += scale * (x[i] . panel) for kRows rows of length n.
template <int kRows>
void multiply_rows(const float (*x)[kTile], const float* panel, int64_t n, const float* scale,
                   float* total) {
  constexpr int kPart = kRows <= 2 ? 4 : 2;  // vectors at once, as registers allow
  for (int first = 0; first < kVectors; first += kPart) {
    vf sum[kRows][kPart] = {};
    for (int64_t k = 0; k < n; ++k) {
      for (int j = 0; j < kPart; ++j) {
        const vf w = load(panel + k * kTile + (first + j) * kLanes);
        for (int i = 0; i < kRows; ++i) sum[i][j] += splat(x[i][k]) * w;
      }
    }
    for (int i = 0; i < kRows; ++i) {
      for (int j = 0; j < kPart; ++j) {
        const int64_t at = (first + j) * kLanes;
        store(total + i * kTile + at, load(total + i * kTile + at) + load(scale + at) * sum[i][j]);
      }
    }
  }
}

void multiply(int64_t rows, const float (*x)[kTile], const float* panel, int64_t n,
              const float* scale, float* total) {
  switch (rows) {
    case 1: return multiply_rows<1>(x, panel, n, scale, total);
    case 2: return multiply_rows<2>(x, panel, n, scale, total);
    case 3: return multiply_rows<3>(x, panel, n, scale, total);
    default: return multiply_rows<kBlockRows>(x, panel, n, scale, total);
  }
}

template <int kBits>
void tile_of_features(const LowBitGemmArgs& args, int64_t tile, int64_t row_begin,
                      int64_t row_end) {
  const int64_t first = tile * kTile;
  const int64_t width = args.n - first < kTile ? args.n - first : kTile;
  const int64_t k_tiles = (args.k + kTile - 1) / kTile;
  const int32_t* packed = args.qweight + tile * k_tiles * kBits * 128;

  alignas(32) float panel[kTile * kTile];
  alignas(32) float scale[kTile] = {};
  alignas(32) float zero[kTile] = {};
  alignas(32) float bias[kTile] = {};
  alignas(32) float x[kBlockRows][kTile];
  alignas(32) float total[kGemmRowBlock * kTile];
  std::memset(total, 0, (row_end - row_begin) * kTile * sizeof(float));
  if (args.zeros == nullptr) {
    for (float& z : zero) z = static_cast<float>(1 << (kBits - 1));
  }

  int64_t group = -1;
  for (int64_t k = 0; k < args.k;) {
    if (k / args.group_size != group) {
      group = k / args.group_size;
      read(args.scales, args.scale_type, group * args.n + first, nullptr, width, scale);
      if (args.zeros != nullptr) {
        read(args.zeros, args.scale_type, group * args.n + first, nullptr, width, zero);
      }
    }
    int64_t end = (k / kTile + 1) * kTile;
    if (end > (group + 1) * args.group_size) end = (group + 1) * args.group_size;
    if (end > args.k) end = args.k;
    const int64_t length = end - k;
    const int step = static_cast<int>(k % kTile / kStep);
    decode<kBits>(packed + k / kTile * kBits * 128, step,
                  step + static_cast<int>((length + kStep - 1) / kStep), zero, panel);
    for (int64_t row = row_begin; row < row_end; row += kBlockRows) {
      const int64_t rows = row_end - row < kBlockRows ? row_end - row : kBlockRows;
      for (int64_t i = 0; i < rows; ++i) {
        const int64_t start = (row + i) * args.x_row_stride;
        if (args.perm != nullptr) {
          read(args.x, args.x_type, start, args.perm + k, length, x[i]);
        } else {
          read(args.x, args.x_type, start + k, nullptr, length, x[i]);
        }
      }
      multiply(rows, x, panel, length, scale, total + (row - row_begin) * kTile);
    }
    k = end;
  }

  if (args.bias != nullptr) read(args.bias, args.bias_type, first, nullptr, width, bias);
  for (int64_t row = row_begin; row < row_end; ++row) {
    float* sums = total + (row - row_begin) * kTile;
    for (int64_t i = 0; i < kTile; i += kLanes) store(sums + i, load(sums + i) + load(bias + i));
    write(args.out, args.x_type, row * args.out_row_stride + first, sums, width);
  }
}

}  // namespace

extern const LowBitGemmKernels low_bit_gemm_kernels = {
    tile_of_features<2>,
    tile_of_features<3>,
    tile_of_features<4>,
    tile_of_features<8>,
};

}  // namespace fastinfer::cpu::FI_ISA
