// SPDX-License-Identifier: Apache-2.0
// project_cpu against sums in double.
#include <algorithm>
#include <cmath>

#include "doctest/doctest.h"
#include "engram/ops.h"
#include "engram/row.h"
#include "ops/float_bits.h"
#include "random.h"

namespace engram {
namespace {

struct ProjectCase {
  int64_t num_tokens;
  int num_in, num_out;
  std::vector<uint16_t> x;
  std::vector<uint8_t> weight, scale;

  ProjectCase(int64_t tokens, int in, int out) : num_tokens(tokens), num_in(in), num_out(out) {
    Random random(static_cast<uint32_t>(tokens + in + out));
    for (int64_t i = 0; i < tokens * in; ++i) x.push_back(bf16_from_float(random.real(-2, 2)));
    weight = random.integers<uint8_t>(static_cast<size_t>(out) * static_cast<size_t>(in), 0, 255);
    for (uint8_t& value : weight) {
      if ((value & 0x7F) == kFp8NanMagnitude) value = 0;
    }
    scale = random.integers<uint8_t>(static_cast<size_t>(ceil_div(out, 32) * in / 32), 110, 130);
  }

  std::vector<uint16_t> run(int num_threads) const {
    std::vector<uint16_t> out(static_cast<size_t>(num_tokens * num_out), 0xABCD);
    engram_project_args args = {};
    args.x = x.data();
    args.weight = weight.data();
    args.scale = scale.data();
    args.out = out.data();
    args.num_tokens = num_tokens;
    args.in_features = num_in;
    args.out_features = num_out;
    project_cpu(args, num_threads);
    return out;
  }

  double weight_at(int out, int in) const {
    const auto block = static_cast<size_t>(out / 32 * (num_in / 32) + in / 32);
    const auto at = static_cast<size_t>(int64_t{out} * num_in + in);
    const double value = float_from_bf16(bf16_from_fp8(weight[at], 127));
    return std::ldexp(value, scale[block] - 127);
  }
};

TEST_CASE("project is within one BF16 rounding and the FP32 sums' error of the exact sum") {
  for (const ProjectCase& test : {ProjectCase(1, 32, 1), ProjectCase(3, 96, 45),
                                  ProjectCase(29, 1184, 70), ProjectCase(500, 64, 33)}) {
    const std::vector<uint16_t> out = test.run(2);
    double worst = 0;
    for (int64_t token = 0; token < test.num_tokens; ++token) {
      for (int o = 0; o < test.num_out; ++o) {
        double sum = 0;
        double magnitudes = 0;
        for (int in = 0; in < test.num_in; ++in) {
          const double product =
              test.weight_at(o, in) * static_cast<double>(float_from_bf16(
                                          test.x[static_cast<size_t>(token * test.num_in + in)]));
          sum += product;
          magnitudes += std::fabs(product);
        }
        const double got = float_from_bf16(out[static_cast<size_t>(token * test.num_out + o)]);
        const double bound =
            std::ldexp(std::fabs(sum), -8) + std::ldexp(magnitudes, -24) * test.num_in;
        worst = std::max(worst, std::fabs(got - sum) / bound);
      }
    }
    CHECK(worst <= 1.0);
  }
}

TEST_CASE("a token's result does not depend on the tokens beside it, nor on threads") {
  const ProjectCase whole(31, 608, 40);
  const std::vector<uint16_t> expected = whole.run(1);
  CHECK(whole.run(3) == expected);
  for (int64_t token = 0; token < 31; ++token) {
    for (const int64_t count : {1, 2, 5, 13}) {
      if (token + count > 31) continue;
      ProjectCase part = whole;
      part.num_tokens = count;
      part.x.assign(whole.x.begin() + token * 608, whole.x.begin() + (token + count) * 608);
      CHECK(part.run(2) == std::vector<uint16_t>(expected.begin() + token * 40,
                                                 expected.begin() + (token + count) * 40));
    }
  }
}

TEST_CASE("every FP8 weight and scale is dequantised exactly") {
  // One input is 1, the rest 0: the output is one weight, whose BF16 bits row.h knows.
  ProjectCase test(32, 32, 256);
  for (size_t i = 0; i < test.x.size(); ++i) test.x[i] = i / 32 == i % 32 ? 0x3F80 : 0;
  for (const int scale : {0, 1, 9, 10, 127, 246, 254, 255}) {
    std::fill(test.scale.begin(), test.scale.end(), static_cast<uint8_t>(scale));
    for (size_t i = 0; i < test.weight.size(); ++i) test.weight[i] = static_cast<uint8_t>(i / 32);
    std::vector<uint16_t> out = test.run(1);
    int wrong = 0;
    for (size_t o = 0; o < 256; ++o) {
      uint16_t expected = bf16_from_fp8(static_cast<uint8_t>(o), static_cast<uint8_t>(scale));
      if (expected == 0x8000 && o == 0x80) expected = 0;         // the sum starts from +0
      if ((expected & 0x7FFF) == kBf16Inf) expected = kBf16Nan;  // infinity times the zeros of x
      wrong += out[o] != expected;
    }
    CHECK(wrong == 0);
  }
}

}  // namespace
}  // namespace engram
