#include "tuned_configs.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <shared_mutex>
#include <tuple>

namespace fastinfer::cuda {
namespace {

// Few and many rows have no bucket in common.
using Key = std::tuple<int, int64_t, int64_t, int64_t, int>;  // bits, tiles of N and K, m, groups
using Table = std::map<Key, LowBitConfig>;

struct Tables {
  std::shared_mutex mutex;
  std::map<std::string, int> numbers;
  std::map<int, Table> of_name;

  // With the mutex held.
  int number_of(const std::string& name) {
    return numbers.try_emplace(name, static_cast<int>(numbers.size()) + 1).first->second;
  }
};

Tables& tables() {
  static Tables instance;
  return instance;
}

Key key_of(const LowBitShape& shape) {
  const int groups = shape.few_rows() ? shape.many_scales() : shape.stage_groups();
  return {shape.bits, shape.n_tiles(), shape.k_tiles(), rows_bucket(shape.m), groups};
}

// Kernels count rows, features and columns in 32 bits.
bool countable(int64_t size) {
  return size >= 1 && size <= INT32_MAX;
}

bool taken(const LowBitShape& shape) {
  const bool known = shape.bits == 2 || shape.bits == 3 || shape.bits == 4 || shape.bits == 8;
  const bool sized = countable(shape.m) && countable(shape.n) && countable(shape.k);
  return known && sized && shape.group_size >= 1 && (shape.few_rows() || !shape.many_scales());
}

}  // namespace

std::atomic<bool> any_tuned_configs = false;

ConfigNumbers numbers_of(const LowBitConfig& config) {
  if (const auto* few = std::get_if<FewRowsConfig>(&config)) {
    return {0, few->shape.rows, few->shape.warps, few->cluster, 0};
  }
  const auto& [shape, cluster] = std::get<ManyRowsConfig>(config);
  return {1, shape.tokens, shape.splits, shape.shared, cluster};
}

std::vector<LowBitConfig> usable_configs(const LowBitShape& shape) {
  std::vector<LowBitConfig> found;
  if (!taken(shape)) return found;
  for (int cluster = 1; cluster <= kMaxCluster; cluster *= 2) {
    if (shape.few_rows()) {
      for (const FewRowsShape cut : kFewRowsShapes) {
        if (few_rows_shape_usable(shape.bits, shape.many_scales(), cut) &&
            few_rows_cluster_usable(cut, cluster, shape.k_tiles())) {
          found.push_back(FewRowsConfig{cut, cluster});
        }
      }
    } else {
      for (const ManyRowsShape cut : kManyRowsShapes) {
        if (many_rows_shape_usable(shape.stage_groups(), cut) &&
            many_rows_cluster_usable(cut, cluster, shape.k_tiles())) {
          found.push_back(ManyRowsConfig{cut, cluster});
        }
      }
    }
  }
  return found;
}

LowBitConfig default_config(const LowBitShape& shape, int sms) {
  const int64_t n_tiles = shape.n_tiles(), k_tiles = shape.k_tiles();
  if (shape.few_rows()) {
    return few_rows_config(shape.bits, shape.many_scales(), n_tiles, k_tiles, sms);
  }
  return many_rows_config(shape.m, n_tiles, k_tiles, shape.stage_groups(), sms);
}

int64_t set_tuned_configs(const std::string& device_name, const std::vector<TunedEntry>& entries) {
  Table table;
  int64_t usable = 0;
  for (const TunedEntry& entry : entries) {
    for (const LowBitConfig& config : usable_configs(entry.shape)) {
      if (numbers_of(config) != entry.config) continue;
      table.insert_or_assign(key_of(entry.shape), config);
      ++usable;
      break;
    }
  }
  Tables& all = tables();
  const std::unique_lock lock(all.mutex);
  all.of_name[all.number_of(device_name)] = std::move(table);
  any_tuned_configs = std::any_of(all.of_name.begin(), all.of_name.end(),
                                  [](const auto& named) { return !named.second.empty(); });
  return usable;
}

int device_name_number(const std::string& device_name) {
  const std::unique_lock lock(tables().mutex);
  return tables().number_of(device_name);
}

template <class Config>
std::optional<Config> find_tuned_config(int device_name, const LowBitShape& shape) {
  const std::shared_lock lock(tables().mutex);
  const auto table = tables().of_name.find(device_name);
  if (table == tables().of_name.end()) return std::nullopt;
  const auto entry = table->second.find(key_of(shape));
  if (entry == table->second.end()) return std::nullopt;
  return std::get<Config>(entry->second);
}

template std::optional<FewRowsConfig> find_tuned_config(int, const LowBitShape&);
template std::optional<ManyRowsConfig> find_tuned_config(int, const LowBitShape&);

}  // namespace fastinfer::cuda
