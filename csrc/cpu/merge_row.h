// Merging attention results over disjoint sets of keys, one row at a time; the same arithmetic
// wherever partial results meet.
//
//   out = sum_i e^lse_i out_i / (sum_i e^lse_i [+ e^sink]),   lse = ln sum_i e^lse_i
//
// as a fold over i with a running maximum. Merging a single result without a sink gives its bits
// back.
#pragma once

#include "vec.h"

namespace fastinfer::cpu::FI_ISA {

struct MergeState {
  float largest = 0.0f;  // meaningful once total is not 0
  float total = 0.0f;    // sum of e^(lse_i - largest)
};

inline float exp1(float x) {
  return exp(splat(x))[0];
}

// acc [n] is a sum relative to e^largest; `out` [n] is one normalised result. Nothing is read from
// the out of an empty result.
template <class In>
inline void merge_fold(MergeState* state, float* acc, const In* out, float lse, int64_t n) {
  if (lse == -__builtin_inff()) return;
  float keep = 0.0f, add = 1.0f;
  const bool first = state->total == 0.0f;
  if (first) {
    state->largest = lse;
    state->total = 1.0f;
  } else {
    const float largest = lse > state->largest ? lse : state->largest;
    keep = exp1(state->largest - largest);
    add = exp1(lse - largest);
    state->largest = largest;
    state->total = state->total * keep + add;
  }
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const vf x = load(out + i);
    store(acc + i, first ? x : load(acc + i) * splat(keep) + x * splat(add));
  }
  for (; i < n; ++i) acc[i] = first ? to_float(out[i]) : acc[i] * keep + to_float(out[i]) * add;
}

// Writes the merged row and returns its lse; `sink` may be null.
template <class Out>
inline float merge_finish(const MergeState& state, const float* acc, const float* sink, int64_t n,
                          Out* out) {
  const bool empty = state.total == 0.0f;
  float factor = 1.0f;
  if (empty) {
    factor = 0.0f;
  } else if (sink == nullptr) {
    factor = 1.0f / state.total;
  } else {
    const float largest = *sink > state.largest ? *sink : state.largest;
    const float shift = exp1(state.largest - largest);
    factor = shift / (state.total * shift + exp1(*sink - largest));
  }
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes)
    store(out + i, empty ? splat(0.0f) : load(acc + i) * splat(factor));
  for (; i < n; ++i) from_float(empty ? 0.0f : acc[i] * factor, out + i);
  return empty ? -__builtin_inff() : state.largest + __builtin_logf(state.total);
}

}  // namespace fastinfer::cpu::FI_ISA
