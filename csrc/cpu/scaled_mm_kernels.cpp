// Scaled products of 8-bit matrices; compiled once per instruction set.
//
// A tile of 64 features is decoded 128 inputs at a time into an fp32 panel [k][64], which then
// serves all rows of a. Such a panel's sums of int8 products are integers below 2^22, exact in
// fp32; they are added up as integers. A row's sums are ordered by k alone: its bits do not depend
// on the rows that share its block, nor on the threads.
#include "scaled_mm_kernels.h"

#include "epilogue_tile.h"
#include "panel_product.h"
#include "typed_elements.h"

namespace fastinfer::cpu::FI_ISA {
namespace {

constexpr int64_t kTile = kMmTile;
static_assert(kTile == kPanelWidth && kTile == kResultTile);

typedef int64_t vl __attribute__((vector_size(64)));

// ---- decoding

// The values of kLanes codes.
template <bool kFp8>
vf values(const uint8_t* p) {
#ifdef __AVX2__
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
  if constexpr (kFp8) {
    return decode_e4m3(bit_cast<vi>(_mm256_cvtepu8_epi32(bytes)));
  } else {
    return bit_cast<vf>(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)));
  }
#else
  vi codes;
  for (int i = 0; i < kLanes; ++i) codes[i] = kFp8 ? p[i] : static_cast<int8_t>(p[i]);
  if constexpr (kFp8) return decode_e4m3(codes);
  return __builtin_convertvector(codes, vf);
#endif
}

// The values of n codes, and zeros up to a multiple of kLanes.
template <bool kFp8>
void decode_row(const uint8_t* p, int64_t n, float* to) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(to + i, values<kFp8>(p + i));
  if (i < n) {
    uint8_t rest[kLanes] = {};
    std::memcpy(rest, p + i, n - i);
    store(to + i, values<kFp8>(rest));
  }
}

// to[k][i] = rows[i][k], 8 x 8 bytes.
void transpose(const uint8_t (&rows)[kLanes][kLanes], uint8_t (&to)[kLanes][kLanes]) {
#ifdef __AVX2__
  __m128i pairs[4];
  for (int i = 0; i < 4; ++i) {
    pairs[i] =
        _mm_unpacklo_epi8(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(rows[2 * i])),
                          _mm_loadl_epi64(reinterpret_cast<const __m128i*>(rows[2 * i + 1])));
  }
  const __m128i first_low = _mm_unpacklo_epi16(pairs[0], pairs[1]);  // k < 4 of rows 0 to 3
  const __m128i first_high = _mm_unpackhi_epi16(pairs[0], pairs[1]);
  const __m128i last_low = _mm_unpacklo_epi16(pairs[2], pairs[3]);
  const __m128i last_high = _mm_unpackhi_epi16(pairs[2], pairs[3]);
  __m128i* out = reinterpret_cast<__m128i*>(to);
  _mm_storeu_si128(out, _mm_unpacklo_epi32(first_low, last_low));
  _mm_storeu_si128(out + 1, _mm_unpackhi_epi32(first_low, last_low));
  _mm_storeu_si128(out + 2, _mm_unpacklo_epi32(first_high, last_high));
  _mm_storeu_si128(out + 3, _mm_unpackhi_epi32(first_high, last_high));
#else
  for (int i = 0; i < kLanes; ++i) {
    for (int k = 0; k < kLanes; ++k) to[k][i] = rows[i][k];
  }
#endif
}

// Inputs [0, n) of `width` features from b on, to panel [n, rounded up][64]; zeros beyond them.
template <bool kFp8>
void decode_panel(const uint8_t* b, int64_t stride, int64_t width, int64_t n, float* panel) {
  for (int64_t feature = 0; feature < kTile; feature += kLanes) {
    for (int64_t k = 0; k < n; k += kLanes) {
      uint8_t rows[kLanes][kLanes] = {}, columns[kLanes][kLanes];
      for (int64_t i = 0; i < kLanes && feature + i < width; ++i) {
        const uint8_t* from = b + (feature + i) * stride + k;
        if (n - k >= kLanes) {
          std::memcpy(rows[i], from, kLanes);
        } else {
          std::memcpy(rows[i], from, n - k);
        }
      }
      transpose(rows, columns);
      for (int i = 0; i < kLanes; ++i) {
        store(panel + (k + i) * kTile + feature, values<kFp8>(columns[i]));
      }
    }
  }
}

// ---- products

// Sums of a panel join those of the others: scaled, or as integers.
void add(vf sum, vf scale, float row_scale, float* total) {
  store(total, load(total) + sum * splat(row_scale) * scale);
}
void add(vf sum, vf, float, int64_t* total) {
  vl all;
  std::memcpy(&all, total, sizeof(all));
  all += __builtin_convertvector(__builtin_convertvector(sum, vi), vl);
  std::memcpy(total, &all, sizeof(all));
}

