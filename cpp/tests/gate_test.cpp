// SPDX-License-Identifier: Apache-2.0
// gate_cpu against the definition in double.
#include "ops/gate.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "doctest/doctest.h"
#include "engram/ops.h"
#include "ops/float_bits.h"
#include "random.h"

namespace engram {
namespace {

constexpr float kEps = 1e-6f;

struct GateCase {
  int64_t num_tokens;
  int copies, size;
  std::vector<float> hidden;
  std::vector<uint16_t> kv, q, k;
  std::vector<uint8_t> mask;

  GateCase(int64_t tokens, int hc_mult, int hidden_size)
      : num_tokens(tokens), copies(hc_mult), size(hidden_size) {
    Random random(static_cast<uint32_t>(tokens + hc_mult + hidden_size));
    const int64_t row = int64_t{copies} * size;
    // Values that BF16 and FP16 both hold.
    const auto value = [&] { return std::ldexp(static_cast<float>(random.integer(-99, 99)), -6); };
    for (int64_t i = 0; i < tokens * row; ++i) hidden.push_back(value());
    for (int64_t i = 0; i < tokens * (row + size); ++i) kv.push_back(bf16_from_float(value()));
    for (int64_t i = 0; i < row; ++i) q.push_back(bf16_from_float(value()));
    for (int64_t i = 0; i < row; ++i) k.push_back(bf16_from_float(value()));
    for (int64_t i = 0; i < tokens; ++i) mask.push_back(i % 5 != 4);
  }

  engram_gate_args args(const void* in, void* out, int dtype) const {
    return {.hidden = in,
            .kv = kv.data(),
            .q_weight = q.data(),
            .k_weight = k.data(),
            .token_mask = mask.data(),
            .out = out,
            .num_tokens = num_tokens,
            .hc_mult = copies,
            .hidden_size = size,
            .dtype = dtype,
            .eps = kEps};
  }

  //! out of element i, and |hidden| + |g * value|, the size that roundings scale with.
  std::pair<double, double> expected(int64_t token, int copy, int i) const {
    const int64_t first = (token * copies + copy) * size;
    const double h = hidden[static_cast<size_t>(first + i)];
    if (!mask[static_cast<size_t>(token)]) return {h, std::fabs(h)};
    const auto kv_at = [&](int64_t at) {
      return double{float_from_bf16(kv[static_cast<size_t>(token * (copies + 1) * size + at)])};
    };
    double dot = 0, hidden_squares = 0, key_squares = 0;
    for (int j = 0; j < size; ++j) {
      const auto weight = static_cast<size_t>(copy * size + j);
      const double value = hidden[static_cast<size_t>(first + j)];
      const double key = kv_at(copy * size + j);
      dot += value * double{float_from_bf16(q[weight])} * double{float_from_bf16(k[weight])} * key;
      hidden_squares += value * value;
      key_squares += key * key;
    }
    const double scaled =
        dot / std::sqrt((hidden_squares / size + kEps) * (key_squares / size + kEps) * size);
    const double root = std::sqrt(std::max(std::fabs(scaled), 1e-6));
    const double g = 1 / (1 + std::exp(scaled < 0 ? root : -root));
    const double added = g * kv_at(copies * size + i);
    return {h + added, std::fabs(h) + std::fabs(added)};
  }

  //! Largest error in units of the dtype's rounding of |hidden| + |g * value|, plus 2^-18 of it for
  //! g itself: FP32 sums of up to 5000 terms and an exponential.
  template <typename Element, typename Load>
  double worst(const std::vector<Element>& out, int mantissa_bits, const Load& load) const {
    double result = 0;
    size_t at = 0;
    for (int64_t token = 0; token < num_tokens; ++token) {
      for (int copy = 0; copy < copies; ++copy) {
        const int step = std::max(1, size / 7);
        for (int i = 0; i < size; i += step) {
          const auto [value, scale] = expected(token, copy, i);
          const double error = std::fabs(double{load(out[at + static_cast<size_t>(i)])} - value);
          const double bound = scale * (std::ldexp(1, -1 - mantissa_bits) + std::ldexp(1, -18));
          result = std::max(result, error == 0 ? 0 : error / bound);
        }
        at += static_cast<size_t>(size);
      }
    }
    return result;
  }
};

TEST_CASE("gate equals its definition in every dtype, in place and with threads") {
  for (const GateCase& test :
       {GateCase(1, 1, 1), GateCase(6, 2, 15), GateCase(40, 4, 640), GateCase(9, 1, 4999)}) {
    std::vector<float> out(test.hidden.size(), -7.0f);
    gate_cpu(test.args(test.hidden.data(), out.data(), ENGRAM_FLOAT32), 3);
    CHECK(test.worst(out, 23, [](float value) { return value; }) <= 1.0);

    std::vector<float> in_place = test.hidden;
    gate_cpu(test.args(in_place.data(), in_place.data(), ENGRAM_FLOAT32), 1);
    CHECK(in_place == out);

    std::vector<uint16_t> bits;
    for (const float value : test.hidden) bits.push_back(bf16_from_float(value));
    gate_cpu(test.args(bits.data(), bits.data(), ENGRAM_BFLOAT16), 2);
    CHECK(test.worst(bits, 7, [](uint16_t value) { return float_from_bf16(value); }) <= 1.0);

    bits.clear();
    for (const float value : test.hidden) bits.push_back(fp16_from_float(value));
    gate_cpu(test.args(bits.data(), bits.data(), ENGRAM_FLOAT16), 2);
    CHECK(test.worst(bits, 10, [](uint16_t value) { return float_from_fp16(value); }) <= 1.0);
  }
}

TEST_CASE("a masked token keeps its bits, also beside NaN and infinite values") {
  GateCase test(2, 1, 4);
  test.mask = {0, 1};
  test.kv.assign(test.kv.size(), kBf16Inf);
  std::vector<uint16_t> hidden = {0x8000, 0x7FA5, 1, 0x3F80, 0x3F80, 0x3F80, 0x3F80, 0x3F80};
  std::vector<uint16_t> out(8);
  gate_cpu(test.args(hidden.data(), out.data(), ENGRAM_BFLOAT16), 1);
  CHECK(std::equal(out.begin(), out.begin() + 4, hidden.begin()));
  CHECK(out[4] == kBf16Nan);
}

TEST_CASE("gate_value at its edges") {
  CHECK(gate_value(0.0f, 1.0f, 1.0f, 4, kEps) == doctest::Approx(1 / (1 + std::exp(-1e-3))));
  CHECK(gate_value(-1e-20f, 1.0f, 1.0f, 4, kEps) == doctest::Approx(1 / (1 + std::exp(1e-3))));
  CHECK(gate_value(1e30f, 1.0f, 1.0f, 4, kEps) == 1.0f);
  CHECK(gate_value(-1e30f, 1.0f, 1.0f, 4, kEps) == 0.0f);
  CHECK(std::isnan(gate_value(NAN, 1.0f, 1.0f, 4, kEps)));
}

}  // namespace
}  // namespace engram
