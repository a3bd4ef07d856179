// SPDX-License-Identifier: Apache-2.0
//! \file random.h
//! Reproducible made-up inputs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

namespace engram {

class Random {
 public:
  explicit Random(uint32_t seed) : engine_(seed) {}

  int64_t integer(int64_t lowest, int64_t highest) {
    return std::uniform_int_distribution<int64_t>(lowest, highest)(engine_);
  }
  float real(float lowest, float highest) {
    return std::uniform_real_distribution<float>(lowest, highest)(engine_);
  }
  template <typename T>
  std::vector<T> integers(size_t count, int64_t lowest, int64_t highest) {
    std::vector<T> values(count);
    for (T& value : values) value = static_cast<T>(integer(lowest, highest));
    return values;
  }

 private:
  std::mt19937 engine_;
};

}  // namespace engram
