// CPU: sample.
#include "../checks/sampling.h"

#include <torch/csrc/stable/library.h>

#include <cmath>
#include <limits>
#include <tuple>
#include <vector>

#include "../functional.h"
#include "../portable/portable.h"
#include "elements.h"
#include "parallel.h"
#include "sampling_kernels.h"

namespace fastinfer::cpu {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

// Rows are cut into chunks of this size whatever the number of threads, so that sums, and with them
// tokens, do not depend on it.
constexpr int64_t kChunk = 16384;

// What a pass costs for each token, in elements touched: looking for the largest runs at the speed
// of memory, and threads would only be waited for.
constexpr double kScanCost = 1.0 / 16;
constexpr double kPassCost = 1.0;

// ---- a row of logits, and the kernels run over its chunks

struct Row {
  const void* data;
  int64_t size;
  int element;  // index into the kernel tables

  int64_t chunks() const { return (size + kChunk - 1) / kChunk; }
  LogitSpan chunk(int64_t c) const { return {data, c * kChunk, std::min((c + 1) * kChunk, size)}; }

  // `cost` is the work of a token, in elements touched.
  template <class F>
  void for_chunks(double cost, const F& f) const {
    parallel_for(chunks(), static_cast<int64_t>(cost * kChunk), [&](int64_t begin, int64_t end) {
      for (int64_t c = begin; c < end; ++c) f(c, chunk(c));
    });
  }
};

ScanResult scan(const Row& row, bool with_min) {
  const auto kernel = sampling_kernels().scan[row.element];
  std::vector<ScanResult> parts(row.chunks());
  row.for_chunks(kScanCost,
                 [&](int64_t c, const LogitSpan& span) { parts[c] = kernel(span, with_min); });
  ScanResult result = parts[0];
  for (size_t c = 1; c < parts.size(); ++c) {
    if (parts[c].max > result.max) {
      result.max = parts[c].max;
      result.argmax = parts[c].argmax;
    }
    result.min = std::min(result.min, parts[c].min);
    result.nan |= parts[c].nan;
  }
  return result;
}

DrawResult draw(const Row& row, const DrawParams& params) {
  const auto kernel = sampling_kernels().draw[row.element];
  std::vector<DrawResult> parts(row.chunks());
  row.for_chunks(kPassCost,
                 [&](int64_t c, const LogitSpan& span) { parts[c] = kernel(span, params); });
  DrawResult result = parts[0];
  for (const DrawResult& part : parts) {
    if (part.score > result.score) result = part;
  }
  return result;
}

// ---- thresholds of top-k and top-p
//
// Both keep every value whose strictly larger ones amount to less than a limit: in number for
// top-k, in probability for top-p. The smallest value kept is found without sorting the row: a
// histogram of the logits says in which bin it lies, and the values of that bin alone are binned
// again, more finely, or sorted when they are few.

enum class Amount { kCount, kMass };

Binning make_binning(float max, float temperature, float high, double range) {
  const double width_inverse = range > 0.0 ? (Binning::kBins - 1) / range : 0.0;
  return {max, temperature, high,
          static_cast<float>(std::min<double>(width_inverse, std::numeric_limits<float>::max()))};
}

// The first bin, from the top, that brings the amount up to `left`; what lies above it is taken
// from `left`. The last bin in use if rounding leaves the sum short.
int find_bin(const Histogram& h, Amount amount, double* left) {
  int last = 0;
  for (int bin = 0; bin < Binning::kBins; ++bin) {
    if (h.counts[bin] == 0) continue;
    const double inside = amount == Amount::kCount ? h.counts[bin] : h.masses[bin];
    last = bin;
    if (inside >= *left) return bin;
    *left -= inside;
  }
  return last;
}

double mass_of(float value, float max, float temperature) {
  return std::exp((static_cast<double>(value) - max) / temperature);
}

// The smallest of `values` whose strictly larger ones amount to less than `left`.
float smallest_kept(std::vector<float> values, float max, float temperature, Amount amount,
                    double left) {
  constexpr size_t kFew = 128;
  const SamplingKernels& kernels = sampling_kernels();
  while (values.size() > kFew) {
    const auto [low, high] = std::minmax_element(values.begin(), values.end());
    if (*low == *high) return *low;
    const Binning binning =
        make_binning(max, temperature, *high, static_cast<double>(*high) - *low);
    const LogitSpan span{values.data(), 0, static_cast<int64_t>(values.size())};
    Histogram h{};
    kernels.histogram[0](span, binning, amount == Amount::kMass, &h);
    std::vector<float> inside(values.size());
    inside.resize(kernels.collect[0](span, binning, find_bin(h, amount, &left), inside.data()));
    const bool narrower = inside.size() < values.size();
    values = std::move(inside);
    if (!narrower) break;  // closer together than bins can be
  }
  std::sort(values.begin(), values.end(), std::greater<float>());
  for (float value : values) {
    left -= amount == Amount::kCount ? 1.0 : mass_of(value, max, temperature);
    if (left <= 0.0) return value;
  }
  return values.back();
}

// The histogram of a row, kept by chunk as well so that a bin can be collected in parallel.
class RowBins {
 public:
  RowBins(const Row& row, const Binning& binning, bool with_mass)
      : row_(row), binning_(binning), parts_(row.chunks()), total_{} {
    const auto kernel = sampling_kernels().histogram[row.element];
    row.for_chunks(kPassCost, [&](int64_t c, const LogitSpan& span) {
      kernel(span, binning_, with_mass, &parts_[c]);
    });
    for (const Histogram& part : parts_) {
      for (int bin = 0; bin < Binning::kBins; ++bin) {
        total_.counts[bin] += part.counts[bin];
        total_.masses[bin] += part.masses[bin];
      }
    }
  }

