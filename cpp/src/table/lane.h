// SPDX-License-Identifier: Apache-2.0
//! \file lane.h
//! A GPU's way to rows that CPUs bring. Ids come down into pinned memory, a host node sees to it
//! that their rows come beside them, and kernels take the rows from there. All of it is work of one
//! stream, which a graph may capture: each replay brings the rows of its ids.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "engram/table.h"

#if ENGRAM_CUDA
#include "cuda_handles.h"
#endif

namespace engram {

#if ENGRAM_CUDA
//! Memory of lookups that do not run at once: those of one stream, or of one execution context.
class Lane : public std::enable_shared_from_this<Lane> {
 public:
  virtual ~Lane();
  Lane(const Lane&) = delete;
  Lane& operator=(const Lane&) = delete;

  //! As lookup_cuda, to the same bits, with rows of the table in place of those of args where the
  //! table is on disk; else those of args are the table's own. Takes no memory of CUDA's. Throws
  //! Error where check_lookup_call or check_lookup_on_gpu does. A graph that captures it keeps the
  //! lane.
  cudaError_t lookup(const engram_lookup_args& args, cudaStream_t stream);

  int device() const { return device_; }
  //! Whether all that it has begun outside of graphs has ended.
  bool is_idle() const;

 protected:
  //! Of the current device. `label` names it in errors.
  Lane(const Table& table, int device, const std::string& label);
  //! Waits for what it has begun outside of graphs. For the ends of what that uses.
  void finish();

 private:
  //! A call that has been checked, of at least one token.
  virtual cudaError_t enqueue(const engram_lookup_args& args, cudaStream_t stream) = 0;
  cudaError_t keep_for(cudaGraph_t graph);

  const int32_t num_columns_;
  const int device_;
  Event done_;
};

//! The lane of a caller that keeps it, and with it the table, for any number of tokens or no more
//! than num_tokens at once. Throws Error.
std::shared_ptr<Lane> make_lane(std::shared_ptr<const Table> table, int device,
                                int64_t num_tokens = INT64_MAX);

//! Frees lanes that ended graphs have left, which CUDA lets no graph's end do itself.
void free_left_lanes();

//! The lanes of lookups that come one by one: as many as have ever run at once.
class Lanes {
 public:
  //! The table that has this object.
  void belong_to(std::weak_ptr<const Table> table) { table_ = std::move(table); }

  //! One lookup: on a lane that is idle, or, in a graph, on one that the graph keeps with the
  //! table. Args as in Lane::lookup. Throws Error. Thread-safe.
  void lookup(const engram_lookup_args& args, int device, cudaStream_t stream);

 private:
  //! By who holds mutex_ until it has enqueued.
  Lane& idle_lane(const Table& table, int device);

  std::weak_ptr<const Table> table_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<Lane>> lanes_;
};
#else
class Lanes {
 public:
  void belong_to(const std::weak_ptr<const Table>&) {}
};
inline void free_left_lanes() {}
#endif

}  // namespace engram
