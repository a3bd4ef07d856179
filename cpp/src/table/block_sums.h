// SPDX-License-Identifier: Apache-2.0
//! \file block_sums.h
//! Checksums of an array, block by block: builder/block_sums.py in C++.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

namespace engram {

//! A block is 64 MiB of an array, counted from its beginning; the last one is shorter.
constexpr int64_t kBlockBytes = 64 << 20;

//! XXH3-128 of bytes that come in pieces.
class BlockSum {
 public:
  BlockSum();
  ~BlockSum();
  BlockSum(const BlockSum&) = delete;
  BlockSum& operator=(const BlockSum&) = delete;

  void add(const uint8_t* bytes, int64_t num_bytes);
  //! Of what was added so far: 32 hex digits, as in a store's manifest.
  std::string hex() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

//! Of bytes that are all there.
std::string block_sum(const uint8_t* bytes, int64_t num_bytes);

}  // namespace engram
