// Merges attention results row by row; compiled once per instruction set.
#include "merge_kernels.h"

#include "merge_row.h"

namespace fastinfer::cpu::FI_ISA {
namespace {

constexpr int64_t kMaxValueDim = 512;

template <class In, class Out>
void merge(const MergeArgs& args, int64_t begin, int64_t end) {
  float acc[kMaxValueDim];
  for (int64_t row = begin; row < end; ++row) {
    const int64_t head = row % args.heads;
    const int64_t token = row / args.heads % args.tokens;
    const int64_t sequence = row / args.heads / args.tokens;
    const In* outs = static_cast<const In*>(args.outs) + sequence * args.outs_sequence +
                     token * args.outs_token + head * args.outs_head;
    const float* lses =
        args.lses + sequence * args.lses_sequence + token * args.lses_token + head * args.lses_head;
    MergeState state;
    for (int64_t s = 0; s < args.splits; ++s) {
      merge_fold(&state, acc, outs + s * args.outs_split, lses[s * args.lses_split],
                 args.value_dim);
    }
    Out* out = static_cast<Out*>(args.out) + sequence * args.out_sequence + token * args.out_token +
               head * args.out_head;
    const float* sink = args.sinks == nullptr ? nullptr : args.sinks + head;
    args.lse[sequence * args.lse_sequence + token * args.lse_token + head * args.lse_head] =
        merge_finish(state, acc, sink, args.value_dim, out);
  }
}

}  // namespace

extern const MergeKernels merge_kernels = {
    {merge<float, float>, merge<bf16, bf16>, merge<fp16, fp16>},
    {merge<float, float>, merge<float, bf16>, merge<float, fp16>},
};

}  // namespace fastinfer::cpu::FI_ISA
