// setmaxnreg: registers move between the warpgroups of a block.
#pragma once

namespace fastinfer::cuda::ptx {

// Registers of a warpgroup's threads, taken from or given to the others of the block.
template <int kRegisters>
__device__ inline void registers_increase() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ inline void registers_decrease() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace fastinfer::cuda::ptx
