// SPDX-License-Identifier: Apache-2.0
//! \file hot_rows.h
//! Rows that were asked for before, kept in RAM within a budget. Knows nothing of where they lie.
#pragma once

#include <array>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <mutex>

namespace engram {

//! All functions are thread-safe. A row is copied while its part is locked, so that none is seen
//! half evicted. Memory is taken from the system as rows come.
class HotRows {
 public:
  //! For ids 0 to num_rows - 1; num_bytes holds all that is kept here, bookkeeping included.
  //! scale_bytes may be 0: rows without scales.
  HotRows(int64_t num_bytes, int64_t num_rows, int value_bytes, int scale_bytes);

  //! Copies a row and returns true where it is kept.
  bool find(int32_t row, uint8_t* values, uint8_t* scales);
  //! Keeps a row, in the place of one that was not found lately (CLOCK) once all are taken.
  void insert(int32_t row, const uint8_t* values, const uint8_t* scales);

  //! Rows that fit.
  int64_t capacity() const { return kShards * int64_t{num_slots_}; }
  //! What they take once all are there.
  int64_t num_bytes() const;
  //! Rows that find() found, since the beginning.
  int64_t num_found() const;

 private:
  static constexpr int kShards = 64;  // far more than threads that ask at once

  struct Free {
    void operator()(void* memory) const { std::free(memory); }
  };
  template <typename T>
  using Zeroed = std::unique_ptr<T[], Free>;
  template <typename T>
  static Zeroed<T> zeroed(int64_t count);

  //! Every kShards-th row. Slots form chains from `heads`; links are slot + 1, and 0 ends.
  struct alignas(64) Shard {
    mutable std::mutex mutex;
    Zeroed<int32_t> heads;
    Zeroed<int32_t> next;
    Zeroed<int32_t> rows;
    Zeroed<uint8_t> found_lately;
    Zeroed<uint8_t> bytes;
    int32_t num_used = 0;
    int32_t hand = 0;
    int64_t num_found = 0;
  };

  static Shard& shard_of(std::array<Shard, kShards>& shards, int32_t row) {
    return shards[static_cast<uint32_t>(row) % kShards];
  }
  int32_t* head_of(Shard& shard, int32_t row) const;
  //! -1: not there.
  int32_t slot_of(Shard& shard, int32_t row) const;
  uint8_t* bytes_of(Shard& shard, int32_t slot) const;
  int32_t free_slot(Shard& shard) const;

  int value_bytes_;
  int scale_bytes_;
  int32_t num_slots_;  // of a shard
  int32_t num_heads_;  // a power of two
  std::array<Shard, kShards> shards_;
};

}  // namespace engram
