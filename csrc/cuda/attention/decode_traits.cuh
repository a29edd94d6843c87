// The decode kernel's shapes: how a block's warps share a tile, and what lies where in shared
// memory.
#pragma once

#include "decode_params.cuh"

namespace fastinfer::cuda {

constexpr int kMaxSharedBytes = 227 * 1024;  // of a block, on compute capability 9.0

constexpr bool is_byte(KvFormat format) {
  return format == KvFormat::kInt8 || format == KvFormat::kFp8;
}

// Bytes that a row of `dim` elements takes in shared memory: whole 128-byte segments.
constexpr int row_pitch(int dim, KvFormat format) {
  return (dim * (is_byte(format) ? 1 : 2) + 127) / 128 * 128;
}

// Where 16-byte chunk `chunk` of row `row` lies: eight rows of one chunk fall into eight different
// groups of banks, which is what ldmatrix reads at once.
template <int kPitch>
__host__ __device__ constexpr int swizzled(int row, int chunk) {
  return row * kPitch + (chunk & ~7) * 16 + ((chunk ^ row) & 7) * 16;
}

// The address of chunk `first + chunk` of a row, from that of chunk `first` (0 or 1); `chunk` is
// even or `first` is 0. Rows lie on multiples of 128 bytes.
__device__ inline uint32_t chunk_address(uint32_t first, int chunk) {
  return (first ^ (chunk & 7) * 16) + (chunk & ~7) * 16;
}

// One piece of work: a plan's item, or some tokens of it, for one KV head.
struct DecodeUnit {
  const unsigned char *k, *v;      // the pages, at the unit's head
  const float *k_scale, *v_scale;  // likewise
  const int32_t* pages;            // the sequence's row of the block table
  int kv_head;
  int first_token, token_begin, token_count;  // of the sequence; of the unit, counted from it
  int partial_row;                            // -1: the result is final
  int step_begin;                             // position of the step's first token, may be < 0
  int low, high;                              // keys that some row sees
  int all_low, all_high;                      // keys that all rows see
};

// What the masks and the epilogue need of one row.
struct DecodeRow {
  int low, high;            // positions of the keys that windows let it see
  unsigned long long tree;  // bit j: it sees token j of its step
  int64_t out_at;           // element of out, or of partial_out
  int64_t lse_at;
  // Its scores, before a softcap's tanh, are factor * (start + q k): the softmax scale and what
  // makes up for the powers of 2 in q and k.
  float factor, start;
  int head;  // -1: no such row
};

template <KvFormat kKFormat_, KvFormat kVFormat_, int kRows_, int kHeadDim_, int kValueDim_>
struct DecodeTraits {
  static constexpr KvFormat kKFormat = kKFormat_, kVFormat = kVFormat_;
  static constexpr int kRows = kRows_, kHeadDim = kHeadDim_, kValueDim = kValueDim_;
  static constexpr bool kByteK = is_byte(kKFormat), kByteV = is_byte(kVFormat);

  // A warp's accumulators take kWarpRows * kValueDim / 32 registers, half of what there is.
  static constexpr int kWarpRows = kValueDim > 128 ? 16 : (kRows < 32 ? kRows : 32);
  // Warps that have the same keys and different rows.
  static constexpr int kRowGroups = kRows / kWarpRows;
  static constexpr int kKeys = kByteK || kByteV || kHeadDim <= 64 ? 32 : 16;  // of a tile
  static constexpr int kKPitch = row_pitch(kHeadDim, kKFormat);
  static constexpr int kVPitch = row_pitch(kValueDim, kVFormat);
  static constexpr int kTileBytes = kKeys * (kKPitch + kVPitch);
  // Groups of warps with keys of their own, each with its own ring of tiles.
  static constexpr int kWantedGroups = kTileBytes > 8192 ? 4 : 8;
  static constexpr int kKeyGroups =
      kWantedGroups * kRowGroups <= 8 ? kWantedGroups : 8 / kRowGroups;
  static constexpr int kWarps = kKeyGroups * kRowGroups;
  static constexpr int kThreads = kWarps * 32;

  static constexpr int kRowTiles = kWarpRows / 16;
  static constexpr int kKeyTiles = kKeys / 8;
  static constexpr int kValueTiles = kValueDim / 8;

  // q stays in registers where there is room.
  static constexpr bool kKeepQuery = kWarpRows == 16 && kHeadDim <= 128;

  // Columns of the result that are merged at once.
  static constexpr int kSlice = kRows * kKeyGroups <= 128 ? 32 : 16;
  static constexpr int kSlicePitch = kSlice + 8;
  static constexpr int kScaleBytes = 2 * kKeys * sizeof(float);

  static constexpr int kQueryBytes = kRows * kHeadDim * 2;
  static constexpr int kPartBytes = kKeyGroups * kRows * kSlicePitch * sizeof(float);
  static constexpr int kFixedBytes = (kQueryBytes > kPartBytes ? kQueryBytes : kPartBytes) +
                                     kKeyGroups * kRows * sizeof(float2) +
                                     kRows * sizeof(DecodeRow) + 4 * sizeof(DecodeUnit) + 256;
  static constexpr int kFitting =
      (kMaxSharedBytes - kFixedBytes) / (kKeyGroups * (kTileBytes + kScaleBytes));
  static constexpr int kStages = kFitting < 6 ? kFitting : 6;

  static_assert(kHeadDim % 16 == 0 && kValueDim % kSlice == 0);
  static_assert(kRows % 16 == 0 && kRows % kWarpRows == 0 && kKeyGroups >= 1);
  static_assert(kStages >= 2, "loading and computing must overlap");
};

template <class T>
struct DecodeSmem {
  alignas(128) unsigned char tiles[T::kKeyGroups][T::kStages][T::kTileBytes];  // keys, then values
  union {
    alignas(128) unsigned char q[T::kQueryBytes];
    float parts[T::kKeyGroups][T::kRows][T::kSlicePitch];  // when all warps are done with q
  };
  float scales[T::kKeyGroups][T::kStages][2][T::kKeys];  // of keys, of values
  float2 stats[T::kKeyGroups][T::kRows];  // base (of exponents of 2) and sum of each row
  DecodeRow rows[T::kRows];
  int first_item;       // of the plan
  int num_units;        // of this block
  DecodeUnit units[4];  // ring: the present one, two that follow, and one that is being read
};

}  // namespace fastinfer::cuda
