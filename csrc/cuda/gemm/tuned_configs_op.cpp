// The private ops by which Python reads and sets configurations of low-bit products.
#include <torch/csrc/stable/library.h>

#include <algorithm>

#include "../../torch_utils.h"
#include "tuned_configs.h"

namespace fastinfer::cuda {
namespace {

constexpr int kShapeNumbers = 5;  // bits, M, N, K, group size

const int64_t* read_int64(const Arg& arg) {
  expect_dtype(arg, {ScalarType::Long});
  expect_contiguous(arg);
  return static_cast<const int64_t*>(arg.data);
}

LowBitShape read_shape(const int64_t* numbers) {
  return {static_cast<int>(numbers[0]), numbers[1], numbers[2], numbers[3], numbers[4]};
}

// The usable configurations of a product, [configurations, 5]; the default one is the first.
Tensor gemm_configs(const Tensor& shape, int64_t sms) {
  constexpr const char* kOp = "_gemm_configs";
  const Arg arg = read_arg(kOp, "shape", shape);
  expect_shape(arg, {kShapeNumbers});
  FI_CHECK(sms >= 1, kOp, "sms: expected a positive number, got ", sms);
  const LowBitShape asked = read_shape(read_int64(arg));
  std::vector<ConfigNumbers> found;
  for (const LowBitConfig& config : usable_configs(asked)) found.push_back(numbers_of(config));
  if (!found.empty()) {
    const ConfigNumbers first = numbers_of(default_config(asked, static_cast<int>(sms)));
    std::stable_partition(found.begin(), found.end(),
                          [&](const ConfigNumbers& numbers) { return numbers == first; });
  }
  constexpr int64_t kColumns = std::tuple_size_v<ConfigNumbers>;
  Tensor out = torch::stable::new_empty(shape, {static_cast<int64_t>(found.size()), kColumns});
  auto* to = static_cast<int64_t*>(out.data_ptr());
  for (const ConfigNumbers& numbers : found) to = std::copy(numbers.begin(), numbers.end(), to);
  return out;
}

// rows: [entries, 10], of each its shape and its configuration.
int64_t set_gemm_configs(std::string device_name, const Tensor& rows) {
  constexpr int64_t kColumns = kShapeNumbers + std::tuple_size_v<ConfigNumbers>;
  const Arg arg = read_arg("_set_gemm_configs", "rows", rows);
  expect_rank(arg, 2, "[entries, 10]");
  expect_shape(arg, {arg.size(0), kColumns});
  const int64_t* row = read_int64(arg);
  std::vector<TunedEntry> entries(static_cast<size_t>(arg.size(0)));
  for (TunedEntry& entry : entries) {
    entry.shape = read_shape(row);
    std::copy(row + kShapeNumbers, row + kColumns, entry.config.begin());
    row += kColumns;
  }
  return set_tuned_configs(device_name, entries);
}

}  // namespace
}  // namespace fastinfer::cuda

STABLE_TORCH_LIBRARY_IMPL(fastinfer, CPU, m) {
  m.impl("_gemm_configs", TORCH_BOX(&fastinfer::cuda::gemm_configs));
  m.impl("_set_gemm_configs", TORCH_BOX(&fastinfer::cuda::set_gemm_configs));
}

// The rows that stand for m. Called by fastinfer/_library.py.
extern "C" __attribute__((visibility("default"))) int64_t fastinfer_rows_bucket(int64_t m) {
  return fastinfer::cuda::rows_bucket(m);
}
