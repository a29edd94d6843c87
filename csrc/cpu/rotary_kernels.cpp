// Rotary position embedding of one token's heads; compiled once per instruction set.
#include "rotary_kernels.h"

#include "vec.h"

namespace fastinfer::cpu::FI_ISA {
namespace {

typedef double vd __attribute__((vector_size(kLanes * sizeof(double))));

// (x1, x2) turned. For float32 elements the rounding of a product, as large as that of the result
// itself, would put the result more than one step from the true value: there the products are
// exact.
template <class T>
inline void turn(vf* x1, vf* x2, vf cos, vf sin) {
  if constexpr (sizeof(T) == sizeof(float)) {
    const vd a = __builtin_convertvector(*x1, vd), b = __builtin_convertvector(*x2, vd);
    const vd c = __builtin_convertvector(cos, vd), s = __builtin_convertvector(sin, vd);
    *x1 = __builtin_convertvector(a * c - b * s, vf);
    *x2 = __builtin_convertvector(a * s + b * c, vf);
  } else {
    const vf a = *x1, b = *x2;
    *x1 = a * cos - b * sin;
    *x2 = a * sin + b * cos;
  }
}

template <class T>
inline void turn_pair(T* first, T* second, float cos, float sin) {
  vf x1 = splat(to_float(*first));
  vf x2 = splat(to_float(*second));
  turn<T>(&x1, &x2, splat(cos), splat(sin));
  from_float(x1[0], first);
  from_float(x2[0], second);
}

// Pairs (i, i + pairs).
template <class T>
void rotate_neox(const RotaryArgs& args) {
  const int64_t pairs = args.pairs;
  for (int64_t h = 0; h < args.heads; ++h) {
    T* x = static_cast<T*>(args.x) + h * args.head_stride;
    int64_t i = 0;
    for (; i + kLanes <= pairs; i += kLanes) {
      vf x1 = load(x + i);
      vf x2 = load(x + i + pairs);
      turn<T>(&x1, &x2, load(args.cos + i), load(args.sin + i));
      store(x + i, x1);
      store(x + i + pairs, x2);
    }
    for (; i < pairs; ++i) turn_pair(x + i, x + i + pairs, args.cos[i], args.sin[i]);
  }
}

// Pairs (2i, 2i + 1).
template <class T>
void rotate_interleaved(const RotaryArgs& args) {
  const int64_t pairs = args.pairs;
  for (int64_t h = 0; h < args.heads; ++h) {
    T* x = static_cast<T*>(args.x) + h * args.head_stride;
    int64_t i = 0;
    for (; i + kLanes <= pairs; i += kLanes) {
      const vf low = load(x + 2 * i);
      const vf high = load(x + 2 * i + kLanes);
      vf x1 = __builtin_shufflevector(low, high, 0, 2, 4, 6, 8, 10, 12, 14);
      vf x2 = __builtin_shufflevector(low, high, 1, 3, 5, 7, 9, 11, 13, 15);
      turn<T>(&x1, &x2, load(args.cos + i), load(args.sin + i));
      store(x + 2 * i, __builtin_shufflevector(x1, x2, 0, 8, 1, 9, 2, 10, 3, 11));
      store(x + 2 * i + kLanes, __builtin_shufflevector(x1, x2, 4, 12, 5, 13, 6, 14, 7, 15));
    }
    for (; i < pairs; ++i) turn_pair(x + 2 * i, x + 2 * i + 1, args.cos[i], args.sin[i]);
  }
}

}  // namespace

extern const RotaryKernels rotary_kernels = {{
    {rotate_neox<float>, rotate_neox<bf16>, rotate_neox<fp16>},
    {rotate_interleaved<float>, rotate_interleaved<bf16>, rotate_interleaved<fp16>},
}};

}  // namespace fastinfer::cpu::FI_ISA
