// What every op uses at its door: a view of a tensor's metadata read once, and checks whose
// messages name the op, the argument, what was expected and what came. Kernels never see this
// header, only raw pointers, sizes and strides.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>

namespace fastinfer {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// std::invalid_argument crosses the stable ABI as ValueError.
template <class... Parts>
[[noreturn]] void fail(const char* op, const Parts&... parts) {
  std::ostringstream text;
  text << "fastinfer::" << op << ": ";
  (text << ... << parts);
  throw std::invalid_argument(text.str());
}

#define FI_CHECK(condition, op, ...)                      \
  do {                                                    \
    if (!(condition)) ::fastinfer::fail(op, __VA_ARGS__); \
  } while (0)

inline int64_t element_size(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Double:
    case ScalarType::Long: return 8;
    case ScalarType::Float:
    case ScalarType::Int: return 4;
    case ScalarType::Half:
    case ScalarType::BFloat16: return 2;
    default: return 1;
  }
}

inline const char* dtype_name(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Float: return "float32";
    case ScalarType::Half: return "float16";
    case ScalarType::BFloat16: return "bfloat16";
    case ScalarType::Double: return "float64";
    case ScalarType::Int: return "int32";
    case ScalarType::Long: return "int64";
    case ScalarType::Char: return "int8";
    case ScalarType::Byte: return "uint8";
    case ScalarType::Bool: return "bool";
    case ScalarType::Float8_e4m3fn: return "float8_e4m3fn";
    case ScalarType::Float8_e5m2: return "float8_e5m2";
    default: return "another dtype";
  }
}

// A tensor's metadata, read once through the C ABI; sizes and strides stay valid while the tensor
// lives.
struct Arg {
  const char* op;
  const char* name;
  void* data;
  int64_t rank;
  const int64_t* sizes;
  const int64_t* strides;
  ScalarType dtype;
  int32_t device_type;
  int32_t device_index;

  int64_t size(int64_t dim) const { return sizes[dim < 0 ? dim + rank : dim]; }
  int64_t stride(int64_t dim) const { return strides[dim < 0 ? dim + rank : dim]; }
  int64_t numel() const {
    int64_t n = 1;
    for (int64_t i = 0; i < rank; ++i) n *= sizes[i];
    return n;
  }
};

inline Arg read_arg(const char* op, const char* name, const Tensor& tensor) {
  Arg arg{op, name, tensor.data_ptr(), tensor.dim(), nullptr, nullptr, tensor.scalar_type(), 0, 0};
  arg.sizes = tensor.sizes().data();
  arg.strides = tensor.strides().data();
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(tensor.get(), &arg.device_type));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(tensor.get(), &arg.device_index));
  return arg;
}

inline std::string shape_text(const int64_t* sizes, int64_t rank) {
  std::ostringstream text;
  text << '[';
  for (int64_t i = 0; i < rank; ++i) text << (i ? ", " : "") << sizes[i];
  text << ']';
  return text.str();
}

inline std::string shape_text(const Arg& arg) {
  return shape_text(arg.sizes, arg.rank);
}

inline void expect_rank(const Arg& arg, int64_t rank, const char* layout) {
  FI_CHECK(arg.rank == rank, arg.op, arg.name, ": expected ", rank, " dimensions ", layout,
           ", got shape ", shape_text(arg));
}

inline void expect_dtype(const Arg& arg, std::initializer_list<ScalarType> accepted) {
  for (ScalarType dtype : accepted) {
    if (arg.dtype == dtype) return;
  }
  std::ostringstream text;
  for (auto it = accepted.begin(); it != accepted.end(); ++it) {
    text << (it == accepted.begin() ? "" : " or ") << dtype_name(*it);
  }
  fail(arg.op, arg.name, ": expected dtype ", text.str(), ", got ", dtype_name(arg.dtype));
}

inline void expect_float(const Arg& arg) {
  expect_dtype(arg, {ScalarType::Float, ScalarType::BFloat16, ScalarType::Half});
}