// total[i][:] += a[i] . panel for rows of length n.
template <class Total>
void multiply(int64_t rows, const float (*a)[kMmBlock], const float* panel, int64_t n,
              const float* scale, const float* row_scale, Total* total) {
  multiply_panel(rows, a, panel, n, [&](int i, int64_t at, vf sum) {
    add(sum, load(scale + at), row_scale[i], total + i * kTile + at);
  });
}

// sums[i] += the sum of the panel's column i.
void add_columns(const float* panel, int64_t n, int64_t* sums) {
  for (int64_t i = 0; i < kTile; i += kLanes) {
    vf sum = {};
    for (int64_t k = 0; k < n; ++k) sum += load(panel + k * kTile + i);
    add(sum, sum, 0.0f, sums + i);
  }
}

float scale_of(const MmScaleArgs& scales, int64_t row, int64_t k) {
  return scales
      .data[row / scales.block_rows * scales.row_stride + k / kMmBlock * scales.block_stride];
}

// ---- a tile

// The sums of a row as fp32: what the panels made, or the integers less a zero point's share.
void finish(const float* total, const int64_t*, int64_t, float* sums) {
  std::memcpy(sums, total, kTile * sizeof(float));
}
void finish(const int64_t* total, const int64_t* columns, int64_t zero, float* sums) {
  for (int64_t i = 0; i < kTile; ++i) sums[i] = static_cast<float>(total[i] - zero * columns[i]);
}

// y [rows, 64] of a tile of features, anything where there are none.
template <bool kFp8, class Total>
void product(const ScaledMmArgs& args, int64_t tile, int64_t row_begin, int64_t row_end, float* y) {
  const int64_t first = tile * kTile;
  const int64_t width = args.n - first < kTile ? args.n - first : kTile;
  const uint8_t* b = args.b + first * args.b_row_stride;

  alignas(32) float panel[kMmBlock * kTile];
  alignas(32) float scale[kTile];
  alignas(32) float bias[kTile] = {};
  alignas(32) float a[kPanelRows][kMmBlock];
  alignas(32) Total total[kMmRowBlock * kTile];
  alignas(32) int64_t columns[kTile] = {};
  float row_scale[kPanelRows] = {1.0f, 1.0f, 1.0f, 1.0f};
  std::memset(total, 0, (row_end - row_begin) * kTile * sizeof(Total));
  for (float& s : scale) s = 1.0f;

  for (int64_t k = 0; k < args.k; k += kMmBlock) {
    const int64_t length = args.k - k < kMmBlock ? args.k - k : kMmBlock;
    decode_panel<kFp8>(b + k, args.b_row_stride, width, length, panel);
    if (args.a_zero != nullptr) add_columns(panel, length, columns);
    if (args.block_scales) {
      for (int64_t i = 0; i < width; ++i) scale[i] = scale_of(args.b_scale, first + i, k);
    }
    for (int64_t row = row_begin; row < row_end; row += kPanelRows) {
      const int64_t rows = row_end - row < kPanelRows ? row_end - row : kPanelRows;
      for (int64_t i = 0; i < rows; ++i) {
        decode_row<kFp8>(args.a + (row + i) * args.a_row_stride + k, length, a[i]);
        if (args.block_scales) row_scale[i] = scale_of(args.a_scale, row + i, k);
      }
      multiply(rows, a, panel, length, scale, row_scale, total + (row - row_begin) * kTile);
    }
  }

  // Scales of blocks are in the sums already.
  for (int64_t i = 0; i < width; ++i) {
    scale[i] = args.block_scales ? 1.0f : scale_of(args.b_scale, first + i, 0);
  }
  if (args.bias != nullptr) read(args.bias, args.bias_type, first, nullptr, width, bias);
  for (int64_t row = row_begin; row < row_end; ++row) {
    const int64_t zero = args.a_zero == nullptr ? 0 : args.a_zero[row * args.a_zero_stride];
    const vf whole = splat(args.block_scales ? 1.0f : scale_of(args.a_scale, row, 0));
    float* sums = y + (row - row_begin) * kTile;
    finish(total + (row - row_begin) * kTile, columns, zero, sums);
    for (int64_t i = 0; i < kTile; i += kLanes) {
      store(sums + i, load(sums + i) * whole * load(scale + i) + load(bias + i));
    }
  }
}

template <bool kFp8, class Total>
void tile_of_result(const ScaledMmArgs& args, int64_t tile, int64_t row_begin, int64_t row_end) {
  finish_tile<kMmRowBlock>(args.epilogue, args.n, tile, row_begin, row_end,
                           [&](int64_t features, float* y) {
                             product<kFp8, Total>(args, features, row_begin, row_end, y);
                           });
}

}  // namespace

extern const ScaledMmKernels scaled_mm_kernels = {
    tile_of_result<true, float>,
    tile_of_result<false, int64_t>,
};

}  // namespace fastinfer::cpu::FI_ISA
