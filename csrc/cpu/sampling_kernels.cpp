// The passes over a row of logits that sampling is made of; compiled once per instruction set.
#include "sampling_kernels.h"

#include "vec.h"

namespace fastinfer::cpu::FI_ISA {
namespace {

constexpr float kInf = __builtin_inff();

// Elements from i on, those from `end` on being -inf: no candidate in any pass.
template <class T>
inline vf load_logits(const T* row, int64_t i, int64_t end) {
  return end - i >= kLanes ? load(row + i) : load_partial(row + i, end - i, -kInf);
}

// ---- the largest element

constexpr int64_t kScanBlock =
    512;  // the argmax is looked for in the block that raised the maximum

template <class T, bool kWithMin>
ScanResult scan_span(const LogitSpan& span) {
  constexpr int kChains = 4;
  const T* row = static_cast<const T*>(span.row);
  ScanResult result{-kInf, kInf, span.begin, false};
  vi nan = {};
  vf least = splat(kInf);
  int64_t best_block = -1;
  for (int64_t block = span.begin; block < span.end; block += kScanBlock) {
    const int64_t end = span.end - block < kScanBlock ? span.end : block + kScanBlock;
    vf m[kChains] = {splat(-kInf), splat(-kInf), splat(-kInf), splat(-kInf)};
    const auto visit = [&](vf v, vf& chain) __attribute__((always_inline)) {
      nan |= v != v;
      chain = vmax(v, chain);  // chain where v is a NaN
      if (kWithMin) {
        least = vmin(select(v > splat(-kInf), v, splat(kInf)), least);
      }
    };
    int64_t i = block;
    for (; i + kChains * kLanes <= end; i += kChains * kLanes) {
      for (int c = 0; c < kChains; ++c) visit(load(row + i + c * kLanes), m[c]);
    }
    for (; i < end; i += kLanes) visit(load_logits(row, i, end), m[0]);
    for (int c = 1; c < kChains; ++c) m[0] = vmax(m[c], m[0]);
    const float largest = max(m[0]);
    if (largest > result.max) {
      result.max = largest;
      best_block = block;
    }
  }
  if (best_block >= 0) {
    result.argmax = best_block;
    while (to_float(row[result.argmax]) != result.max) ++result.argmax;
  }
  if (kWithMin) {
    for (int j = 0; j < kLanes; ++j) result.min = least[j] < result.min ? least[j] : result.min;
  }
  result.nan = any(nan);
  return result;
}

template <class T>
ScanResult scan(const LogitSpan& span, bool with_min) {
  return with_min ? scan_span<T, true>(span) : scan_span<T, false>(span);
}

// ---- bins

// (logit - max) / temperature. Halved before the subtraction, which could overflow.
inline vf scaled(vf logits, float max, float temperature) {
  const vf half = (logits * splat(0.5f) - splat(0.5f * max)) / splat(temperature);
  return half + half;
}

// Never decreases as the logit falls: subtraction, product and truncation are monotonic.
inline vi bin_of(vf logits, const Binning& b) {
  const vf last = splat(static_cast<float>(Binning::kBins - 1));
  const vf distance = (splat(b.high) - logits) * splat(b.inverse_width);
  const vi bin = __builtin_convertvector(vmin(distance, last), vi);
  return logits == splat(-kInf) ? vi{} + Binning::kBins : bin;
}

template <class T, bool kWithMass>
void histogram_span(const LogitSpan& span, const Binning& binning, Histogram* out) {
  const T* row = static_cast<const T*>(span.row);
  for (int64_t i = span.begin; i < span.end; i += kLanes) {
    const vf logits = load_logits(row, i, span.end);
    const vi bin = bin_of(logits, binning);
    vf mass = {};
    if (kWithMass) mass = exp(scaled(logits, binning.max, binning.temperature));
    for (int j = 0; j < kLanes; ++j) {
      ++out->counts[bin[j]];
      if (kWithMass) out->masses[bin[j]] += static_cast<double>(mass[j]);
    }
  }
}

template <class T>
void histogram(const LogitSpan& span, const Binning& binning, bool with_mass, Histogram* out) {
  with_mass ? histogram_span<T, true>(span, binning, out)
            : histogram_span<T, false>(span, binning, out);
}

template <class T>
int64_t collect(const LogitSpan& span, const Binning& binning, int wanted, float* out) {
  const T* row = static_cast<const T*>(span.row);
  int64_t count = 0;
  for (int64_t i = span.begin; i < span.end; i += kLanes) {
    const vf logits = load_logits(row, i, span.end);
    const vi inside = bin_of(logits, binning) == wanted;
    if (!any(inside)) continue;
    for (int j = 0; j < kLanes; ++j) {
      if (inside[j]) out[count++] = logits[j];
    }
  }
  return count;
}

// ---- random numbers: Philox4x32-10, one 128-bit block for four tokens

typedef uint64_t vq __attribute__((vector_size(32)));

// The low halves of the lanes times m.
inline vq mul_low(vq a, uint32_t m) {
#ifdef __AVX2__
  return bit_cast<vq>(
      _mm256_mul_epu32(bit_cast<__m256i>(a), _mm256_set1_epi64x(static_cast<int64_t>(m))));
#else
  return (a & 0xffffffffu) * static_cast<uint64_t>(m);
#endif
}

// Four counters in the low halves of the lanes; the high halves hold what is never used.
struct Philox {
  vq c0, c1, c2, c3;

