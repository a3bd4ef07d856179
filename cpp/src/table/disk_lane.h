// SPDX-License-Identifier: Apache-2.0
//! \file disk_lane.h
//! A GPU's way to the rows of a table that stays on disk: the host node reads them. While it waits
//! for the disk its stream waits for it, and so may host nodes of other streams; kernels run on.
#pragma once

#if ENGRAM_CUDA
#include <cstdint>
#include <map>
#include <mutex>

#include "table/lane.h"

namespace engram {

class DiskLane final : public Lane {
 public:
  //! What a lane takes at most, unless 128 tokens take more. Longer lookups go through it in parts.
  static constexpr int64_t kMostBytes = 16 << 20;

  //! Of the current device, for parts of up to num_tokens tokens. The table, which is on disk,
  //! outlives it. Rows that cannot be read are NaN, and the device's fault as well as the reader's.
  //! Throws Error.
  DiskLane(const Table& table, int device, int64_t num_tokens);
  ~DiskLane() override;

 private:
  //! What a host node is told. One for each number of rows, as long as the lane.
  struct Part {
    DiskLane* lane;
    int64_t num_rows;
  };

  cudaError_t enqueue(const engram_lookup_args& args, cudaStream_t stream) override;
  cudaError_t enqueue_part(const engram_lookup_args& args, int64_t begin, int64_t end,
                           cudaStream_t stream);
  Part* part_of(int64_t num_rows);
  void read(int64_t num_rows) noexcept;

  DiskReader& reader_;
  const int32_t layer_;
  const int32_t head_dim_;
  const int64_t num_tokens_;  // of a part
  uint64_t* fault_;
  PinnedBytes memory_;  // rows of a part:
  uint8_t* values_;     // [rows, D]
  int32_t* ids_;        // [rows]
  int32_t* places_;     // [rows] 0, 1, ...: ids of what lies here
  uint8_t* scales_;     // [rows, D/32]
  std::mutex mutex_;
  std::map<int64_t, Part> parts_;
};

}  // namespace engram
#endif
