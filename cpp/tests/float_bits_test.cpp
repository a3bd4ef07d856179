// SPDX-License-Identifier: Apache-2.0
#include "ops/float_bits.h"

#include <cmath>

#include "doctest/doctest.h"

namespace engram {
namespace {

//! Value of a format with this many fraction bits and exponent bias, by way of double.
double value_of(int magnitude, int fraction_bits, int bias) {
  const int exponent = magnitude >> fraction_bits;
  const int fraction = magnitude & ((1 << fraction_bits) - 1);
  if (exponent == 0) return std::ldexp(fraction, 1 - bias - fraction_bits);
  return std::ldexp((1 << fraction_bits) + fraction, exponent - bias - fraction_bits);
}

TEST_CASE("FP16 and BF16 bits to float and back") {
  int wrong = 0;
  for (int magnitude = 0; magnitude < 0x7C00; ++magnitude) {
    const auto bits = static_cast<uint16_t>(magnitude);
    const auto negative = static_cast<uint16_t>(bits | 0x8000);
    wrong += static_cast<double>(float_from_fp16(bits)) != value_of(magnitude, 10, 15);
    wrong += fp16_from_float(float_from_fp16(bits)) != bits;
    wrong += fp16_from_float(float_from_fp16(negative)) != negative;
  }
  for (int magnitude = 0; magnitude < 0x7F80; ++magnitude) {
    const auto bits = static_cast<uint16_t>(magnitude);
    wrong += static_cast<double>(float_from_bf16(bits)) != value_of(magnitude, 7, 127);
    wrong += bf16_from_float(float_from_bf16(bits)) != bits;
  }
  CHECK(wrong == 0);
}

TEST_CASE("halfway goes to even, past halfway goes up") {
  int wrong = 0;
  for (int magnitude = 0; magnitude < 0x7BFF; ++magnitude) {
    const double low = value_of(magnitude, 10, 15);
    const double high = value_of(magnitude + 1, 10, 15);
    const auto halfway = static_cast<float>((low + high) / 2);
    wrong += fp16_from_float(halfway) != magnitude + (magnitude & 1);
    wrong += fp16_from_float(std::nextafter(halfway, INFINITY)) != magnitude + 1;
    wrong += fp16_from_float(std::nextafter(halfway, 0.0f)) != magnitude;
  }
  for (uint32_t magnitude = 0; magnitude < 0x7F7F; ++magnitude) {
    const uint32_t halfway = (magnitude << 16) + 0x8000;
    wrong += bf16_from_float(float_from_bits(halfway)) != magnitude + (magnitude & 1);
    wrong += bf16_from_float(float_from_bits(halfway + 1)) != magnitude + 1;
    wrong += bf16_from_float(float_from_bits(halfway - 1)) != magnitude;
  }
  CHECK(wrong == 0);
}

TEST_CASE("infinities, overflow and NaN") {
  CHECK(fp16_from_float(65519.0f) == 0x7BFF);
  CHECK(fp16_from_float(65520.0f) == 0x7C00);
  CHECK(fp16_from_float(-1e30f) == 0xFC00);
  CHECK(fp16_from_float(-NAN) == kFp16Nan);
  CHECK(std::isinf(float_from_fp16(0xFC00)));
  CHECK(std::isnan(float_from_fp16(0x7C01)));
  CHECK(bf16_from_float(INFINITY) == kBf16Inf);
  CHECK(bf16_from_float(3.4e38f) == kBf16Inf);
  CHECK(bf16_from_float(-NAN) == kBf16Nan);
  CHECK(bf16_from_float(float_from_bits(0x7F800001)) == kBf16Nan);
}

}  // namespace
}  // namespace engram
