// What is looked up of a device and kept.
#pragma once

#include <atomic>
#include <cstdint>

namespace fastinfer::cuda {

// What `look_up` finds of a device, which must not be 0: later calls, from any thread, cost one
// load.
template <int (*look_up)(const char* op, int32_t device_index)>
int kept_of_device(const char* op, int32_t device_index) {
  constexpr int kRemembered = 64;  // devices; any others are looked up each time
  static constinit std::atomic<int> known[kRemembered] = {};
  if (device_index < 0 || device_index >= kRemembered) return look_up(op, device_index);
  // Nothing else is read by way of the number, and threads that come here at once find the same.
  int found = known[device_index].load(std::memory_order_relaxed);
  if (found == 0) {
    found = look_up(op, device_index);
    known[device_index].store(found, std::memory_order_relaxed);
  }
  return found;
}

}  // namespace fastinfer::cuda
