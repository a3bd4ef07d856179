// SPDX-License-Identifier: Apache-2.0
#include "table/formula.h"

#include <algorithm>
#include <cstring>

#include "multiversion.h"

namespace engram {
namespace {

struct FillWords {
  static ENGRAM_HOST_DEVICE void run(const FormulaWords& words, uint64_t first, int64_t count,
                                     uint8_t* to) {
    FormulaWords at = words;  // its own copy, which what is written cannot change
    at.state += first * kFormulaStep;
    for (int64_t i = 0; i < count; ++i, at.state += kFormulaStep) {
      const uint64_t word = formula_word(at, 0);
      memcpy(to + 8 * i, &word, sizeof(word));
    }
  }
};

//! Bytes [begin, begin + num_bytes) of a word.
void copy_part(uint64_t word, int64_t begin, int64_t num_bytes, uint8_t* to) {
  memcpy(to, reinterpret_cast<const uint8_t*>(&word) + begin, static_cast<size_t>(num_bytes));
}

}  // namespace

void fill_formula(const FormulaKey& key, int64_t begin, int64_t num_bytes, uint8_t* to) {
  if (num_bytes == 0) return;  // and nothing to write to, perhaps
  const FormulaWords words = formula_words(key);
  auto j = static_cast<uint64_t>(begin / 8);
  if (begin % 8 != 0) {
    const int64_t head = std::min(8 - begin % 8, num_bytes);
    copy_part(formula_word(words, j++), begin % 8, head, to);
    to += head;
    num_bytes -= head;
  }
  const int64_t count = num_bytes / 8;
  run_widest<FillWords>(words, j, count, to);
  copy_part(formula_word(words, j + static_cast<uint64_t>(count)), 0, num_bytes % 8,
            to + 8 * count);
}

}  // namespace engram
