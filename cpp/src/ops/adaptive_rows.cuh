// SPDX-License-Identifier: Apache-2.0
//! \file adaptive_rows.cuh
//! How the warps of a lookup find rows in the adaptive part and keep others there. Lane i has to do
//! with row i of the few that its warp reads at once; all lanes move the bytes.
#pragma once

#include "adaptive_index.h"
#include "engram/engram.h"
#include "ptx.cuh"
#include "table_row.cuh"

namespace engram {

//! What a lane knows of a slot.
struct Slot {
  int64_t place = kNoSlot;
  uint64_t word = kEmptySlot;
};

//! Where a row was found, or where it may be kept.
struct AdaptivePlace {
  bool is_found = false;
  Slot slot;
};

__device__ __forceinline__ AdaptivePlace find_adaptive(const engram_adaptive_rows& rows,
                                                       int32_t id) {
  const int64_t first = row_offset(hot_bucket(id, rows.num_buckets), kAdaptiveWays);
  AdaptiveBucket bucket;
  static_assert(kAdaptiveWays == 4, "two loads");
  load_acquire(rows.slots + first, &bucket.words[0], &bucket.words[1]);
  load_acquire(rows.slots + first + 2, &bucket.words[2], &bucket.words[3]);
  const int found = find_way(bucket, id);
  const int way = found == kNoWay ? oldest_way(bucket) : found;
  AdaptivePlace place;
  place.is_found = found != kNoWay;
#pragma unroll
  for (int i = 0; i < kAdaptiveWays; ++i) {
    if (i == way) place.slot = {first + i, bucket.words[i]};
  }
  return place;
}

//! Whether the row that was read at a slot is the one that was found there. Behind fence_warp().
__device__ __forceinline__ bool is_unchanged(const engram_adaptive_rows& rows, const Slot& slot) {
  return load_relaxed(rows.slots + slot.place) == slot.word;
}

//! A chunk of a row that another warp may be writing.
__device__ __forceinline__ uint2 load_kept_chunk(const uint8_t* row, int chunk) {
  const uint64_t both = load_relaxed(reinterpret_cast<const uint64_t*>(row) + chunk);
  return {static_cast<uint32_t>(both), static_cast<uint32_t>(both >> 32)};
}

//! All that the warp's lanes did to memory comes before what any of them does next, for whoever
//! does so too. All lanes call it.
__device__ __forceinline__ void fence_warp() {
  __syncwarp();
  fence_gpu();
  __syncwarp();
}

//! The slot that a lane has locked, whose row its warp writes.
class KeptRow {
 public:
  //! Locks a slot, unless another warp came first, for the row that the warp is about to store; the
  //! one that it stored before is found from here on. All lanes call it.
  __device__ __forceinline__ void turn_to(const engram_adaptive_rows& rows, const Slot& slot,
                                          int32_t id) {
    Slot next;
    if (slot.place != kNoSlot) {
      auto* const word = reinterpret_cast<unsigned long long*>(rows.slots + slot.place);
      const uint64_t locked = next_word(slot.word, kLockedKey);
      if (atomicCAS(word, slot.word, locked) == slot.word) {
        next = {slot.place, next_word(slot.word, id)};
      }
    }
    fence_warp();
    if (slot_.place != kNoSlot) store_relaxed(rows.slots + slot_.place, slot_.word);
    slot_ = next;
  }
  //! Behind the last row. All lanes call it.
  __device__ __forceinline__ void finish(const engram_adaptive_rows& rows) {
    if (__any_sync(kWholeWarp, slot_.place != kNoSlot)) turn_to(rows, {}, kNoKey);
  }
  //! kNoSlot: its row is not kept.
  __device__ __forceinline__ int64_t place() const { return slot_.place; }

 private:
  Slot slot_;  // with the word that it is to have
};

//! Stores one chunk of a row at the place that a lane has locked for it.
__device__ __forceinline__ void keep_row_chunk(const engram_adaptive_rows& rows, int head_dim,
                                               int64_t place, int chunk, uint2 values,
                                               uint8_t scale) {
  auto* const to = reinterpret_cast<uint64_t*>(rows.values + row_offset(place, head_dim));
  store_relaxed(to + chunk, uint64_t{values.y} << 32 | values.x);
  const int first = chunk * kRowChunkBytes;
  if (rows.scales == nullptr || first % kScaleBlock != 0) return;
  store_relaxed(rows.scales + row_offset(place, scales_per_row(head_dim)) + first / kScaleBlock,
                scale);
}

}  // namespace engram
