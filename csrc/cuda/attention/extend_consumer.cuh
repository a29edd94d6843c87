// A warpgroup of the extend kernel and the tiles of its group.
//
// Keys and values are decoded to fp16 in registers, each once, as the first operand of wgmma. So
// both products are transposed: S^T = K Q^T [keys, rows] and O^T = V^T P^T [columns, rows]. A warp
// has 16 of a tile's 64 keys and 16 of every 64 columns; rows run along a lane's registers. P^T
// goes through shared memory.
//
// A row's highest score lies in any warp, so nobody looks for it: exponentials are taken with the
// base there is. Whether one exceeds the slack all learn at the barrier that P^T needs anyway, and
// only then the tile's are taken once more, with a new base.
//
// - Keys: ldmatrix gives a lane four neighbouring bytes of a key: dimensions are in the order of
//   query_offset. An int8 key has an offset (kKeyOffset).
// - Values: ldmatrix transposes pairs of bytes, so a register holds two neighbouring columns of two
//   keys: of a warp's 16 columns the even ones come first.
#pragma once

#include <cfloat>

#include "../ptx/ldmatrix.h"
#include "../ptx/stmatrix.h"
#include "../ptx/wgmma.h"
#include "decode_hidden.cuh"
#include "decode_rows.cuh"
#include "extend_traits.cuh"

namespace fastinfer::cuda {

// The base of a row that has seen nothing: finite, so that a hidden score minus it is -inf.
constexpr float kUnseen = -FLT_MAX;
// Of scales in units of acc: what is seen of 2^(exponent - 126) is below.
constexpr float kLargestScale = 0x1p9f;

template <class T>
struct WarpgroupState {
  static constexpr int kElements = T::kRows / 2;  // a lane's, of S^T and of 64 columns of O^T
  static constexpr int kColumns = T::kRows / 4;   // a lane's rows of q
  static constexpr int kBlocks = T::kValueDim / 64;
  static constexpr int kSteps = T::kHeadDim / 16;
  static constexpr int kBlocksAtOnce = kBlocks == 1 ? 1 : 2;  // whose values are decoded together
  // Values are decoded beside the first product, if there are registers for it.
  static constexpr bool kValuesEarly = T::kRows == 32;
  using Mma = ptx::Wgmma<__half, T::kRows>;
  using Smem = ExtendSmem<T>;
  using Keys = uint32_t[kSteps][4];           // 16 keys of a warp, for each 16 dimensions
  using Values = uint32_t[T::kKeys / 16][4];  // 16 columns of a warp, for each 16 keys

  const int group, member;
  // Where this lane begins to load keys and values of a tile and to store P^T, in bytes from the
  // beginning of each; the first of its keys; and the first of its rows.
  const int keys_at, values_at, probabilities_at, first_key, first_row;
  float acc[kBlocks][kElements];
  float base[kColumns];           // subtracted from scores
  float total[kColumns];          // of this lane's keys
  int exponent = kLeastExponent;  // as in WarpState, and what scales are then multiplied by
  float scale_unit = power_of_two(kByteExponent - kLeastExponent);
  bool careful = false;  // some base is beyond kExactBase
  int buffer = 0;        // of the next P^T

