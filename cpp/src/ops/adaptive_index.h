// SPDX-License-Identifier: Apache-2.0
//! \file adaptive_index.h
//! The words by which lookups that run at once keep rows in a GPU's memory and find them there, for
//! CPU and GPU alike.
//!
//! A slot has a word, its row's id below and above it how often the slot was written. Who writes a
//! slot first puts a locked word in the place of the one it knows (compare and swap; who finds
//! another word there leaves the slot alone), then the row, then the word of the new row. Who reads
//! a slot reads its word, the row, and the word again: if that is the same, so is the row, for no
//! word ever comes back. Nobody waits for anybody: a row that is not there, or no longer, is the
//! table's.
#pragma once

#include <cstdint>

#include "hot_index.h"

namespace engram {

constexpr int kAdaptiveWays = 4;        //!< slots of a bucket
constexpr int kNoWay = kAdaptiveWays;   //!< none of them
constexpr int32_t kLockedKey = -2;      //!< of a slot that is being written
constexpr uint64_t kEmptySlot = ~0ull;  //!< word of a slot that was never written: kNoKey

ENGRAM_HOST_DEVICE int32_t slot_key(uint64_t word) {
  return static_cast<int32_t>(static_cast<uint32_t>(word));
}
ENGRAM_HOST_DEVICE uint32_t slot_turn(uint64_t word) { return static_cast<uint32_t>(word >> 32); }
//! What follows `word` in a slot: kLockedKey, then the id of the row that was written.
ENGRAM_HOST_DEVICE uint64_t next_word(uint64_t word, int32_t key) {
  return uint64_t{slot_turn(word) + 1} << 32 | static_cast<uint32_t>(key);
}

struct alignas(32) AdaptiveBucket {
  uint64_t words[kAdaptiveWays];
};

//! Where a row is, or kNoWay.
ENGRAM_HOST_DEVICE int find_way(const AdaptiveBucket& bucket, int32_t id) {
  int way = kNoWay;
  for (int i = 0; i < kAdaptiveWays; ++i) {
    if (slot_key(bucket.words[i]) == id) way = i;
  }
  return way;
}

//! Where a row that is not there may be written: in the place of the one that was written first.
//! kNoWay while anybody writes in the bucket, who most often writes the same row.
ENGRAM_HOST_DEVICE int oldest_way(const AdaptiveBucket& bucket) {
  int way = 0;
  uint32_t first = slot_turn(bucket.words[0]);
  bool is_written = false;
  for (int i = 0; i < kAdaptiveWays; ++i) {
    is_written |= slot_key(bucket.words[i]) == kLockedKey;
    const uint32_t turn = slot_turn(bucket.words[i]);
    if (static_cast<int32_t>(turn - first) >= 0) continue;
    way = i;
    first = turn;
  }
  return is_written ? kNoWay : way;
}

}  // namespace engram
