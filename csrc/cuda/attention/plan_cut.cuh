// The length of pieces at which a plan cuts keys, chosen for an even load of the SMs.
//
// The decode kernel gives unit u (an item for one KV head) to block u % num_sms. A plan lists all
// pieces of full length first and then the last pieces of all sequences, from the longest to the
// shortest: no unit is longer than one before it, so no block has more to do than block 0, which
// has every num_sms-th unit. Each warp tries one length and sums what block 0 would have. Nothing
// but time depends on these sums: last pieces are only counted by bins of their length, and wide
// items, which another kernel takes, count as if they stood among the narrow ones.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "../../checks/attention_plan.h"

namespace fastinfer::cuda {

constexpr int kPlanThreads = 512;
constexpr int kPlanWarps = kPlanThreads / 32;
constexpr int kPlanMaxSequences = 2048;
constexpr int kPlanBins = 128;
constexpr int kPlanQuantum = kPlanMinSplit;  // keys; the length of a piece is a multiple
constexpr int kPlanUncut = 1 << 23;          // quanta: more keys than a sequence can have
// What takes the time of so many keys: beginning and ending a unit, merging a row.
constexpr float kPlanUnitCost = 64.0f;
constexpr float kPlanRowCost = 0.5f;

struct PlanParams {
  const int32_t* cu_seqlens_q;  // [B + 1]
  const int32_t* seq_lens;      // [B]
  int32_t* plan;                // [plan_rows, 8]
  int64_t plan_rows;
  int64_t max_partial_rows;
  int num_sequences, total_q, num_heads, num_kv_heads, max_seqlen_q, max_seqlen_k;
  int window_left, window_right;
  int group, narrow_limit, narrow_tokens, wide_tokens;
  int num_sms;
  bool batch_invariant;
};

struct PlanSequence {
  int queries, keys, low;
  int seen;  // keys that the average tile sees
  int tile_tokens, tiles;
  bool narrow;
};

__device__ inline PlanSequence read_sequence(const PlanParams& p, int b) {
  PlanSequence s;
  s.queries = p.cu_seqlens_q[b + 1] - p.cu_seqlens_q[b];
  s.keys = max(p.seq_lens[b], 0);
  s.narrow = static_cast<int64_t>(s.queries) * p.group <= p.narrow_limit;
  s.tile_tokens = s.narrow ? p.narrow_tokens : p.wide_tokens;
  s.tiles = s.queries > 0 ? 1 : 0;
  if (!s.narrow) s.tiles = (s.queries + s.tile_tokens - 1) / s.tile_tokens;
  // The keys that the tokens see lie in [low, keys). There may be a tree mask, whose tokens may
  // stand one position before the step.
  s.low = 0;
  int span = s.keys;
  if (p.window_left >= 0) {
    s.low = max(s.keys - s.queries - 1 - p.window_left, 0);
    span = min(s.keys, p.window_left + s.tile_tokens + 1);
  }
  // Under a causal mask the average tile of a long prompt sees half of the step's own keys.
  s.seen = span - min(s.queries, span) / 2;
  return s;
}

// Keys are cut at the multiples of a length.
struct PlanCut {
  int quanta;  // of a piece
  float inverse;

  __device__ explicit PlanCut(int quanta)
      : quanta(quanta), inverse(1.0f / static_cast<float>(quanta)) {}
  __device__ int begin_of(int piece) const { return piece * quanta * kPlanQuantum; }
  // Where no sequence has more than `longest` keys.
  __device__ float longest_piece(int longest) const {
    return fminf(static_cast<float>(quanta) * kPlanQuantum, static_cast<float>(max(longest, 1)));
  }
  // Both sides of the division are at most 2^23, so that its estimate is off by less than one.
  __device__ int piece_of(int key) const {
    const int position = key / kPlanQuantum;
    const int piece = static_cast<int>(static_cast<float>(position) * inverse);
    const int rest = position - piece * quanta;
    return piece + (rest >= quanta) - (rest < 0);
  }
};

// Which pieces a sequence's keys lie in; at least one.
struct PlanPieces {
  int first, last;
  int last_begin;  // the first key of the last piece
  __device__ int count() const { return last - first + 1; }
};

__device__ inline PlanPieces cut_sequence(const PlanSequence& s, const PlanCut& cut) {
  const int last = cut.piece_of(max(s.keys - 1, 0));
  const int first = s.low > 0 ? cut.piece_of(s.low) : 0;
  return {first, last, max(cut.begin_of(last), s.low)};
}

struct PlanTotals {
  long long work;  // keys of all tiles
  int tiles;       // of all sequences
  int longest;     // keys of a tile
  int narrow;      // narrow sequences that have a tile
};

struct PlanTrial {
  int quanta;
  float load;   // of block 0, in keys
  float score;  // with the cost of merging
};

struct PlanCutSmem {
  PlanTotals totals[kPlanWarps];
  PlanTrial trials[kPlanWarps];
  alignas(16) int bins[kPlanWarps][kPlanBins];
};

template <class T>
__device__ inline T sum_warp(T x) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) x += __shfl_xor_sync(0xffffffffu, x, mask);
  return x;
}

