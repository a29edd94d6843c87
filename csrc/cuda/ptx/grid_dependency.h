// Programmatic dependent launch: the next kernel of a stream is brought up before this one is done.
#pragma once

namespace fastinfer::cuda::ptx {

// Nothing that an earlier kernel writes may be read, and nothing it reads written, before this; to
// bring it into L2, which sees later writes, is fine.
__device__ inline void grid_dependency_wait() {
  asm volatile("griddepcontrol.wait;\n" ::: "memory");
}

// The next kernel may start once every block has come here or has ended.
__device__ inline void grid_dependency_launch() {
  asm volatile("griddepcontrol.launch_dependents;\n" ::: "memory");
}

}  // namespace fastinfer::cuda::ptx
