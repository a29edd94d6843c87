// The passes over a row of logits that sampling is made of; sampling.cpp puts them together.
#pragma once

#include <cstdint>

#include "isa.h"

namespace fastinfer::cpu {

// Tokens [begin, end) of a row.
struct LogitSpan {
  const void* row;  // token 0
  int64_t begin;
  int64_t end;
};

struct ScanResult {
  float max;       // of what is not NaN; -inf if nothing is
  float min;       // of what is finite and above the lowest float; only if asked for
  int64_t argmax;  // the lowest index of max, begin if nothing is above -inf
  bool nan;        // any
};

// exp((logit - max) / temperature), and bins of equal width in the logit, counted downwards from
// `high`. A logit of -inf has the bin `kBins`, beyond all.
struct Binning {
  static constexpr int kBins = 2048;
  float max;
  float temperature;
  float high;
  float inverse_width;
};

struct Histogram {
  int32_t counts[Binning::kBins + 1];
  double masses[Binning::kBins + 1];
};

// What decides a draw; a candidate has logit >= lowest and exp((logit - max) / T) >= min_p.
struct DrawParams {
  float max;
  float temperature;
  float lowest;
  double min_p;
  uint64_t seed;
  uint64_t position;
};

struct DrawResult {
  double score;  // -inf: no candidate
  int64_t token;
};

// Each indexed by element type: fp32, bf16, fp16.
struct SamplingKernels {
  // Largest element, and whether there is a NaN; with the smallest one where `with_min`.
  ScanResult (*scan[3])(const LogitSpan& span, bool with_min);
  // Adds counts, and masses where `with_mass`, to `out`.
  void (*histogram[3])(const LogitSpan& span, const Binning& binning, bool with_mass,
                       Histogram* out);
  // The logits of one bin, in order; returns how many.
  int64_t (*collect[3])(const LogitSpan& span, const Binning& binning, int bin, float* out);
  // The candidate with the highest perturbed logit; begin is a multiple of 32.
  DrawResult (*draw[3])(const LogitSpan& span, const DrawParams& params);
};

FI_ISA_TABLE(SamplingKernels, sampling_kernels)

}  // namespace fastinfer::cpu
