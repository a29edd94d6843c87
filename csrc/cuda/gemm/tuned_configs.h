// Configurations of low-bit products that were measured on a device (`fastinfer tune`) and go
// before those that few_rows_config and many_rows_config choose. Host code without CUDA, in every
// build: Python hands tables over when it is imported, whatever the machine has.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "low_bit_config.h"

namespace fastinfer::cuda {

using LowBitConfig = std::variant<FewRowsConfig, ManyRowsConfig>;

// As Python sees one: 0, rows, warps, cluster and 0 for few rows; 1, tokens, splits, shared and
// cluster for many.
using ConfigNumbers = std::array<int64_t, 5>;

ConfigNumbers numbers_of(const LowBitConfig& config);

// All that the kernels have for a product, whatever device they run on; none for a product that
// they do not take.
std::vector<LowBitConfig> usable_configs(const LowBitShape& shape);

// What is chosen without a measurement, for a product that the kernels take.
LowBitConfig default_config(const LowBitShape& shape, int sms);

// ---- the tables, one for each name of a device; safe to use from several threads

struct TunedEntry {
  LowBitShape shape;  // m stands for all rows of its bucket
  ConfigNumbers config;
};

// Replaces the table of the devices of this name. Entries that are not usable are left out, so
// that a wrong table costs time at most. Of those that stand for the same products (their sizes in
// tiles, bucket and kind of groups are equal) the last holds. Returns how many are usable.
int64_t set_tuned_configs(const std::string& device_name, const std::vector<TunedEntry>& entries);

// A name's number, from 1 on: what tables are looked up by.
int device_name_number(const std::string& device_name);

// What was measured for a product, if anything, for its kernel's kind of configuration.
template <class Config>
std::optional<Config> find_tuned_config(int device_name, const LowBitShape& shape);

extern std::atomic<bool> any_tuned_configs;

// Most have no table: then a launch reads one flag. device_name: makes the number.
template <class Config, class DeviceName>
std::optional<Config> tuned_config(const DeviceName& device_name, const LowBitShape& shape) {
  if (!any_tuned_configs.load(std::memory_order_relaxed)) return std::nullopt;
  return find_tuned_config<Config>(device_name(), shape);
}

}  // namespace fastinfer::cuda