  __device__ WarpgroupState(int group, int member, int lane)
      : group(group),
        member(member),
        keys_at(swizzled<T::kKPitch>(member * 16 + lane % 16, lane / 16)),
        values_at(T::kKeys * T::kKPitch + swizzled<T::kVPitch>(lane, member)),
        probabilities_at(swizzled<128>(lane / 16 * 8 + lane % 8, member * 2 + lane / 8 % 2)),
        first_key(member * 16 + lane / 4),
        first_row(lane % 4 * 2) {
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      base[i] = kUnseen;
      total[i] = 0.0f;
    }
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
      for (int e = 0; e < kElements; ++e) acc[block][e] = 0.0f;
    }
  }

  // All tiles of a unit, from `stage` of the ring on.
  __device__ void take_tiles(const DecodeParams& p, Smem& smem, const DecodeUnit& unit,
                             Ring<T::kStages>& stage) {
    int begin = first_tile<T>(unit, group);
    if (begin >= unit.high) return;
    Keys keys;
    smem.full[group][stage.index].wait(stage.phase);
    decode_tile_keys(keys, smem.tiles[group][stage.index]);
    while (true) {
      take_tile(p, smem, unit, stage.index, begin, keys);
      stage.next();
      begin += T::kKeys * T::kKeyGroups;
      const bool more = begin < unit.high;
      if (more) {  // beside the last product
        smem.full[group][stage.index].wait(stage.phase);
        decode_tile_keys(keys, smem.tiles[group][stage.index]);
      }
      ptx::wgmma_wait<0>();
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) ptx::wgmma_pin(acc[block]);
      if (!more) break;
    }
  }

  __device__ void write_stats(Smem& smem) const {
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      float sum = total[i];
#pragma unroll
      for (int mask = 4; mask < 32; mask *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, mask);
      if (threadIdx.x % 32 < 4) {
        smem.stats[group][member][row(i)] = {base[i] == kUnseen ? -kInfinity : base[i], sum};
      }
    }
  }
  __device__ void weigh(const Smem& smem) {
    const float unit = power_of_two(exponent - kByteExponent);
#pragma unroll
    for (int i = 0; i < kColumns; ++i) multiply_row(i, smem.weights[group][row(i)] * unit);
  }
  // Columns [first, first + kSlice) of the group's result.
  __device__ void write_slice(Smem& smem, int first) const {
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      const int at = block * 64 + member * 16 - first;
      if (at < 0 || at >= T::kSlice) continue;
#pragma unroll
      for (int i = 0; i < kColumns; ++i) {
        const int e = i / 2 * 4 + i % 2;
        *reinterpret_cast<float2*>(&smem.parts[group][row(i)][at + first_key % 8 * 2]) = {
            acc[block][e], acc[block][e + 2]};
      }
    }
  }

 private:
  // Element e of a lane belongs to row(column(e)) and, in S^T, to key(e).
  static __device__ constexpr int column(int e) { return e / 4 * 2 + e % 2; }
  __device__ int row(int i) const { return first_row + i / 2 * 8 + i % 2; }
  __device__ int key(int e) const { return first_key + e % 4 / 2 * 8; }
  __device__ void multiply_row(int i, float by) {
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      acc[block][i / 2 * 4 + i % 2] *= by;
      acc[block][i / 2 * 4 + i % 2 + 2] *= by;
    }
  }

  __device__ void decode_tile_keys(Keys& a, const unsigned char* tile) const {
    const uint32_t first = ptx::shared_address(tile) + keys_at;
#pragma unroll
    for (int step = 0; step < kSteps; step += 2) {
      uint32_t bytes[4];  // keys 0-7, 8-15 of 16 dimensions, then of the next 16
      ptx::ldmatrix_x4(bytes, chunk_address(first, step));
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        uint32_t (&to)[4] = a[step + e / 2];
        decode_keys<T::kKFormat>(bytes[e], to[e % 2], to[e % 2 + 2]);
      }
    }
  }
  __device__ void decode_tile_values(Values& a, const unsigned char* tile, int block) const {
    const uint32_t first = chunk_address(ptx::shared_address(tile) + values_at, block * 4);
#pragma unroll
    for (int half = 0; half < T::kKeys / 32; ++half) {
      uint32_t bytes[4];  // keys 0-7, 8-15, 16-23, 24-31
      ptx::ldmatrix_x4_trans(bytes, first + half * 32 * T::kVPitch);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        uint32_t (&to)[4] = a[half * 2 + e / 2];
        decode_values<T::kVFormat>(bytes[e], to[e % 2 * 2], to[e % 2 * 2 + 1]);
      }
    }
  }

  __device__ void take_tile(const DecodeParams& p, Smem& smem, const DecodeUnit& unit, int stage,
                            int begin, const Keys& keys);

  // Of rows i and i + 1 of the lane; i is even.
  __device__ void load_rows(float& first, float& second, const float* rows, int i) const {
    const float2 pair = *reinterpret_cast<const float2*>(rows + row(i));
    first = pair.x;
    second = pair.y;
  }

  // What acc is divided by grows with the scales of values.
  __device__ void rescale(int scale_exponent) {
    const int before = exponent;
    exponent = max(before, scale_exponent);
    scale_unit = power_of_two(kByteExponent - exponent);
    const float ratio = power_of_two(before - exponent);
#pragma unroll
    for (int i = 0; i < kColumns; ++i) multiply_row(i, ratio);
  }

  // New bases for rows that exceed theirs by more than the slack; the sums so far shrink.
  __device__ void rebase(Smem& smem, float (&s)[kElements], float (&factors)[kColumns]) {
    float highest[kColumns];
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      const int e = i / 2 * 4 + i % 2;
      highest[i] = fmaxf(s[e], s[e + 2]);
#pragma unroll
      for (int mask = 4; mask < 32; mask *= 2) {
        highest[i] = fmaxf(highest[i], __shfl_xor_sync(0xffffffffu, highest[i], mask));
      }
      if (threadIdx.x % 32 < 4) smem.peaks[group][member][row(i)] = highest[i];
    }
    group_barrier<T>(group);
    careful = false;
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
#pragma unroll
      for (int warp = 0; warp < T::kGroupWarps; ++warp) {
        highest[i] = fmaxf(highest[i], smem.peaks[group][warp][row(i)]);
      }
      const float peak = highest[i] * factors[i], before = base[i];
      if (peak - before > kSlack) {  // exactly, however large they are
        base[i] = peak;
        const float shrink = ptx::exp2(before - peak);
        total[i] *= shrink;
        multiply_row(i, shrink);
      }
      careful |= fabsf(base[i]) > kExactBase && base[i] != kUnseen;
    }
    if (careful) round_scores(s, factors);
  }

  // Scores of rows with an enormous base are rounded as the base is.
  __device__ void round_scores(float (&s)[kElements], float (&factors)[kColumns]) const {
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      if (fabsf(base[i]) <= kExactBase) continue;
      s[i / 2 * 4 + i % 2] *= factors[i];
      s[i / 2 * 4 + i % 2 + 2] *= factors[i];
      factors[i] = 1.0f;
    }
  }
};

