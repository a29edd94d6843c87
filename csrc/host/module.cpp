// fastinfer._host: the only file here that knows Python. The documentation of each name is in
// fastinfer/_host.pyi.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "block_manager.h"
#include "errors.h"
#include "step_pack.h"

namespace py = pybind11;

namespace fastinfer {
namespace {

using Ids = std::vector<int64_t>;

// A lock around the manager, because packing lets go of the interpreter lock. Whoever holds the
// manager's lock never waits for the interpreter lock, so the two cannot deadlock.
class SharedManager {
 public:
  SharedManager(int64_t num_blocks, int64_t block_size, bool enable_prefix_caching, int hash_bits)
      : manager_(num_blocks, block_size, enable_prefix_caching, hash_bits) {}

  template <typename Function>
  auto with(Function&& function) {
    std::lock_guard lock(mutex_);
    return function(manager_);
  }

 private:
  std::mutex mutex_;
  BlockManager manager_;
};

// A binding that calls one of the manager's methods under the lock.
template <typename Result, typename... Args>
auto locked(Result (BlockManager::*method)(Args...)) {
  return [method](SharedManager& self, Args... args) {
    return self.with([&](BlockManager& m) { return (m.*method)(std::move(args)...); });
  };
}

template <typename Result, typename... Args>
auto locked(Result (BlockManager::*method)(Args...) const) {
  return [method](SharedManager& self, Args... args) {
    return self.with([&](const BlockManager& m) { return (m.*method)(std::move(args)...); });
  };
}

// A binding that reads something from one sequence.
template <typename Function>
auto of_sequence(const char* op, Function read) {
  return [op, read](SharedManager& self, int64_t seq_id) {
    return self.with([&](const BlockManager& m) { return read(m.sequence(seq_id, op)); });
  };
}

std::byte* checked_buffer(const py::buffer_info& info, int64_t nbytes) {
  const char* const op = "BlockManager.pack";
  py::ssize_t stride = info.itemsize;
  for (py::ssize_t i = info.ndim - 1; i >= 0; stride *= info.shape[i--]) {
    if (info.shape[i] > 1 && info.strides[i] != stride) {
      refuse(op, "buffer", "C-contiguous memory",
             "stride " + std::to_string(info.strides[i]) + " in dimension " + std::to_string(i));
    }
  }
  if (info.size * info.itemsize < nbytes) {
    refuse(op, "buffer", "at least layout.nbytes = " + std::to_string(nbytes) + " bytes",
           info.size * info.itemsize);
  }
  if (const auto misalignment = reinterpret_cast<uintptr_t>(info.ptr) % alignof(int64_t)) {
    refuse(op, "buffer", "an address that is a multiple of 8",
           "remainder " + std::to_string(misalignment));
  }
  return static_cast<std::byte*>(info.ptr);
}

int64_t reserve_each(SharedManager& self, const Ids& seq_ids, const Ids& num_tokens) {
  return self.with([&](BlockManager& m) { return m.reserve_each(seq_ids, num_tokens); });
}

void record(SharedManager& self, const Ids& seq_ids, const Ids& num_computed, const Ids& tokens) {
  self.with([&](BlockManager& m) { m.record(seq_ids, num_computed, tokens); });
}

int pack(SharedManager& self, const py::buffer& buffer, const StepLayout& layout,
         const Ids& seq_ids, const Ids& starts, const Ids& counts, const Ids& num_logits,
         const Ids& padding) {
  const py::buffer_info info = buffer.request(/*writable=*/true);
  std::byte* const memory = checked_buffer(info, layout.nbytes);
  py::gil_scoped_release no_gil;
  return self.with([&](const BlockManager& m) {
    const std::vector<StepPart> parts = step_parts(m, seq_ids, starts, counts, num_logits, padding);
    check_fits(layout, parts, m.block_size());
    return fill_step(memory, layout, parts, m.block_size());
  });
}

}  // namespace
}  // namespace fastinfer

