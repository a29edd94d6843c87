// What TMA and wgmma see of shared memory.
#pragma once

namespace fastinfer::cuda::ptx {

// Orders this thread's earlier accesses of shared memory before later ones by TMA and wgmma.
__device__ inline void fence_async_proxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

}  // namespace fastinfer::cuda::ptx