// Takes the tile of keys [begin, begin + kKeys) in a stage of the group's ring, and gives the stage
// back. The last product is under way afterwards.
template <class T>
__device__ inline void WarpgroupState<T>::take_tile(const DecodeParams& p, Smem& smem,
                                                    const DecodeUnit& unit, int stage, int begin,
                                                    const Keys& keys) {
  unsigned char* tile = smem.tiles[group][stage];
  const float* k_scales = smem.scales[group][stage][0];
  float* v_scales = smem.scales[group][stage][1];

  float s[kElements];
#pragma unroll
  for (int e = 0; e < kElements; e += 2) {
    if constexpr (T::kKFormat == KvFormat::kInt8) {
      load_rows(s[e], s[e + 1], smem.starts, column(e));
    } else {
      s[e] = s[e + 1] = 0.0f;
    }
  }
  const uint64_t q = ptx::k_major_descriptor(ptx::shared_address(smem.q));
  ptx::wgmma_pin(s);
  ptx::wgmma_fence();
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const int slab = step / 4, inside = step % 4 * 32;
    Mma::registers_k_major(s, keys[step], q + (slab * T::kRows * 128 + inside) / 16, 1);
  }
  ptx::wgmma_commit();

  const bool whole = begin >= unit.all_low && begin + T::kKeys <= unit.all_high;
  uint32_t visible = ~0u;  // bit e: the lane's row sees the key of element e
  if (!whole) {
    visible = 0;
    // Rolled up: this is rare and would be most of the kernel.
#pragma unroll 1
    for (int e = 0; e < kElements; ++e) {
      if (is_visible(p, unit, smem.rows[row(column(e))], begin + key(e))) visible |= 1u << e;
    }
    const auto spoil = [&](int key_of_tile) {
#pragma unroll
      for (int i = 0; i < kColumns; ++i) {
        const DecodeRow& info = smem.rows[row(i)];
        if (is_visible(p, unit, info, begin + key_of_tile)) multiply_row(i, kNan);
      }
    };
    if (rows_differ<T>(unit, begin)) {
      clear_spoiled_keys<T>(tile + T::kKeys * T::kKPitch, v_scales, group, member, spoil);
    }
  }
  Values decoded[kBlocksAtOnce];
  const auto decode_values_of = [&](int first) {
#pragma unroll
    for (int i = 0; i < kBlocksAtOnce; ++i) decode_tile_values(decoded[i], tile, first + i);
  };
  if constexpr (kValuesEarly) decode_values_of(0);
  float k_scale[2], v_scale[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    k_scale[h] = k_scales[key(h * 2)];
    v_scale[h] = v_scales[key(h * 2)];
  }
  float factors[kColumns];  // what is left to do to scores, in base 2
