// SPDX-License-Identifier: Apache-2.0
//! \file disk_lane.h
//! A GPU's way to the rows of a table that stays on disk. Ids come down into pinned memory, a host
//! node reads their rows beside them, and a kernel takes the rows from there as it does those of a
//! host table. All of it is work of one stream, which a graph may capture: each replay reads the
//! rows of its ids. While a host node waits for the disk its stream waits for it, and so may host
//! nodes of other streams; kernels run on.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "engram/table.h"

#if ENGRAM_CUDA
#include <map>

#include "cuda_handles.h"
#endif

namespace engram {

#if ENGRAM_CUDA
//! Pinned memory of lookups that do not run at once: those of one stream, or of one execution
//! context.
class DiskLane : public std::enable_shared_from_this<DiskLane> {
 public:
  //! What a lane takes at most, unless 128 tokens take more. Longer lookups go through it in parts.
  static constexpr int64_t kMostBytes = 16 << 20;

  //! Of the current device, for parts of up to num_tokens tokens. The table, which is on disk,
  //! outlives it. Throws Error.
  DiskLane(const Table& table, int device, int64_t num_tokens);
  //! Waits for what it has begun outside of graphs; graphs keep their lanes.
  ~DiskLane();
  DiskLane(const DiskLane&) = delete;
  DiskLane& operator=(const DiskLane&) = delete;

  //! As lookup_cuda, with rows of the table in place of values, scales, first_row and num_rows of
  //! args. Rows that cannot be read are NaN, and the device's fault as well as the reader's. Takes
  //! no memory of CUDA's. Throws Error where check_lookup_call or check_lookup_on_gpu does.
  cudaError_t lookup(const engram_lookup_args& args, cudaStream_t stream);

  int device() const { return device_; }
  //! Whether all that it has begun outside of graphs has ended.
  bool is_idle() const;

 private:
  //! What a host node is told. One for each number of rows, as long as the lane.
  struct Part {
    DiskLane* lane;
    int64_t num_rows;
  };

  cudaError_t enqueue(const engram_lookup_args& args, cudaStream_t stream);
  cudaError_t enqueue_part(const engram_lookup_args& args, int64_t begin, int64_t end,
                           cudaStream_t stream);
  Part* part_of(int64_t num_rows);
  cudaError_t keep_for(cudaGraph_t graph);
  void read(int64_t num_rows) noexcept;

  DiskReader& reader_;
  const int32_t layer_;
  const int32_t num_columns_;
  const int32_t head_dim_;
  const int device_;
  const int64_t num_tokens_;  // of a part
  uint64_t* fault_;
  PinnedBytes memory_;  // rows of a part:
  uint8_t* values_;     // [rows, D]
  int32_t* ids_;        // [rows]
  int32_t* places_;     // [rows] 0, 1, ...: ids of what lies here
  uint8_t* scales_;     // [rows, D/32]
  Event done_;
  std::mutex mutex_;
  std::map<int64_t, Part> parts_;
};

//! The lane of a caller that keeps it, and with it the table, for any number of tokens or no more
//! than num_tokens at once. Throws Error.
std::shared_ptr<DiskLane> make_disk_lane(std::shared_ptr<const Table> table, int device,
                                         int64_t num_tokens = INT64_MAX);

//! Frees lanes that ended graphs have left, which CUDA lets no graph's end do itself.
void free_left_disk_lanes();

//! The lanes of lookups that come one by one: as many as have ever run at once.
class DiskLanes {
 public:
  //! One lookup in the table that has this object: on a lane that is idle, or, in a graph, on one
  //! that the graph keeps with the table. Args as in DiskLane::lookup. Throws Error. Thread-safe.
  void lookup(const std::shared_ptr<const Table>& table, const engram_lookup_args& args, int device,
              cudaStream_t stream);

 private:
  //! By who holds mutex_ until it has enqueued.
  DiskLane& idle_lane(const Table& table, int device);

  std::mutex mutex_;
  std::vector<std::unique_ptr<DiskLane>> lanes_;
};
#else
class DiskLanes {};
inline void free_left_disk_lanes() {}
#endif

}  // namespace engram
