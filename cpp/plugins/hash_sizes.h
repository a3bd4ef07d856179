// SPDX-License-Identifier: Apache-2.0
//! \file hash_sizes.h
//! What every history of EngramHash asks of its layout. Letters: hash_plugin.cpp.
#pragma once

#include "engram/layout.h"
#include "plugin.h"

namespace engram::plugins {

inline void check_pad_token_id(int32_t pad_token_id) {
  ENGRAM_CHECK(pad_token_id >= 0, "field 'pad_token_id': expected at least 0, found ",
               pad_token_id);
}

inline void check_orders(const Sizes& sizes) {
  const int64_t orders = sizes['N'];
  ENGRAM_CHECK(orders < 0 || (orders >= 2 && orders <= kMaxNgramSize),
               "multipliers: expected 2 to ", kMaxNgramSize, " in dimension 1, found ", orders);
  ENGRAM_CHECK(orders < 0 || sizes['C'] < 0 || (sizes['C'] > 0 && sizes['C'] % (orders - 1) == 0),
               "primes: expected a multiple of ", orders - 1, " in dimension 1, found ",
               sizes['C']);
}

inline void check_vocabulary(const Sizes& sizes, int32_t pad_token_id) {
  ENGRAM_CHECK(sizes['V'] < 0 || pad_token_id < sizes['V'], "field 'pad_token_id': expected below ",
               sizes['V'], " (token_map), found ", pad_token_id);
}

}  // namespace engram::plugins
