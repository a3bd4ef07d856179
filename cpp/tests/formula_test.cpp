// SPDX-License-Identifier: Apache-2.0
#include "table/formula.h"

#include <string>
#include <vector>

#include "doctest/doctest.h"
#include "table/block_sums.h"

namespace engram {
namespace {

//! From builder/formula.py: bytes 0 to 23, bytes 2^40+5 to 2^40+20, and the block sum of bytes 5 to
//! 2^20+17.
struct Known {
  FormulaKey key;
  const char* head;
  const char* far;
  const char* sum;
};

const Known kKnown[] = {{{1, FormulaTensor::kValues, 0},
                         "ba952bb0903418ad0b9634a9b7241bab17ba9230af07a9ae",
                         "b20abb28bb961b1a848ab3842a282c95",
                         "a36ea6d6a33668f6863f531667389e87"},
                        {{1, FormulaTensor::kScales, 0},
                         "7e7c7c7c7f7e7c7c7e7e7d7c7e7f7c7e7c7d7e7c7f7c7c7e",
                         "7d7e7f7c7c7c7f7e7d7d7d7f7e7e7d7d",
                         "effbdfb966f68dac4043a3000d2672e3"},
                        {{14, FormulaTensor::kValues, 7},
                         "3c0e8eaba53d1ab9bf3d32a118348bbb3481bd323785ac84",
                         "1d172d03a9118cb5aa27a53faa1534bf",
                         "a4032e923893b57fcf898516df9908d4"},
                        {{40, FormulaTensor::kScales, 9223372036854788153u},
                         "7c7d7f7c7f7c7d7f7e7d7f7f7f7e7f7c7e7c7e7c7d7d7e7f",
                         "7e7c7c7e7c7d7c7f7d7d7e7c7e7e7c7c",
                         "5eaf3356f20758c0f2f5647a37796bdf"}};

std::vector<uint8_t> filled(const FormulaKey& key, int64_t begin, int64_t num_bytes) {
  std::vector<uint8_t> bytes(static_cast<size_t>(num_bytes));
  fill_formula(key, begin, num_bytes, bytes.data());
  return bytes;
}

std::string hex(const std::vector<uint8_t>& bytes) {
  std::string text;
  for (const uint8_t byte : bytes) {
    text += "0123456789abcdef"[byte / 16];
    text += "0123456789abcdef"[byte % 16];
  }
  return text;
}

TEST_CASE("the formula's bytes are those of builder/formula.py") {
  for (const Known& known : kKnown) {
    CHECK(hex(filled(known.key, 0, 24)) == known.head);
    CHECK(hex(filled(known.key, (int64_t{1} << 40) + 5, 16)) == known.far);
    const std::vector<uint8_t> many = filled(known.key, 5, (1 << 20) + 13);
    CHECK(block_sum(many.data(), static_cast<int64_t>(many.size())) == known.sum);
  }
}

TEST_CASE("the formula fills any range, and nothing beside it") {
  const FormulaKey key{3, FormulaTensor::kValues, 11};
  const FormulaWords words = formula_words(key);
  for (const int64_t begin : {0, 1, 7, 8, 123}) {
    for (const int64_t num_bytes : {0, 1, 3, 8, 9, 64, 200}) {
      std::vector<uint8_t> expected(static_cast<size_t>(num_bytes) + 2, 0xEE);
      std::vector<uint8_t> found = expected;
      for (int64_t i = 0; i < num_bytes; ++i) {
        expected[static_cast<size_t>(1 + i)] = formula_byte(words, begin + i);
      }
      fill_formula(key, begin, num_bytes, found.data() + 1);
      CHECK(found == expected);
    }
  }
}

}  // namespace
}  // namespace engram
