// The inner loops of attention: packing of keys and values, and the two matrix products on packed
// panels.
//
// A panel holds 16 keys transposed ([head_dim][16]) or 16 columns of values ([keys][16]), in fp32.
// A score is a sum over head_dim, and an output column a sum over keys, in chains of kChain fused
// multiply-adds whose ends are added up (so that the error does not grow with the length). Chains
// begin at multiples of kChain and never depend on the shape of the register block, so a row's
// bits do not depend on the rows that share its tile.
#pragma once

#include "attention_kernels.h"
#include "vec.h"

namespace fastinfer::cpu::FI_ISA {

constexpr int kPanel = 16;
constexpr int kMaxBlockRows = 6;
constexpr int64_t kChain = 64;
// Value panels lie this far apart: one line more than a power of two, so that they do not compete
// for the same cache sets.
constexpr int64_t kValuePanelStride = (kChain + 1) * kPanel;

struct int8 {
  int8_t value;
};
struct fp8 {
  uint8_t bits;
};

// Eight bytes, with and without sign. (GCC 12 takes the portable form apart, byte by byte.)
inline vi load_bytes(const int8_t* p) {
#ifdef __AVX2__
  return bit_cast<vi>(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
#else
  typedef int8_t bytes __attribute__((vector_size(8)));
  bytes b;
  std::memcpy(&b, p, sizeof(b));
  return __builtin_convertvector(b, vi);
#endif
}
inline vi load_bytes(const uint8_t* p) {
#ifdef __AVX2__
  return bit_cast<vi>(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
#else
  typedef uint8_t bytes __attribute__((vector_size(8)));
  bytes b;
  std::memcpy(&b, p, sizeof(b));
  return __builtin_convertvector(b, vi);
#endif
}

inline vf load(const int8* p) {
  return __builtin_convertvector(load_bytes(&p->value), vf);
}
inline vf load(const fp8* p) {
  return decode_e4m3(load_bytes(&p->bits));
}
inline float to_float(int8 x) {
  return static_cast<float>(x.value);
}
inline float to_float(fp8 x) {
  return decode_e4m3(vi{} + x.bits)[0];
}

inline vf larger(vf a, vf b) {
  return a > b ? a : b;
}  // b if either is NaN

// e^x for x <= 0: exactly 1 at 0, and 0 below -87.7; NaN stays NaN. As 2^(x / ln 2), whose rounding
// is harmless since weights of far smaller scores hardly count.
inline vf exp_nonpositive(vf x) {
  const vf magic =
      splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer held in the low bits
  x = larger(splat(-127.0f), x * splat(1.44269504088896341f));
  const vf shifted = x + magic;
  const vf r = x - (shifted - magic);
  vf p = splat(1.53533620e-4f);
  p = p * r + splat(1.33988750e-3f);
  p = p * r + splat(9.61843692e-3f);
  p = p * r + splat(5.55033237e-2f);
  p = p * r + splat(2.40226477e-1f);
  p = p * r + splat(6.93147182e-1f);
  p = p * r + splat(1.0f);
  // The exponent field of 2^-127 is 0, which stands for 0.
  const vi exponent = (bit_cast<vi>(shifted) - (0x4b400000 - 127)) << 23;
  return p * bit_cast<vf>(exponent);
}

#if defined(__clang__)
#define FI_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define FI_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (vi{__VA_ARGS__}))
#endif

// Reductions by halves.
inline float reduce_larger(vf x) {
  x = larger(x, FI_SHUFFLE(x, x, 4, 5, 6, 7, 0, 1, 2, 3));
  x = larger(x, FI_SHUFFLE(x, x, 2, 3, 0, 1, 6, 7, 4, 5));
  return larger(x, FI_SHUFFLE(x, x, 1, 0, 3, 2, 5, 4, 7, 6))[0];
}
inline float reduce_sum(vf x) {
  x = x + FI_SHUFFLE(x, x, 4, 5, 6, 7, 0, 1, 2, 3);
  x = x + FI_SHUFFLE(x, x, 2, 3, 0, 1, 6, 7, 4, 5);
  return x[0] + x[1];
}

// ---- packing

// Where the keys of a tile (or their values) are, and their scales.
struct TileRows {
  const char* data[kKeyTile];
  float scale[kKeyTile];
};

alignas(64) constexpr float kZeroRow[512] = {};

// Asks for rows that are needed soon, a few lines at a time between other work, so that memory is
// never idle and never asked for more than it can have in flight.
struct Prefetch {
  const TileRows& rows;
  int64_t row;
  int64_t last;
  int64_t bytes;  // of a row
  int64_t lines;  // for each call
  int64_t offset = 0;

  Prefetch(const TileRows& rows, int64_t first, int64_t last, int64_t bytes, int64_t calls)
      : rows(rows), row(first), last(last), bytes(bytes) {
    const int64_t all = first < last ? (last - first) * (bytes / kLine + 1) : 0;
    lines = all / calls + 1;
  }

  void advance() {
    for (int64_t i = 0; i < lines && row < last; ++i) {
      __builtin_prefetch(rows.data[row] + offset, 0, 2);
      offset += kLine;
      if (offset >= bytes) {
        offset = 0;
        ++row;
      }
    }
  }

  static constexpr int64_t kLine = 64;
};

// x[i][j] <-> x[j][i]
inline void transpose(vf (&x)[8]) {
  vf a[8], b[8];
  for (int i = 0; i < 8; i += 2) {
    a[i] = FI_SHUFFLE(x[i], x[i + 1], 0, 8, 1, 9, 4, 12, 5, 13);
    a[i + 1] = FI_SHUFFLE(x[i], x[i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
  }
  for (int i = 0; i < 8; i += 4) {
    b[i] = FI_SHUFFLE(a[i], a[i + 2], 0, 1, 8, 9, 4, 5, 12, 13);
    b[i + 1] = FI_SHUFFLE(a[i], a[i + 2], 2, 3, 10, 11, 6, 7, 14, 15);
    b[i + 2] = FI_SHUFFLE(a[i + 1], a[i + 3], 0, 1, 8, 9, 4, 5, 12, 13);
    b[i + 3] = FI_SHUFFLE(a[i + 1], a[i + 3], 2, 3, 10, 11, 6, 7, 14, 15);
  }
  for (int i = 0; i < 4; ++i) {
    x[i] = FI_SHUFFLE(b[i], b[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
    x[i + 4] = FI_SHUFFLE(b[i], b[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
  }
}

// Keys [first, last) of a tile, both multiples of 16, into panels [head_dim][16]; panel 0 begins
// with key `first`.
template <class T, bool kScaled>
void pack_keys(const TileRows& rows, int64_t first, int64_t last, int64_t head_dim, float* panels,
               Prefetch* prefetch) {
  for (int64_t key = first; key < last; key += kLanes) {
    prefetch->advance();
    float* panel = panels + (key - first) / kPanel * kPanel * head_dim + key % kPanel;
    const T* row[kLanes];
    for (int i = 0; i < kLanes; ++i) row[i] = reinterpret_cast<const T*>(rows.data[key + i]);
    vf x[kLanes];
    int64_t d = 0;
    for (; d + kLanes <= head_dim; d += kLanes) {
      for (int i = 0; i < kLanes; ++i) {
        x[i] = load(row[i] + d);
        if (kScaled) x[i] = x[i] * splat(rows.scale[key + i]);
      }
      transpose(x);
      for (int i = 0; i < kLanes; ++i) store(panel + (d + i) * kPanel, x[i]);
    }
    for (; d < head_dim; ++d) {
      for (int i = 0; i < kLanes; ++i) {
        panel[d * kPanel + i] =
            kScaled ? to_float(row[i][d]) * rows.scale[key + i] : to_float(row[i][d]);
      }
    }
  }
}

// Values of keys [first, last) of a tile into panels [keys][16] that begin with key `first`;
// columns beyond value_dim become 0.
template <class T, bool kScaled>
void pack_values(const TileRows& rows, int64_t first, int64_t last, int64_t value_dim,
                 float* panels, Prefetch* prefetch) {
  for (int64_t key = first; key < last; ++key) {
    if (key % kLanes == 0) prefetch->advance();
    const T* row = reinterpret_cast<const T*>(rows.data[key]);
    const vf scale = splat(kScaled ? rows.scale[key] : 1.0f);
    float* to = panels + (key - first) * kPanel;
    for (int64_t c = 0; c < value_dim; c += kPanel, to += kValuePanelStride) {
      vf a, b;
      if (c + kPanel <= value_dim) {
        a = load(row + c);
        b = load(row + c + kLanes);
      } else {
        const int64_t rest = value_dim - c;
        a = load_partial(row + c, rest < kLanes ? rest : kLanes);
        b = load_partial(row + c + kLanes, rest - kLanes);
      }
      store(to, kScaled ? a * scale : a);
      store(to + kLanes, kScaled ? b * scale : b);
    }
  }
}

using PackFunction = void (*)(const TileRows& rows, int64_t first, int64_t last, int64_t dim,
                              float* panels, Prefetch* prefetch);

// Indexed by ElementFormat.
constexpr PackFunction kPackKeys[kNumFormats] = {pack_keys<float, false>, pack_keys<bf16, false>,
                                                 pack_keys<fp16, false>, pack_keys<int8, true>,
                                                 pack_keys<fp8, true>};
constexpr PackFunction kPackValues[kNumFormats] = {
    pack_values<float, false>, pack_values<bf16, false>, pack_values<fp16, false>,
    pack_values<int8, true>, pack_values<fp8, true>};

// ---- products

// scores[r][j] = sum_d q[r][d] * key_j[d] for `kRows` rows and kVectors * 8 keys of adjacent
// panels.
template <int kRows, int kVectors>
void score_block(const float* q, int64_t q_stride, const float* panels, int64_t head_dim,
                 float* scores) {
  for (int64_t begin = 0; begin < head_dim; begin += kChain) {
    const int64_t end = head_dim - begin < kChain ? head_dim : begin + kChain;
    vf acc[kRows][kVectors] = {};
    for (int64_t d = begin; d < end; ++d) {
      vf key[kVectors];
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        key[v] = load(panels + v / 2 * (kPanel * head_dim) + d * kPanel + v % 2 * kLanes);
      }
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const vf x = splat(q[r * q_stride + d]);
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) acc[r][v] = acc[r][v] + x * key[v];
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        float* to = scores + r * kKeyTile + v * kLanes;
        store(to, begin == 0 ? acc[r][v] : load(to) + acc[r][v]);
      }
    }
  }
}

// sums[r][c] += sum_j weights[r][j] * values[j][c] for `count` <= kChain keys and kVectors * 8
// columns of adjacent panels.
template <int kRows, int kVectors>
void value_block(const float* weights, const float* panels, int64_t count, float* sums,
                 int64_t sums_stride) {
  vf acc[kRows][kVectors] = {};
  for (int64_t j = 0; j < count; ++j) {
    vf value[kVectors];
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      value[v] = load(panels + v / 2 * kValuePanelStride + j * kPanel + v % 2 * kLanes);
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const vf x = splat(weights[r * kKeyTile + j]);
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) acc[r][v] = acc[r][v] + x * value[v];
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      float* to = sums + r * sums_stride + v * kLanes;
      store(to, load(to) + acc[r][v]);
    }
  }
}

using ScoreFunction = void (*)(const float* q, int64_t q_stride, const float* panels,
                               int64_t head_dim, float* scores);
using ValueFunction = void (*)(const float* weights, const float* panels, int64_t count,
                               float* sums, int64_t sums_stride);

// For 1 to kMaxBlockRows rows: one panel at a time, and several where few rows leave registers free
// to hide the adder's latency.
struct BlockFunctions {
  ScoreFunction score_one, score_wide;
  ValueFunction value_one, value_wide;
  int wide_panels;
};
constexpr BlockFunctions kBlocks[kMaxBlockRows] = {
    {score_block<1, 2>, score_block<1, 4>, value_block<1, 2>, value_block<1, 4>, 2},
    {score_block<2, 2>, score_block<2, 4>, value_block<2, 2>, value_block<2, 4>, 2},
    {score_block<3, 2>, score_block<3, 4>, value_block<3, 2>, value_block<3, 4>, 2},
    {score_block<4, 2>, score_block<4, 2>, value_block<4, 2>, value_block<4, 2>, 1},
    {score_block<5, 2>, score_block<5, 2>, value_block<5, 2>, value_block<5, 2>, 1},
    {score_block<6, 2>, score_block<6, 2>, value_block<6, 2>, value_block<6, 2>, 1},
};

}  // namespace fastinfer::cpu::FI_ISA