PYBIND11_MODULE(_host, m) {
  using namespace fastinfer;
  using namespace py::literals;
  m.doc() = "KV block allocation, the prefix cache, and the packing of a step.";

  py::class_<StepLayout>(m, "StepLayout")
      .def_readonly("num_tokens", &StepLayout::num_tokens)
      .def_readonly("num_seqs", &StepLayout::num_seqs)
      .def_readonly("max_blocks", &StepLayout::max_blocks)
      .def_readonly("num_logits", &StepLayout::num_logits)
      .def_readonly("input_ids", &StepLayout::input_ids)
      .def_readonly("positions", &StepLayout::positions)
      .def_readonly("slot_mapping", &StepLayout::slot_mapping)
      .def_readonly("logits_indices", &StepLayout::logits_indices)
      .def_readonly("seeds", &StepLayout::seeds)
      .def_readonly("draw_positions", &StepLayout::draw_positions)
      .def_readonly("temperature", &StepLayout::temperature)
      .def_readonly("top_p", &StepLayout::top_p)
      .def_readonly("min_p", &StepLayout::min_p)
      .def_readonly("top_k", &StepLayout::top_k)
      .def_readonly("cu_seqlens_q", &StepLayout::cu_seqlens_q)
      .def_readonly("seq_lens", &StepLayout::seq_lens)
      .def_readonly("block_table", &StepLayout::block_table)
      .def_readonly("nbytes", &StepLayout::nbytes);
  m.def("step_layout", &step_layout, "num_tokens"_a, "num_seqs"_a, "max_blocks"_a, "num_logits"_a);

  py::class_<SharedManager>(m, "BlockManager")
      .def(py::init<int64_t, int64_t, bool, int>(), "num_blocks"_a, "block_size"_a = 16,
           "enable_prefix_caching"_a = true, py::kw_only(), "hash_bits"_a = 64)
      .def_property_readonly("num_blocks", locked(&BlockManager::num_blocks))
      .def_property_readonly("block_size", locked(&BlockManager::block_size))
      .def_property_readonly("enable_prefix_caching", locked(&BlockManager::enable_prefix_caching))
      .def_property_readonly("num_free", locked(&BlockManager::num_free))
      .def_property_readonly("num_cached", locked(&BlockManager::num_cached))
      .def_property_readonly("num_used", locked(&BlockManager::num_used))
      .def_property_readonly("num_available", locked(&BlockManager::num_available))
      .def_property_readonly("num_sequences", locked(&BlockManager::num_sequences))
      .def("add", locked(&BlockManager::add), "seq_id"_a, "tokens"_a)
      .def("append", locked(&BlockManager::append), "seq_id"_a, "token"_a)
      .def("set_sampling", locked(&BlockManager::set_sampling), "seq_id"_a, "temperature"_a,
           "top_k"_a, "top_p"_a, "min_p"_a, "seed"_a)
      .def("match_prefix", locked(&BlockManager::match_prefix), "seq_id"_a)
      .def("reserve", locked<bool, int64_t, int64_t>(&BlockManager::reserve), "seq_id"_a,
           "num_tokens"_a)
      .def("reserve_each", &reserve_each, "seq_ids"_a, "num_tokens"_a)
      .def("record", &record, "seq_ids"_a, "num_computed"_a, "tokens"_a)
      .def("commit", locked<void, int64_t, int64_t>(&BlockManager::commit), "seq_id"_a,
           "num_computed"_a)
      .def("release", locked(&BlockManager::release), "seq_id"_a)
      .def("remove", locked(&BlockManager::remove), "seq_id"_a)
      .def("contains", locked(&BlockManager::contains), "seq_id"_a)
      .def(
          "num_tokens",
          of_sequence("BlockManager.num_tokens", [](const Sequence& s) { return s.tokens.size(); }),
          "seq_id"_a)
      .def("num_computed",
           of_sequence("BlockManager.num_computed",
                       [](const Sequence& s) { return s.num_computed; }),
           "seq_id"_a)
      .def("tokens", of_sequence("BlockManager.tokens", [](const Sequence& s) { return s.tokens; }),
           "seq_id"_a)
      .def("block_table",
           of_sequence("BlockManager.block_table", [](const Sequence& s) { return s.blocks; }),
           "seq_id"_a)
      .def("ref_count", locked(&BlockManager::ref_count), "block"_a)
      .def("pack", &pack, "buffer"_a, "layout"_a, "seq_ids"_a, "starts"_a, "counts"_a,
           "num_logits"_a, "padding"_a = Ids())
      .def("check_integrity", locked(&BlockManager::check_integrity));
}
