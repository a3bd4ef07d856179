// SPDX-License-Identifier: Apache-2.0
//! \file formula.h
//! Made-up tables of any size: the bytes of a synthesized checkpoint's tables, by the formula of
//! builder/formula.py, bit for bit. The words' functions serve kernels too.
#pragma once

#include <cstdint>

#include "engram/row.h"

namespace engram {

//! The arrays of a table, numbered as in builder/checkpoint.py's TENSORS.
enum class FormulaTensor : int32_t {
  kValues = 0,  //!< embed.weight
  kScales = 1,  //!< embed.scale
};

//! Whose bytes.
struct FormulaKey {
  int32_t layer = 0;  //!< the model's number of the layer, 0 or more
  FormulaTensor tensor = FormulaTensor::kValues;
  uint64_t seed = 0;
};

//! What a key comes to.
struct FormulaWords {
  uint64_t state = 0;
  uint64_t mask = 0;
  uint64_t bias = 0;
};

ENGRAM_HOST_DEVICE uint64_t formula_mix(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

ENGRAM_HOST_DEVICE FormulaWords formula_words(const FormulaKey& key) {
  constexpr uint64_t kEachByte = 0x0101010101010101u;
  const auto tensor = static_cast<uint64_t>(key.tensor);
  const uint64_t state =
      formula_mix(formula_mix(key.seed) ^ (static_cast<uint64_t>(key.layer) * 8 + tensor));
  if (key.tensor == FormulaTensor::kValues) return {state, 0xBF * kEachByte, 0};
  return {state, 0x03 * kEachByte, 0x7C * kEachByte};
}

constexpr uint64_t kFormulaStep = 0x9E3779B97F4A7C15u;

//! Word j of a tensor: bytes 8j to 8j+7, lowest first.
ENGRAM_HOST_DEVICE uint64_t formula_word(const FormulaWords& words, uint64_t j) {
  return (formula_mix(words.state + (j + 1) * kFormulaStep) & words.mask) + words.bias;
}

//! Byte i of a tensor.
ENGRAM_HOST_DEVICE uint8_t formula_byte(const FormulaWords& words, int64_t i) {
  const auto place = static_cast<uint64_t>(i);
  return static_cast<uint8_t>(formula_word(words, place / 8) >> (place % 8 * 8));
}

//! Writes bytes [begin, begin + num_bytes) of a tensor to host memory of any alignment; begin may
//! be any byte. On the calling thread.
void fill_formula(const FormulaKey& key, int64_t begin, int64_t num_bytes, uint8_t* to);

}  // namespace engram
