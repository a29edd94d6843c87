// Prints how often a device is looked up, a line for each of the steps in test_kept_of_device.py.
#include "kept_of_device.h"

#include <iostream>
#include <stdexcept>
#include <thread>
#include <vector>

namespace {

using fastinfer::cuda::kept_of_device;

std::atomic<int> calls{0}, failures{0};  // failures: how many calls are yet to fail

int look_up(const char*, int32_t device) {
  ++calls;
  if (failures > 0) {
    --failures;
    throw std::runtime_error("no such device");
  }
  return 100 + device;
}

int look_up_another(const char*, int32_t device) {
  ++calls;
  return 1000 + device;
}

template <int (*kLookUp)(const char*, int32_t)>
void ask(int32_t device, int times) {
  calls = 0;
  for (int i = 0; i < times; ++i) {
    try {
      std::cout << kept_of_device<kLookUp>("op", device) << ' ';
    } catch (const std::runtime_error&) {
      std::cout << "failed ";
    }
  }
  std::cout << "calls " << calls << std::endl;
}

void ask_from_threads(int threads, int devices) {
  calls = 0;
  std::atomic<int> wrong{0};
  std::vector<std::thread> running;
  for (int i = 0; i < threads; ++i) {
    running.emplace_back([&] {
      for (int device = 0; device < devices; ++device) {
        wrong += kept_of_device<&look_up_another>("op", device) != 1000 + device;
      }
    });
  }
  for (std::thread& thread : running) thread.join();
  const bool enough = calls >= devices && calls <= threads * devices;
  std::cout << (enough && wrong == 0) << std::endl;
}

}  // namespace

int main() {
  ask<&look_up>(0, 3);
  ask<&look_up>(63, 3);
  ask<&look_up>(64, 2);
  ask<&look_up>(-1, 2);
  ask<&look_up>(0, 2);
  failures = 1;
  ask<&look_up>(1, 3);
  ask_from_threads(8, 40);
  ask<&look_up_another>(39, 1);
}
