// SPDX-License-Identifier: Apache-2.0
//! \file check.h
//! What the check_<op> functions share.
#pragma once

#include <cstdint>
#include <initializer_list>

#include "engram/error.h"

namespace engram {

//! An array that a call with tokens needs.
inline void check_array(const void* array, const char* name) {
  ENGRAM_CHECK(array != nullptr, name, ": expected an array, got NULL");
}

inline void check_aligned(const void* array, const char* name, uintptr_t alignment) {
  const uintptr_t rest = reinterpret_cast<uintptr_t>(array) % alignment;
  ENGRAM_CHECK(rest == 0, name, ": expected an address aligned to ", alignment, " bytes, got one ",
               rest, " bytes past it");
}

//! An array that a call with tokens needs, at an address that its elements may have.
template <typename Element>
void check_elements(const Element* array, const char* name) {
  check_array(array, name);
  check_aligned(array, name, alignof(Element));
}

inline void check_range(int64_t value, const char* name, int64_t lowest, int64_t highest) {
  ENGRAM_CHECK(value >= lowest && value <= highest, name, ": expected ", lowest, " to ", highest,
               ", got ", value);
}

inline void check_at_least(int64_t value, const char* name, int64_t lowest) {
  ENGRAM_CHECK(value >= lowest, name, ": expected ", lowest, " or more, got ", value);
}

inline void check_multiple(int64_t value, const char* name, int64_t factor) {
  ENGRAM_CHECK(value > 0 && value % factor == 0, name, ": expected a positive multiple of ", factor,
               ", got ", value);
}

//! The bytes of an array must be countable: kernels multiply sizes without looking.
inline void check_product(std::initializer_list<int64_t> sizes, const char* name,
                          int64_t highest = INT64_MAX) {
  int64_t product = 1;
  for (const int64_t size : sizes) {
    ENGRAM_CHECK(!__builtin_mul_overflow(product, size, &product) && product <= highest, name,
                 ": expected a product of sizes up to ", highest, ", got more");
  }
}

}  // namespace engram
