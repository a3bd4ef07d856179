// SPDX-License-Identifier: Apache-2.0
//! \file hot_index.h
//! Where a hot row lies, for CPU and GPU alike: one bucket, a sector of memory, is all that is read
//! to find it or to know that it is not there.
#pragma once

#include <cstdint>

#include "engram/engram.h"
#include "engram/row.h"

namespace engram {

constexpr int kHotWays = 8;      //!< rows of a bucket
constexpr int32_t kNoKey = -1;   //!< of a slot that has no row
constexpr int64_t kNoSlot = -1;  //!< of a row that is not hot

struct alignas(32) HotBucket {
  int32_t keys[kHotWays];
};

//! The bucket of a row id: its product with the golden ratio, whose high bits spread neighbours.
ENGRAM_HOST_DEVICE int64_t hot_bucket(int32_t id, int64_t num_buckets) {
  const uint64_t mixed = uint64_t{static_cast<uint32_t>(id)} * 0x9E3779B97F4A7C15u >> 32;
  return static_cast<int64_t>(mixed * static_cast<uint64_t>(num_buckets) >> 32);
}

//! Place of a row id among the hot rows, or kNoSlot. NOTE: that of kNoKey may be any free place.
ENGRAM_HOST_DEVICE int64_t find_hot_slot(const engram_hot_rows& hot, int32_t id) {
  if (hot.num_buckets == 0) return kNoSlot;
  const int64_t place = hot_bucket(id, hot.num_buckets);
  const HotBucket bucket = reinterpret_cast<const HotBucket*>(hot.keys)[place];
  int way = kHotWays;
  for (int i = 0; i < kHotWays; ++i) {
    if (bucket.keys[i] == id) way = i;
  }
  return way == kHotWays ? kNoSlot : row_offset(place, kHotWays) + way;
}

}  // namespace engram