  std::vector<float> collect(int bin) const {
    std::vector<int64_t> starts(parts_.size() + 1);
    for (size_t c = 0; c < parts_.size(); ++c) starts[c + 1] = starts[c] + parts_[c].counts[bin];
    std::vector<float> values(starts.back());
    const auto kernel = sampling_kernels().collect[row_.element];
    row_.for_chunks(kPassCost, [&](int64_t c, const LogitSpan& span) {
      if (starts[c + 1] > starts[c]) kernel(span, binning_, bin, values.data() + starts[c]);
    });
    return values;
  }

  Histogram& total() { return total_; }

 private:
  const Row& row_;
  Binning binning_;
  std::vector<Histogram> parts_;
  Histogram total_;
};

// The smallest logit that top-k and top-p keep; -inf if they keep all.
float lowest_kept(const Row& row, const ScanResult& range, float temperature, int64_t top_k,
                  float top_p) {
  // Bins are fine where the probability is: down to exp(-40) of the largest.
  const double width =
      std::min(static_cast<double>(range.max) - range.min, 40.0 * static_cast<double>(temperature));
  RowBins bins(row, make_binning(range.max, temperature, range.max, width), top_p < 1.0f);
  Histogram& h = bins.total();
  float lowest = -kInf;

  int64_t candidates = 0;
  for (int bin = 0; bin < Binning::kBins; ++bin) candidates += h.counts[bin];
  if (top_k > 0 && top_k < candidates) {
    double left = static_cast<double>(top_k);
    const int boundary = find_bin(h, Amount::kCount, &left);
    const std::vector<float> values = bins.collect(boundary);
    lowest = smallest_kept(values, range.max, temperature, Amount::kCount, left);
    // Top-p is of the distribution over the survivors.
    h.masses[boundary] = 0.0;
    for (float value : values) {
      if (value >= lowest) h.masses[boundary] += mass_of(value, range.max, temperature);
    }
    for (int bin = boundary + 1; bin < Binning::kBins; ++bin) {
      h.counts[bin] = 0;
      h.masses[bin] = 0.0;
    }
  }
  if (top_p < 1.0f) {
    double total = 0.0;
    for (int bin = 0; bin < Binning::kBins; ++bin) total += h.masses[bin];
    double left = static_cast<double>(top_p) * total;
    std::vector<float> values = bins.collect(find_bin(h, Amount::kMass, &left));
    std::erase_if(values, [&](float value) { return value < lowest; });
    lowest = smallest_kept(std::move(values), range.max, temperature, Amount::kMass, left);
  }
  return lowest;
}

// ---- rows

void check_parameters(const SampleProblem& p) {
  constexpr const char* op = "sample";
  for (int64_t r = 0; r < p.rows; ++r) {
    if (p.temperature != nullptr) {
      FI_CHECK(p.temperature[r] >= 0.0f, op, "temperature: expected numbers >= 0, got ",
               p.temperature[r], " for row ", r);
      FI_CHECK(p.temperature[r] == 0.0f || p.seeds != nullptr, op,
               "seeds: expected a tensor since the temperature of row ", r, " is ",
               p.temperature[r], ", got none");
      FI_CHECK(p.temperature[r] == 0.0f || p.positions != nullptr, op,
               "positions: expected a tensor since the temperature of row ", r, " is ",
               p.temperature[r], ", got none");
    }
    FI_CHECK(p.top_p == nullptr || p.top_p[r] > 0.0f, op, "top_p: expected numbers > 0, got ",
             p.top_p[r], " for row ", r);
    FI_CHECK(p.min_p == nullptr || (p.min_p[r] >= 0.0f && p.min_p[r] <= 1.0f), op,
             "min_p: expected numbers in [0, 1], got ", p.min_p[r], " for row ", r);
  }
}

void sample_row(const SampleProblem& p, int64_t r) {
  const int64_t element_size = p.dtype == ScalarType::Float ? 4 : 2;
  const Row row{static_cast<const char*>(p.logits) + r * p.logits_stride * element_size, p.vocab,
                element_index(p.dtype)};
  const float temperature = p.temperature == nullptr ? 0.0f : p.temperature[r];
  const int64_t top_k = p.top_k == nullptr || p.top_k[r] >= p.vocab ? 0 : p.top_k[r];
  const float top_p = p.top_p == nullptr ? 1.0f : p.top_p[r];
  const bool truncated = temperature > 0.0f && (top_k > 0 || top_p < 1.0f);

  const ScanResult range = scan(row, truncated);
  p.valid[r] = !range.nan && range.max > -kInf;
  p.token_ids[r] = range.argmax;
  // An infinite logit wins whatever the noise.
  if (temperature == 0.0f || !p.valid[r] || range.max == kInf) return;

  DrawParams params{range.max,
                    temperature,
                    -kInf,
                    p.min_p == nullptr ? 0.0 : p.min_p[r],
                    static_cast<uint64_t>(p.seeds[r]),
                    static_cast<uint64_t>(p.positions[r])};
  if (truncated) params.lowest = lowest_kept(row, range, temperature, top_k, top_p);
  if (params.min_p > 0.0) {
    // Lets the kernel skip whole groups; a little low, since the kernel decides exactly.
    const double drop = -std::log(params.min_p) * temperature;
    const double bound = range.max - drop - 1e-6 * (drop + std::fabs(range.max));
    params.lowest = std::max(params.lowest, static_cast<float>(bound));
  }
  p.token_ids[r] = draw(row, params).token;
}

void sample_out(const Tensor& logits, const std::optional<Tensor>& temperature,
                const std::optional<Tensor>& top_k, const std::optional<Tensor>& top_p,
                const std::optional<Tensor>& min_p, const std::optional<Tensor>& seeds,
                const std::optional<Tensor>& positions, const Tensor& token_ids,
                const Tensor& valid) {
  const SampleProblem p =
      check_sample(logits, temperature, top_k, top_p, min_p, seeds, positions, token_ids, valid);
  check_parameters(p);
  // Threads share the chunks of a row if there are fewer rows than threads, and else the rows.
  if (p.rows < static_cast<int64_t>(torch::stable::get_num_threads())) {
    for (int64_t r = 0; r < p.rows; ++r) sample_row(p, r);
    return;
  }
  const double cost = p.temperature == nullptr ? kScanCost : kPassCost;
  parallel_for(p.rows, static_cast<int64_t>(cost * p.vocab), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) sample_row(p, r);
  });
}

}  // namespace
}  // namespace fastinfer::cpu

STABLE_TORCH_LIBRARY_IMPL(fastinfer, CPU, m) {
  if (fastinfer::portable_forced_on_cpu()) return;
  using namespace fastinfer::cpu;
  m.impl("sample", TORCH_BOX(&fastinfer::functional::sample<&sample_out>));
  m.impl("sample.out", TORCH_BOX(&sample_out));
}
