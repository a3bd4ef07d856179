// SPDX-License-Identifier: Apache-2.0
//! \file gather_lane.h
//! A GPU's way to the rows of a table in host memory by CPU threads. A GPU's own reads there cost
//! an address translation each, a CPU's far less: the threads put the rows that a sorted lookup
//! wants side by side, piece by piece, and the GPU, whose stream waits for each piece and holds no
//! SM meanwhile, reads them in order. The host node only wakes the threads.
#pragma once

#if ENGRAM_CUDA
#include <array>
#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <tuple>

#include "ops/row_runs.h"
#include "table/device_bytes.h"
#include "table/lane.h"
#include "table/worker_pool.h"

namespace engram {

class GatherLane final : public Lane {
 public:
  //! Of a part, a multiple of a scale tile's. Longer lookups go through the lane in parts.
  static constexpr int64_t kMostTokens = kMaxSegmentTokens;
  static constexpr int kMostPieces = 8;

  //! Of the current device, for parts of up to num_tokens tokens. The table, whose values are in
  //! host memory, outlives it. Throws Error.
  GatherLane(const Table& table, int device, int64_t num_tokens);
  ~GatherLane() override;

 private:
  //! Parts of one shape: what their host node starts.
  class Part final : public WorkerPool::Job {
   public:
    //! first_row: of the call, counted from the table's.
    Part(GatherLane* lane, const SegmentShape& shape, int64_t first_row);
    ~Part() { wait(); }
    void begin() noexcept;
    int num_pieces() const { return num_pieces_; }
    //! The segments of a piece.
    StagedRows piece(int index) const;

   private:
    int64_t first_segment(int piece) const { return shape_.num_segments * piece / num_pieces_; }
    void do_unit(int64_t unit) noexcept override;

    GatherLane* const lane_;
    const SegmentShape shape_;
    const int64_t first_row_;
    const int64_t units_per_segment_;
    const int num_pieces_;
    std::array<std::atomic<int64_t>, kMostPieces> units_left_{};
  };

  cudaError_t enqueue(const engram_lookup_args& args, cudaStream_t stream) override;
  cudaError_t enqueue_part(const engram_lookup_args& args, cudaStream_t stream);
  Part* part_of(const SegmentShape& shape, int64_t first_row);
  void gather(const SegmentShape& shape, int64_t first_row, int64_t segment,
              int64_t first_run) noexcept;

  WorkerPool& pool_;
  const int head_dim_;
  const uint8_t* table_values_;
  const uint8_t* table_scales_;  // null: the GPU has them
  const int64_t first_row_;      // id of table_values_[0]
  const int64_t num_tokens_;     // of a part
  DeviceBytes workspace_;
  PinnedBytes memory_;  // of a part:
  uint8_t* values_;     // [places, D]
  uint8_t* runs_;       // those of the workspace
  uint8_t* scales_;     // [places, D/32]
  uint32_t* flags_;     // [kMostPieces] 1: the piece is there
  std::mutex mutex_;
  //! By tokens of a segment, number of segments, and first row.
  std::map<std::tuple<int64_t, int64_t, int64_t>, Part> parts_;
};

}  // namespace engram
#endif