  void round(uint32_t k0, uint32_t k1) {
    const vq left = mul_low(c0, 0xD2511F53u);
    const vq right = mul_low(c2, 0xCD9E8D57u);
    c0 = (right >> 32) ^ c1 ^ static_cast<uint64_t>(k0);
    c1 = right;
    c2 = (left >> 32) ^ c3 ^ static_cast<uint64_t>(k1);
    c3 = left;
  }
};

inline vu interleave(vq low, vq high) {
  return bit_cast<vu>((low & 0xffffffffu) | high << 32);
}

// The words of 32 tokens from 4 * block on: words[g] is of tokens 8g .. 8g + 7.
inline void random_words(uint32_t block, uint64_t seed, uint64_t position, vu words[4]) {
  const vq low = vq{} + (position & 0xffffffffu);
  const vq high = vq{} + (position >> 32);
  // Which lane holds which counter is chosen so that the transposition below, inside halves of
  // vectors, leaves tokens in order.
  Philox a{vq{0, 4, 1, 5} + block, low, high, vq{}};
  Philox b{vq{2, 6, 3, 7} + block, low, high, vq{}};
  uint32_t k0 = static_cast<uint32_t>(seed);
  uint32_t k1 = static_cast<uint32_t>(seed >> 32);
  for (int i = 0; i < 10; ++i) {
    a.round(k0, k1);
    b.round(k0, k1);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  const vu w0 = interleave(a.c0, b.c0);  // word 0 of counters 0 2 4 6 | 1 3 5 7
  const vu w1 = interleave(a.c1, b.c1);
  const vu w2 = interleave(a.c2, b.c2);
  const vu w3 = interleave(a.c3, b.c3);
  const vu w01_low = __builtin_shufflevector(w0, w1, 0, 8, 1, 9, 4, 12, 5, 13);
  const vu w23_low = __builtin_shufflevector(w2, w3, 0, 8, 1, 9, 4, 12, 5, 13);
  const vu w01_high = __builtin_shufflevector(w0, w1, 2, 10, 3, 11, 6, 14, 7, 15);
  const vu w23_high = __builtin_shufflevector(w2, w3, 2, 10, 3, 11, 6, 14, 7, 15);
  words[0] = __builtin_shufflevector(w01_low, w23_low, 0, 1, 8, 9, 4, 5, 12, 13);
  words[1] = __builtin_shufflevector(w01_low, w23_low, 2, 3, 10, 11, 6, 7, 14, 15);
  words[2] = __builtin_shufflevector(w01_high, w23_high, 0, 1, 8, 9, 4, 5, 12, 13);
  words[3] = __builtin_shufflevector(w01_high, w23_high, 2, 3, 10, 11, 6, 7, 14, 15);
}

// ---- the draw

// Scores are (logit - max) / T + g in float64, g = -log(-log(u)), u = (r + 1/2) / 2^32. Few tokens
// need one: since g > d means -log(u) < exp(-d), and 1 - u <= -log(u), a token can only beat the
// score s if 1 - u < exp(x - s). That is tested for eight tokens at a time in float32, with a
// margin for its rounding, so the outcome is exactly that of scoring every token.
class Draw {
 public:
  explicit Draw(const DrawParams& params) : p_(params) {}

  // x - s for a vector of logits, too large rather than too small.
  vf lead(vf logits) const { return scaled(logits, p_.max, p_.temperature) - splat(bar_); }

  void score(float logit, uint32_t word, int64_t token) {
    const double x = (static_cast<double>(logit) - p_.max) / p_.temperature;
    if (p_.min_p > 0.0 && !(__builtin_exp(x) >= p_.min_p)) return;
    const double u = (static_cast<double>(word) + 0.5) * 0x1p-32;
    const double score = x - __builtin_log(-__builtin_log(u));
    if (!(score > best_.score)) return;  // equal scores: the lower token, which came first, stays
    best_ = {score, token};
    // float32 errs by a few roundings of x, which is below |s| + 23 wherever a token can win, and,
    // at temperatures near the smallest float, by half of the smallest float over T.
    const double magnitude = score < 0 ? -score : score;
    bar_ = static_cast<float>(score - (1e-4 + 1e-6 * magnitude + 0x1p-148 / p_.temperature));
  }

  const DrawResult& best() const { return best_; }

 private:
  const DrawParams& p_;
  DrawResult best_{-__builtin_inf(), -1};
  float bar_ = -kInf;
};

template <class T>
DrawResult draw(const LogitSpan& span, const DrawParams& params) {
  constexpr int kGroups = 4;
  const T* row = static_cast<const T*>(span.row);
  Draw draw(params);
  for (int64_t i = span.begin; i < span.end; i += kGroups * kLanes) {
    vf logits[kGroups];
    vi possible = {};
    for (int g = 0; g < kGroups; ++g) {
      const int64_t at = i + g * kLanes;
      logits[g] = at < span.end ? load_logits(row, at, span.end) : splat(-kInf);
      // 1 - u is at least 2^-33 = exp(-22.9).
      possible |= (logits[g] >= splat(params.lowest)) & (draw.lead(logits[g]) > splat(-23.0f));
    }
    if (!any(possible)) continue;
    vu words[kGroups];
    random_words(static_cast<uint32_t>(i / 4), params.seed, params.position, words);
    for (int g = 0; g < kGroups; ++g) {
      // 2^24 (1 - u), rounded down.
      const vf rest = __builtin_convertvector(bit_cast<vi>(~words[g] >> 8), vf);
      const vf bound = exp(draw.lead(logits[g])) * splat(0x1p24f);
      const vi candidate = (logits[g] >= splat(params.lowest)) & (rest < bound);
      if (!any(candidate)) continue;
      for (int j = 0; j < kLanes; ++j) {
        if (candidate[j]) draw.score(logits[g][j], words[g][j], i + g * kLanes + j);
      }
    }
  }
  return draw.best();
}

}  // namespace

extern const SamplingKernels sampling_kernels = {
    {scan<float>, scan<bf16>, scan<fp16>},
    {histogram<float>, histogram<bf16>, histogram<fp16>},
    {collect<float>, collect<bf16>, collect<fp16>},
    {draw<float>, draw<bf16>, draw<fp16>},
};

}  // namespace fastinfer::cpu::FI_ISA