// Totals of all sequences, of which this thread has [begin, end).
__device__ inline PlanTotals sum_sequences(const PlanParams& p, PlanCutSmem& smem, int begin,
                                           int end) {
  PlanTotals sum = {0, 0, 0, 0};
#pragma unroll 1
  for (int b = begin; b < end; ++b) {
    const PlanSequence s = read_sequence(p, b);
    if (s.tiles == 0) continue;
    sum.work += static_cast<long long>(s.tiles) * s.seen;
    sum.tiles += s.tiles;
    sum.longest = max(sum.longest, s.seen);
    sum.narrow += s.narrow;
  }
  const auto reduce = [&] {
    sum.work = sum_warp(sum.work);
    sum.tiles = __reduce_add_sync(0xffffffffu, sum.tiles);
    sum.longest = __reduce_max_sync(0xffffffffu, sum.longest);
    sum.narrow = __reduce_add_sync(0xffffffffu, sum.narrow);
  };
  const int lane = threadIdx.x % 32;
  reduce();
  if (lane == 0) smem.totals[threadIdx.x / 32] = sum;
  __syncthreads();
  sum = lane < kPlanWarps ? smem.totals[lane] : PlanTotals{0, 0, 0, 0};
  reduce();
  return sum;
}

// What comes of pieces of `quanta`, or of the next double that leaves no more rows than there is
// room for. Done by a warp.
__device__ inline PlanTrial try_cut(const PlanParams& p, int (&bins)[kPlanBins], int quanta,
                                    int longest) {
  const int lane = threadIdx.x % 32;
  int rows, full;          // full: pieces that are not a sequence's last
  float full_keys, width;  // width: keys of a bin
  for (;; quanta = min(2 * quanta, kPlanUncut)) {
    const PlanCut cut(quanta);
    width = cut.longest_piece(longest) / kPlanBins;
    const float per_key = 1.0f / width;
    for (int i = lane; i < kPlanBins; i += 32) bins[i] = 0;
    __syncwarp();
    long long lane_rows = 0, lane_full = 0;
    full_keys = 0.0f;
#pragma unroll 1
    for (int b = lane; b < p.num_sequences; b += 32) {
      const PlanSequence s = read_sequence(p, b);
      if (s.tiles == 0) continue;
      const PlanPieces pieces = cut_sequence(s, cut);
      if (pieces.count() > 1) {
        lane_rows += static_cast<long long>(s.queries) * pieces.count();
        lane_full += static_cast<long long>(s.tiles) * (pieces.count() - 1);
        full_keys += static_cast<float>(s.tiles) * static_cast<float>(pieces.last_begin - s.low);
      }
      const int length = min(s.keys - pieces.last_begin, s.seen);
      const int bin = min(static_cast<int>(static_cast<float>(length) * per_key), kPlanBins - 1);
      // Lanes that add one to the same bin do not wait for each other.
      if (s.narrow) {
        atomicAdd(&bins[bin], 1);
      } else {
        atomicAdd(&bins[bin], s.tiles);
      }
    }
    __syncwarp();
    full = static_cast<int>(lane_full);  // no more than there are rows, if these are few
    rows = static_cast<int>(min(lane_rows, static_cast<long long>(kPlanMaxPartialRows + 1)));
    rows = __reduce_add_sync(0xffffffffu, rows);
    if (rows <= p.max_partial_rows || quanta == kPlanUncut) break;
  }
  full = __reduce_add_sync(0xffffffffu, full);
  full_keys = sum_warp(full_keys);

  // How many of the units of the first `items` items are block 0's.
  const auto taken = [&](int items) {
    const auto units = static_cast<unsigned long long>(items) * p.num_kv_heads;
    return static_cast<float>((units + p.num_sms - 1) / p.num_sms);
  };
  // A lane has four bins, lane 0 those of the longest pieces.
  const int4 counts = reinterpret_cast<const int4*>(bins)[31 - lane];
  const int count[4] = {counts.w, counts.z, counts.y, counts.x};
  int items = counts.x + counts.y + counts.z + counts.w;
  const int mine = items;
#pragma unroll
  for (int by = 1; by < 32; by *= 2) {
    const int other = __shfl_up_sync(0xffffffffu, items, by);
    if (lane >= by) items += other;
  }
  items += full - mine;
  float before = taken(items), load = 0.0f;
  if (lane == 0 && full > 0) {
    load = before * (full_keys / static_cast<float>(full) + kPlanUnitCost);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    items += count[i];
    const float after = taken(items);
    load +=
        (after - before) * (static_cast<float>(kPlanBins - 4 * lane - i) * width + kPlanUnitCost);
    before = after;
  }
  load = sum_warp(load);
  return {quanta, load, load + kPlanRowCost * static_cast<float>(rows)};
}

// Warp 0 tries not to cut, warp w aims at (w + 1) / 2 units an SM.
__device__ inline PlanCut choose_cut(const PlanParams& p, PlanCutSmem& smem,
                                     const PlanTotals& totals) {
  if (p.batch_invariant) return PlanCut(kPlanUncut);
  const int warp = threadIdx.x / 32;
  int quanta = kPlanUncut;
  if (warp > 0) {
    const long long shares = static_cast<long long>(p.num_sms) * (warp + 1) * kPlanQuantum;
    const long long wanted = (2 * totals.work * p.num_kv_heads + shares - 1) / shares;
    quanta = static_cast<int>(min(max(wanted, 1ll), static_cast<long long>(kPlanUncut)));
  }
  const PlanTrial trial = try_cut(p, smem.bins[warp], quanta, totals.longest);
  if (threadIdx.x % 32 == 0) smem.trials[warp] = trial;
  __syncthreads();
  PlanTrial best = smem.trials[0];
  const float mean =
      (static_cast<float>(totals.work) + static_cast<float>(totals.tiles) * kPlanUnitCost) *
      static_cast<float>(p.num_kv_heads) / static_cast<float>(p.num_sms);
  // Whole sequences may be an even load as they are, and need no merging.
  if (best.load > 1.1f * mean) {
    for (int w = 1; w < kPlanWarps; ++w) {
      const PlanTrial& other = smem.trials[w];
      const bool tie = other.score == best.score && other.quanta > best.quanta;
      if (other.score < best.score || tie) best = other;
    }
  }
  return PlanCut(best.quanta);
}

}  // namespace fastinfer::cuda
