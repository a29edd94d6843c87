// Thread block clusters: blocks that run together and read each other's shared memory.
#pragma once

#include <cstdint>

namespace fastinfer::cuda::ptx {

// This block's place in its cluster, whose blocks are neighbours in x.
__device__ inline uint32_t cluster_rank() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;\n" : "=r"(rank));
  return rank;
}

__device__ inline uint32_t cluster_size() {
  uint32_t size;
  asm("mov.u32 %0, %%cluster_nctarank;\n" : "=r"(size));
  return size;
}

// All threads of all blocks; what they wrote before is visible to all after.
__device__ inline void cluster_sync() {
  asm volatile(
      "barrier.cluster.arrive.release.aligned;\n"
      "barrier.cluster.wait.acquire.aligned;\n" ::
          : "memory");
}

// The same for those who have only read, which saves a fence of all memory.
__device__ inline void cluster_sync_relaxed() {
  asm volatile(
      "barrier.cluster.arrive.relaxed.aligned;\n"
      "barrier.cluster.wait.aligned;\n" ::
          : "memory");
}

// What a block of the cluster has, in 32 bits, at this address of its shared memory.
template <class T>
__device__ inline T cluster_load(const T* own, uint32_t rank) {
  static_assert(sizeof(T) == 4);
  uint32_t value;
  asm volatile(
      "{\n.reg .u32 remote;\n"
      "mapa.shared::cluster.u32 remote, %1, %2;\n"
      "ld.shared::cluster.u32 %0, [remote];\n}\n"
      : "=r"(value)
      : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(own))), "r"(rank)
      : "memory");
  return reinterpret_cast<const T&>(value);
}

// Four of them, at an address that is a multiple of 16.
template <class T>
__device__ inline void cluster_load_four(const T* own, uint32_t rank, T (&four)[4]) {
  static_assert(sizeof(T) == 4);
  uint32_t bits[4];
  asm volatile(
      "{\n.reg .u32 remote;\n"
      "mapa.shared::cluster.u32 remote, %4, %5;\n"
      "ld.shared::cluster.v4.u32 {%0, %1, %2, %3}, [remote];\n}\n"
      : "=r"(bits[0]), "=r"(bits[1]), "=r"(bits[2]), "=r"(bits[3])
      : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(own))), "r"(rank)
      : "memory");
#pragma unroll
  for (int i = 0; i < 4; ++i) four[i] = reinterpret_cast<const T&>(bits[i]);
}

}  // namespace fastinfer::cuda::ptx