#pragma unroll
  for (int i = 0; i < kColumns; i += 2) load_rows(factors[i], factors[i + 1], smem.factors, i);

  ptx::wgmma_wait<0>();
  ptx::wgmma_pin(s);
#pragma unroll
  for (int e = 0; e < kElements; ++e) s[e] *= k_scale[e % 4 / 2];
  if (p.softcap > 0.0f) {
#pragma unroll
    for (int e = 0; e < kElements; ++e) s[e] = tanh_accurate(s[e] * factors[column(e)]);
#pragma unroll
    for (int i = 0; i < kColumns; ++i) factors[i] = p.softcap * kLog2e;
  }
  if (!whole) {
#pragma unroll
    for (int e = 0; e < kElements; ++e) {
      if ((visible >> e & 1) == 0) s[e] = -kInfinity;
    }
  }
  if (careful) round_scores(s, factors);

  const uint32_t probabilities = ptx::shared_address(smem.probabilities[group][buffer]);
  buffer ^= 1;
  float sums[kColumns];
  // Writes this warp's part of P^T. Whether a score exceeds its base by too much, or a value's
  // scale what acc is divided for.
  const auto take_exponentials = [&] {
    float highest = -kInfinity;
    uint32_t pairs[kElements / 8][4];
    const float scales[2] = {v_scale[0] * scale_unit, v_scale[1] * scale_unit};
#pragma unroll
    for (int e = 0; e < kElements; e += 2) {
      float weighted[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int i = column(e + j);
        const float x = fmaf(s[e + j], factors[i], -base[i]);
        highest = fmaxf(highest, x);
        const float weight = ptx::exp2(x);
        sums[i] = e % 4 == 0 ? weight : sums[i] + weight;
        weighted[j] = weight * scales[e % 4 / 2];
      }
      pairs[e / 8][e % 8 / 2] = ptx::pack<false>(weighted[0], weighted[1]);
    }
#pragma unroll
    for (int n = 0; n < kElements / 8; ++n) {
      ptx::stmatrix_x4_trans(probabilities + probabilities_at + n * 16 * 128, pairs[n]);
    }
    ptx::fence_async_proxy();
    const float largest = fmaxf(fabsf(scales[0]), fabsf(scales[1]));
    return !(highest <= kSlack) || !(largest < kLargestScale);
  };
  if (ptx::named_barrier_any(1 + group, T::kGroupWarps * 32, take_exponentials())) {
    rescale(scale_exponent<T>(v_scales));
    rebase(smem, s, factors);
    take_exponentials();
    group_barrier<T>(group);
  }
#pragma unroll
  for (int i = 0; i < kColumns; ++i) total[i] += sums[i];

  const uint64_t operand = ptx::k_major_descriptor(probabilities);
#pragma unroll
  for (int first = 0; first < kBlocks; first += kBlocksAtOnce) {
    if (first > 0 || !kValuesEarly) decode_values_of(first);
#pragma unroll
    for (int i = 0; i < kBlocksAtOnce; ++i) ptx::wgmma_pin(acc[first + i]);
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < kBlocksAtOnce; ++i) {
#pragma unroll
      for (int step = 0; step < T::kKeys / 16; ++step) {
        Mma::registers_k_major(acc[first + i], decoded[i][step], operand + step * 32 / 16, 1);
      }
    }
    ptx::wgmma_commit();
  }
  __syncwarp();
  if (threadIdx.x % 32 == 0) smem.empty[group][stage].arrive();
}

}  // namespace fastinfer::cuda
