// The activations that may follow a matrix product; plain, for kernels as well.
#pragma once

namespace fastinfer {

// In the order of fastinfer/triton_kernels/activation.py.
enum class Activation { kNone, kSilu, kGelu, kGeluTanh };

}  // namespace fastinfer
