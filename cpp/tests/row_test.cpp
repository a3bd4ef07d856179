// SPDX-License-Identifier: Apache-2.0
#include "engram/row.h"

#include <cmath>
#include <cstring>
#include <set>

#include "doctest/doctest.h"

namespace engram {
namespace {

//! What the bits mean, by way of double, which holds every product exactly.
double fp8_value(uint8_t bits) {
  const int exponent = (bits >> 3) & 15;
  const int fraction = bits & 7;
  const double magnitude =
      exponent == 0 ? std::ldexp(fraction, -9) : std::ldexp(8 + fraction, exponent - 10);
  return bits & 0x80 ? -magnitude : magnitude;
}

//! The nearest of the BF16 values; double to float is exact or infinite for products of ours.
uint16_t bf16_nearest(double value) {
  const float narrow = static_cast<float>(value);
  uint32_t bits;
  std::memcpy(&bits, &narrow, sizeof(bits));
  return static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

bool is_nan(int value, int scale) { return (value & 0x7F) == 0x7F || scale == 255; }

TEST_CASE("bf16_from_fp8 rounds the exact product once") {
  int wrong = 0;
  for (int scale = 0; scale < 256; ++scale) {
    for (int value = 0; value < 256; ++value) {
      const auto bits = static_cast<uint8_t>(value);
      const uint16_t expected =
          is_nan(value, scale) ? kBf16Nan : bf16_nearest(std::ldexp(fp8_value(bits), scale - 127));
      wrong += bf16_from_fp8(bits, static_cast<uint8_t>(scale)) != expected;
    }
  }
  CHECK(wrong == 0);
}

TEST_CASE("bf16_from_fp8_normal agrees for every normal scale") {
  int wrong = 0;
  for (int scale = 0; scale < 256; ++scale) {
    const auto scale_bits = static_cast<uint8_t>(scale);
    if (!is_normal_scale(scale_bits)) continue;
    for (int value = 0; value < 256; ++value) {
      const auto bits = static_cast<uint8_t>(value);
      wrong += bf16_from_fp8_normal(bits, scale_bits) != bf16_from_fp8(bits, scale_bits);
    }
  }
  CHECK(wrong == 0);
}

TEST_CASE("staged_scale_offset visits each byte once") {
  constexpr int64_t kRows = 256;
  constexpr int64_t kScales = 12;
  std::set<int64_t> offsets;
  for (int64_t row = 0; row < kRows; ++row) {
    for (int64_t scale = 0; scale < kScales; ++scale) {
      offsets.insert(staged_scale_offset(row, scale, kScales));
    }
  }
  CHECK(static_cast<int64_t>(offsets.size()) == staged_scale_bytes(kRows, kScales));
  CHECK(*offsets.begin() == 0);
  CHECK(*offsets.rbegin() == staged_scale_bytes(kRows, kScales) - 1);
}

TEST_CASE("row_offset passes 32 bits") {
  CHECK(row_offset(384006167, 256) == int64_t{384006167} * 256);
}

}  // namespace
}  // namespace engram