inline void expect_same_dtype(const Arg& arg, const Arg& like) {
  FI_CHECK(arg.dtype == like.dtype, arg.op, arg.name, ": expected dtype ", dtype_name(like.dtype),
           " as ", like.name, ", got ", dtype_name(arg.dtype));
}

inline void expect_shape(const Arg& arg, std::initializer_list<int64_t> sizes) {
  bool same = arg.rank == static_cast<int64_t>(sizes.size());
  for (int64_t i = 0; same && i < arg.rank; ++i) same = arg.sizes[i] == sizes.begin()[i];
  FI_CHECK(same, arg.op, arg.name, ": expected shape ",
           shape_text(sizes.begin(), static_cast<int64_t>(sizes.size())), ", got ",
           shape_text(arg));
}

inline void expect_same_shape(const Arg& arg, const Arg& like) {
  bool same = arg.rank == like.rank;
  for (int64_t i = 0; same && i < arg.rank; ++i) same = arg.sizes[i] == like.sizes[i];
  FI_CHECK(same, arg.op, arg.name, ": expected shape ", shape_text(like), " as ", like.name,
           ", got ", shape_text(arg));
}

// The innermost dimension must be dense; every other stride is free.
inline void expect_dense_last(const Arg& arg) {
  FI_CHECK(arg.rank >= 1, arg.op, arg.name, ": expected at least 1 dimension, got a scalar");
  FI_CHECK(arg.stride(-1) == 1 || arg.size(-1) <= 1, arg.op, arg.name,
           ": expected stride 1 in the last dimension, got stride ", arg.stride(-1));
}

// A tensor that is written must not map two elements to one address.
inline void expect_writable(const Arg& arg) {
  for (int64_t i = 0; i < arg.rank; ++i) {
    FI_CHECK(arg.strides[i] != 0 || arg.sizes[i] <= 1, arg.op, arg.name,
             ": expected a tensor without expanded dimensions since it is written, got stride 0 in "
             "dimension ",
             i);
  }
}

inline bool is_contiguous(const Arg& arg) {
  int64_t expected = 1;
  for (int64_t i = arg.rank - 1; i >= 0; --i) {
    if (arg.strides[i] != expected && arg.sizes[i] > 1) return false;
    expected *= arg.sizes[i];
  }
  return true;
}

inline void expect_contiguous(const Arg& arg) {
  FI_CHECK(is_contiguous(arg), arg.op, arg.name, ": expected a contiguous tensor, got strides ",
           shape_text(arg.strides, arg.rank));
}

// A tensor that is written must not share memory with another argument. Decided, as torch does, for
// tensors that begin at one address and for contiguous ones; interleaved views pass.
inline void expect_no_overlap(const Arg& written, const Arg& other) {
  if (written.numel() == 0 || other.numel() == 0) return;
  const char* a = static_cast<const char*>(written.data);
  const char* b = static_cast<const char*>(other.data);
  const bool extents_meet = is_contiguous(written) && is_contiguous(other) &&
                            a < b + other.numel() * element_size(other.dtype) &&
                            b < a + written.numel() * element_size(written.dtype);
  FI_CHECK(a != b && !extents_meet, written.op, written.name, ": expected no memory shared with ",
           other.name, " since it is written, got overlapping tensors");
}

// The same, but the very same view is fine: each element is read before it is written.
inline void expect_same_or_no_overlap(const Arg& written, const Arg& other) {
  bool same = written.data == other.data && written.rank == other.rank;
  for (int64_t i = 0; same && i < written.rank; ++i) {
    same = written.sizes[i] == other.sizes[i] &&
           (written.strides[i] == other.strides[i] || written.sizes[i] <= 1);
  }
  if (!same) expect_no_overlap(written, other);
}

inline void expect_same_device(const Arg& arg, const Arg& like) {
  FI_CHECK(arg.device_type == like.device_type && arg.device_index == like.device_index, arg.op,
           arg.name, ": expected the same device as ", like.name, " (type ", like.device_type,
           ", index ", like.device_index, "), got type ", arg.device_type, ", index ",
           arg.device_index);
}

}  // namespace fastinfer
