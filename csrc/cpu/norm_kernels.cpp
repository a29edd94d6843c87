// RMSNorm and LayerNorm over rows; compiled once per instruction set.
#include "norm_kernels.h"

#include "vec.h"

namespace fastinfer::cpu::FI_ISA {
namespace {

constexpr int kUnroll = 4;
constexpr int64_t kStep = kUnroll * kLanes;

// sum over a row of term(element), with kUnroll independent chains so that the adder's latency is
// hidden.
template <class T, class Term>
inline float reduce(const T* row, int64_t n, Term term) {
  vf acc[kUnroll] = {};
  int64_t i = 0;
  for (; i + kStep <= n; i += kStep) {
    for (int u = 0; u < kUnroll; ++u) acc[u] += term(load(row + i + u * kLanes));
  }
  for (; i + kLanes <= n; i += kLanes) acc[0] += term(load(row + i));
  float total = sum((acc[0] + acc[1]) + (acc[2] + acc[3]));
  for (; i < n; ++i) total += term(splat(to_float(row[i])))[0];
  return total;
}

template <class T>
inline void add_rows(T* residual, const T* x, int64_t n) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(residual + i, load(residual + i) + load(x + i));
  for (; i < n; ++i) from_float(to_float(residual[i]) + to_float(x[i]), residual + i);
}

// out = (row - mean) * rstd * weight + bias
template <class T>
inline void scale_row(const T* row, T* out, const float* weight, const float* bias, int64_t n,
                      float mean, float rstd) {
  int64_t i = 0;
  if (bias != nullptr) {
    for (; i + kLanes <= n; i += kLanes) {
      store(out + i,
            (load(row + i) - splat(mean)) * splat(rstd) * load(weight + i) + load(bias + i));
    }
  } else {
    for (; i + kLanes <= n; i += kLanes) {
      store(out + i, (load(row + i) - splat(mean)) * splat(rstd) * load(weight + i));
    }
  }
  for (; i < n; ++i) {
    const float y =
        (to_float(row[i]) - mean) * rstd * weight[i] + (bias != nullptr ? bias[i] : 0.0f);
    from_float(y, out + i);
  }
}

template <class T, bool kCentre>
void norm(const NormArgs& args, int64_t begin, int64_t end) {
  const int64_t n = args.hidden;
  for (int64_t r = begin; r < end; ++r) {
    const T* row = static_cast<const T*>(args.x) + args.x_rows.offset(r);
    T* out = static_cast<T*>(args.out) + args.out_rows.offset(r);
    if (args.residual != nullptr) {
      T* residual = static_cast<T*>(args.residual) + args.residual_rows.offset(r);
      add_rows(residual, row, n);
      row = residual;
    }
    float mean = 0.0f;
    if (kCentre) mean = reduce(row, n, [](vf v) { return v; }) / static_cast<float>(n);
    const float square =
        reduce(row, n, [mean](vf v) { return (v - splat(mean)) * (v - splat(mean)); });
    const float rstd = 1.0f / __builtin_sqrtf(square / static_cast<float>(n) + args.eps);
    scale_row(row, out, args.weight, args.bias, n, mean, rstd);
  }
}

}  // namespace

extern const NormKernels norm_kernels = {
    {norm<float, false>, norm<bf16, false>, norm<fp16, false>},
    {norm<float, true>, norm<bf16, true>, norm<fp16, true>},
};

}  // namespace fastinfer::cpu::FI_ISA
