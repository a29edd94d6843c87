// How the host module refuses an argument: operation, argument, what was expected, what came.

#pragma once

#include <stdexcept>
#include <string>

namespace fastinfer {

// Becomes ValueError in Python.
[[noreturn]] inline void refuse(const std::string& op, const std::string& argument,
                                const std::string& expected, const std::string& got) {
  throw std::invalid_argument(op + ": " + argument + ": expected " + expected + ", got " + got);
}

[[noreturn]] inline void refuse(const std::string& op, const std::string& argument,
                                const std::string& expected, long long got) {
  refuse(op, argument, expected, std::to_string(got));
}

}  // namespace fastinfer
