// SPDX-License-Identifier: Apache-2.0
#include "table/hot_rows.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <new>
#include <utility>

#include "engram/row.h"

namespace engram {
namespace {

//! Of a slot: its links, its row, its mark and, at most, two heads.
constexpr int64_t kSlotBytes = 4 * sizeof(int32_t) + 1;

}  // namespace

template <typename T>
HotRows::Zeroed<T> HotRows::zeroed(int64_t count) {
  // NOTE: large blocks come from the system untouched, and take no memory before they are.
  auto* const memory = static_cast<T*>(std::calloc(static_cast<size_t>(count), sizeof(T)));
  if (memory == nullptr) throw std::bad_alloc();
  return Zeroed<T>(memory);
}

HotRows::HotRows(int64_t num_bytes, int64_t num_rows, int value_bytes, int scale_bytes)
    : value_bytes_(value_bytes), scale_bytes_(scale_bytes) {
  const int64_t fitting = num_bytes / (value_bytes + scale_bytes + kSlotBytes);
  const int64_t needed = ceil_div(num_rows, kShards);
  num_slots_ = static_cast<int32_t>(std::min(fitting / kShards, needed));
  num_heads_ = static_cast<int32_t>(std::bit_ceil(static_cast<uint32_t>(num_slots_)));
  if (num_slots_ == 0) return;
  for (Shard& shard : shards_) {
    shard.heads = zeroed<int32_t>(num_heads_);
    shard.next = zeroed<int32_t>(num_slots_);
    shard.rows = zeroed<int32_t>(num_slots_);
    shard.found_lately = zeroed<uint8_t>(num_slots_);
    shard.bytes = zeroed<uint8_t>(row_offset(num_slots_, value_bytes_ + scale_bytes_));
  }
}

int32_t* HotRows::head_of(Shard& shard, int32_t row) const {
  const uint32_t mixed = static_cast<uint32_t>(row) / kShards * 0x9E3779B1u;
  const int shift = 32 - std::countr_zero(static_cast<uint32_t>(num_heads_));
  return &shard.heads[shift == 32 ? 0 : mixed >> shift];
}

int32_t HotRows::slot_of(Shard& shard, int32_t row) const {
  int32_t slot = *head_of(shard, row) - 1;
  while (slot >= 0 && shard.rows[static_cast<size_t>(slot)] != row) {
    slot = shard.next[static_cast<size_t>(slot)] - 1;
  }
  return slot;
}

uint8_t* HotRows::bytes_of(Shard& shard, int32_t slot) const {
  return shard.bytes.get() + row_offset(slot, value_bytes_ + scale_bytes_);
}

//! A slot that is in no chain.
int32_t HotRows::free_slot(Shard& shard) const {
  if (shard.num_used < num_slots_) return shard.num_used++;
  const auto step = [&] { return std::exchange(shard.hand, (shard.hand + 1) % num_slots_); };
  int32_t slot = step();
  for (; shard.found_lately[static_cast<size_t>(slot)] != 0; slot = step()) {
    shard.found_lately[static_cast<size_t>(slot)] = 0;
  }
  int32_t* link = head_of(shard, shard.rows[static_cast<size_t>(slot)]);
  while (*link - 1 != slot) link = &shard.next[static_cast<size_t>(*link - 1)];
  *link = shard.next[static_cast<size_t>(slot)];
  return slot;
}

bool HotRows::find(int32_t row, uint8_t* values, uint8_t* scales) {
  if (num_slots_ == 0) return false;
  Shard& shard = shard_of(shards_, row);
  const std::lock_guard lock(shard.mutex);
  const int32_t slot = slot_of(shard, row);
  if (slot < 0) return false;
  shard.found_lately[static_cast<size_t>(slot)] = 1;
  ++shard.num_found;
  const uint8_t* const bytes = bytes_of(shard, slot);
  memcpy(values, bytes, static_cast<size_t>(value_bytes_));
  if (scale_bytes_ > 0) memcpy(scales, bytes + value_bytes_, static_cast<size_t>(scale_bytes_));
  return true;
}

void HotRows::insert(int32_t row, const uint8_t* values, const uint8_t* scales) {
  if (num_slots_ == 0) return;
  Shard& shard = shard_of(shards_, row);
  const std::lock_guard lock(shard.mutex);
  if (slot_of(shard, row) >= 0) return;  // another thread read it too
  const int32_t slot = free_slot(shard);
  int32_t* const head = head_of(shard, row);
  shard.rows[static_cast<size_t>(slot)] = row;
  shard.next[static_cast<size_t>(slot)] = std::exchange(*head, slot + 1);
  uint8_t* const bytes = bytes_of(shard, slot);
  memcpy(bytes, values, static_cast<size_t>(value_bytes_));
  if (scale_bytes_ > 0) memcpy(bytes + value_bytes_, scales, static_cast<size_t>(scale_bytes_));
}

int64_t HotRows::num_bytes() const {
  return row_offset(capacity(), value_bytes_ + scale_bytes_ + kSlotBytes);
}

int64_t HotRows::num_found() const {
  int64_t sum = 0;
  for (const Shard& shard : shards_) {
    const std::lock_guard lock(shard.mutex);
    sum += shard.num_found;
  }
  return sum;
}

}  // namespace engram
