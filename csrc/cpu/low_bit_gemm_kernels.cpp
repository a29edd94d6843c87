// Matrix products with weights of few bits; compiled once per instruction set.
//
// A tile of 64 features is decoded step by step along K into an fp32 panel [k][64] of q - zero,
// which then serves all rows of x. A segment ends where a packed tile or a group does, so that its
// sums get one scale. A row's sums are ordered by k alone: its bits do not depend on the rows that
// share its block, nor on the threads.
#include "low_bit_gemm_kernels.h"

#include "epilogue_tile.h"
#include "panel_product.h"
#include "typed_elements.h"

namespace fastinfer::cpu::FI_ISA {
namespace {

constexpr int64_t kTile = kGemmTile;
static_assert(kTile == kPanelWidth && kTile == kResultTile);
constexpr int64_t kStep = 16;  // the unit along K of packing and of groups

// ---- decoding

// A packed tile by words: [word][column], each of the lanes column + 4 * i, i < 8, which hold 8
// features in a row.
template <int kBits>
using TileWords = vi[4 * kBits][4];

// The four words of each of those lanes' load.
inline void lanes_words(const int32_t* load, vi* words, int64_t stride) {
#ifdef __AVX2__
  __m256i pair[4];  // lanes i and i + 4
  for (int i = 0; i < 4; ++i) {
    const __m128i low = _mm_loadu_si128(reinterpret_cast<const __m128i*>(load + 16 * i));
    const __m128i high = _mm_loadu_si128(reinterpret_cast<const __m128i*>(load + 16 * (i + 4)));
    pair[i] = _mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1);
  }
  const __m256i low01 = _mm256_unpacklo_epi32(pair[0], pair[1]);
  const __m256i low23 = _mm256_unpacklo_epi32(pair[2], pair[3]);
  const __m256i high01 = _mm256_unpackhi_epi32(pair[0], pair[1]);
  const __m256i high23 = _mm256_unpackhi_epi32(pair[2], pair[3]);
  words[0 * stride] = bit_cast<vi>(_mm256_unpacklo_epi64(low01, low23));
  words[1 * stride] = bit_cast<vi>(_mm256_unpackhi_epi64(low01, low23));
  words[2 * stride] = bit_cast<vi>(_mm256_unpacklo_epi64(high01, high23));
  words[3 * stride] = bit_cast<vi>(_mm256_unpackhi_epi64(high01, high23));
#else
  for (int word = 0; word < 4; ++word) {
    for (int i = 0; i < kLanes; ++i) words[word * stride][i] = load[16 * i + word];
  }
#endif
}

template <int kBits>
void arrange(const int32_t* tile, TileWords<kBits>& words) {
  for (int load = 0; load < kBits; ++load) {
    for (int column = 0; column < 4; ++column) {
      lanes_words(tile + load * 128 + column * 4, &words[4 * load][column], 4);
    }
  }
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

  Codes(const vi (*tile)[4], int row16, int step, int column) {
    const int word = (row16 * (4 / kStepsOfWord) + step / kStepsOfWord) * kWordsOfStep;
    for (int i = 0; i < kWordsOfStep; ++i) words[i] = tile[word + i][column];
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

  Codes(const vi (*tile)[4], int row16, int step, int column) {
    const vi a = tile[3 * row16][column], b = tile[3 * row16 + 1][column],
             c = tile[3 * row16 + 2][column];
    word = step == 0   ? a
           : step == 1 ? b
           : step == 2 ? c
                       : (a >> 12 & 0x00070007) | (b >> 9 & 0x00380038) | (c >> 6 & 0x01c001c0) |
                             (a >> 6 & 0x02000200) | (b >> 5 & 0x04000400) | (c >> 4 & 0x08000800);
  }

  vi code(int r, int h) const { return word >> (3 * r + 16 * h) & 7; }
};

// q - zero of the steps [begin, end) of a packed tile, to panel [(end - begin) * 16][64].
template <int kBits>
void decode(const TileWords<kBits>& tile, int begin, int end, const float* zeros, float* panel) {
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

// total[i][:] += scale * (x[i] . panel) for rows of length n.
void multiply(int64_t rows, const float (*x)[kTile], const float* panel, int64_t n,
              const float* scale, float* total) {
  multiply_panel(rows, x, panel, n, [&](int i, int64_t at, vf sum) {
    float* to = total + i * kTile + at;
    store(to, load(to) + load(scale + at) * sum);
  });
}

// y += x times the outliers of features [first, first + width), some entries of a feature at a
// time.
void add_outliers(const LowBitGemmArgs& args, int64_t first, int64_t width, int64_t row_begin,
                  int64_t row_end, float* y) {
  constexpr int64_t kEntries = 64;
  for (int64_t i = 0; i < width; ++i) {
    const int64_t last = args.outlier_offsets[first + i + 1];
    for (int64_t entry = args.outlier_offsets[first + i]; entry < last; entry += kEntries) {
      const int64_t count = last - entry < kEntries ? last - entry : kEntries;
      int32_t column[kEntries];
      alignas(32) float value[kEntries] = {};
      alignas(32) float x[kEntries] = {};
      for (int64_t j = 0; j < count; ++j) {
        const int32_t of_weight = args.outlier_columns[entry + j];
        column[j] = args.perm == nullptr ? of_weight : args.perm[of_weight];
      }
      read(args.outlier_values, args.outlier_type, entry, nullptr, count, value);
      for (int64_t row = row_begin; row < row_end; ++row) {
        read(args.x, args.x_type, row * args.x_row_stride, column, count, x);
        vf product = {};
        for (int64_t j = 0; j < count; j += kLanes) product += load(x + j) * load(value + j);
        y[(row - row_begin) * kTile + i] += sum(product);
      }
    }
  }
}

// y [rows, 64] of a tile of features, anything where there are none.
template <int kBits>
void product(const LowBitGemmArgs& args, int64_t tile, int64_t row_begin, int64_t row_end,
             float* y) {
  const int64_t first = tile * kTile;
  const int64_t width = args.n - first < kTile ? args.n - first : kTile;
  const int64_t k_tiles = (args.k + kTile - 1) / kTile;
  const int32_t* packed = args.qweight + tile * k_tiles * kBits * 128;

  TileWords<kBits> words;
  alignas(32) float panel[kTile * kTile];
  alignas(32) float scale[kTile] = {};
  alignas(32) float zero[kTile] = {};
  alignas(32) float bias[kTile] = {};
  alignas(32) float x[kPanelRows][kTile];
  std::memset(y, 0, (row_end - row_begin) * kTile * sizeof(float));
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
    if (step == 0) arrange<kBits>(packed + k / kTile * kBits * 128, words);
    decode<kBits>(words, step, step + static_cast<int>((length + kStep - 1) / kStep), zero, panel);
    for (int64_t row = row_begin; row < row_end; row += kPanelRows) {
      const int64_t rows = row_end - row < kPanelRows ? row_end - row : kPanelRows;
      for (int64_t i = 0; i < rows; ++i) {
        const int64_t start = (row + i) * args.x_row_stride;
        if (args.perm != nullptr) {
          read(args.x, args.x_type, start, args.perm + k, length, x[i]);
        } else {
          read(args.x, args.x_type, start + k, nullptr, length, x[i]);
        }
      }
      multiply(rows, x, panel, length, scale, y + (row - row_begin) * kTile);
    }
    k = end;
  }

  if (args.outlier_offsets != nullptr) add_outliers(args, first, width, row_begin, row_end, y);
  if (args.bias != nullptr) read(args.bias, args.bias_type, first, nullptr, width, bias);
  for (int64_t row = row_begin; row < row_end; ++row) {
    float* sums = y + (row - row_begin) * kTile;
    for (int64_t i = 0; i < kTile; i += kLanes) store(sums + i, load(sums + i) + load(bias + i));
  }
}

template <int kBits>
void tile_of_result(const LowBitGemmArgs& args, int64_t tile, int64_t row_begin, int64_t row_end) {
  finish_tile<kGemmRowBlock>(
      args.epilogue, args.n, tile, row_begin, row_end,
      [&](int64_t features, float* y) { product<kBits>(args, features, row_begin, row_end, y); });
}

}  // namespace

extern const LowBitGemmKernels low_bit_gemm_kernels = {
    tile_of_result<2>,
    tile_of_result<3>,
    tile_of_result<4>,
    tile_of_result<8>,
};

}  // namespace fastinfer::cpu::FI_ISA
