// Prints how often the driver is asked for shared memory, a line for each of the steps in
// test_launch.py.
#include "launch.h"

#include <iostream>
#include <thread>
#include <vector>

namespace {

using fastinfer::cuda::allow_shared_memory;

void first_kernel() {}
void second_kernel() {}
void third_kernel() {}

template <auto kKernel, int kBytes = 100>
void ask(int device, int times = 1) {
  calls = 0;
  bool allowed = true;
  for (int i = 0; i < times; ++i) {
    allowed &= allow_shared_memory<kKernel, kBytes>(device) == cudaSuccess;
  }
  std::cout << calls << (allowed ? " allowed" : " failed") << std::endl;
}

void ask_from_threads(int threads, int devices) {
  calls = 0;
  std::atomic<int> failed{0};
  std::vector<std::thread> running;
  for (int i = 0; i < threads; ++i) {
    running.emplace_back([&] {
      for (int device = 0; device < devices; ++device) {
        failed += allow_shared_memory<&third_kernel, 100>(device) != cudaSuccess;
      }
    });
  }
  for (std::thread& thread : running) thread.join();
  const bool enough = calls >= devices && calls <= threads * devices;
  std::cout << (enough && failed == 0) << std::endl;
}

}  // namespace

int main() {
  ask<&first_kernel>(0, 3);
  ask<&first_kernel>(1, 3);
  ask<&first_kernel>(63, 3);
  ask<&first_kernel>(64, 3);
  ask<&first_kernel>(1000, 3);
  ask<&first_kernel>(0, 3);
  failures = 2;
  ask<&second_kernel, 200>(0);
  ask<&second_kernel, 200>(0);
  ask<&second_kernel, 200>(0, 3);
  std::cout << last_bytes << std::endl;
  ask_from_threads(8, 40);
  ask<&third_kernel>(39, 3);
}
