// Asks the tables of measured configurations, one answer a request. A product is its bits, M, N, K
// and group size; a configuration its five numbers.
//   "bucket" M                                 the bucket
//   "usable" product, SMs                      configurations: the default, then all
//   "set" name, count, (product, config) ...   how many are usable
//   "find" name, product                       the configuration, or "none"
//   "race" product, two configurations         which of them was found by some thread, as two flags
#include "tuned_configs.h"

#include <iostream>
#include <thread>

namespace {

using namespace fastinfer::cuda;

LowBitShape read_shape() {
  LowBitShape shape{};
  std::cin >> shape.bits >> shape.m >> shape.n >> shape.k >> shape.group_size;
  return shape;
}

ConfigNumbers read_config() {
  ConfigNumbers numbers{};
  for (int64_t& number : numbers) std::cin >> number;
  return numbers;
}

void print(const LowBitConfig& config) {
  for (const int64_t number : numbers_of(config)) std::cout << number << ' ';
}

std::optional<LowBitConfig> find(const std::string& name, const LowBitShape& shape) {
  const auto number = [&] { return device_name_number(name); };
  if (shape.few_rows()) return tuned_config<FewRowsConfig>(number, shape);
  return tuned_config<ManyRowsConfig>(number, shape);
}

void race(const LowBitShape& shape, const ConfigNumbers& first, const ConfigNumbers& second) {
  constexpr int kReaders = 4, kTimes = 2000;
  std::atomic<bool> seen_first = false, seen_second = false, seen_else = false, done = false;
  set_tuned_configs("race", {{shape, first}});
  std::vector<std::thread> readers;
  for (int i = 0; i < kReaders; ++i) {
    readers.emplace_back([&] {
      while (!done) {
        const auto found = find("race", shape);
        if (!found) {
          seen_else = true;
        } else {
          (numbers_of(*found) == first ? seen_first : seen_second) = true;
        }
      }
    });
  }
  for (int i = 0; i < kTimes || !(seen_first && seen_second); ++i) {
    set_tuned_configs("race", {{shape, i % 2 ? first : second}});
    std::this_thread::yield();
  }
  done = true;
  for (std::thread& reader : readers) reader.join();
  std::cout << (seen_first && seen_second) << ' ' << seen_else;
}

}  // namespace

int main() {
  std::string request, name;
  while (std::cin >> request) {
    if (request == "bucket") {
      int64_t m;
      std::cin >> m;
      std::cout << rows_bucket(m);
    } else if (request == "usable") {
      const LowBitShape shape = read_shape();
      int sms;
      std::cin >> sms;
      const auto all = usable_configs(shape);
      if (!all.empty()) print(default_config(shape, sms));
      for (const LowBitConfig& config : all) print(config);
    } else if (request == "set") {
      int count;
      std::cin >> name >> count;
      std::vector<TunedEntry> entries;
      for (int i = 0; i < count; ++i) {
        const LowBitShape shape = read_shape();
        entries.push_back({shape, read_config()});
      }
      std::cout << set_tuned_configs(name, entries);
    } else if (request == "find") {
      std::cin >> name;
      const auto found = find(name, read_shape());
      if (found) print(*found);
      if (!found) std::cout << "none";
    } else {
      const LowBitShape shape = read_shape();
      const ConfigNumbers first = read_config();
      race(shape, first, read_config());
    }
    std::cout << '\n';
  }
}
