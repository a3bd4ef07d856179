// SPDX-License-Identifier: Apache-2.0
//! \file lane.h
//! The side stream of an execution context, and the events by which a table's prefetch leaves the
//! main stream and a lookup joins it again.
#pragma once

#include <memory>
#include <mutex>
#include <string>

#include "cuda_handles.h"

namespace engram::plugins {

//! One stream an execution context: prefetches run in the order of the layers that need them.
class SideStream;

//! NOTE: TensorRT promises each execution context another resource context, but not that all its
//! plugins get the same. So a lookup joins the very rows that a prefetch has started here, and
//! whatever else it finds is an error, never a row that is not there yet.
class PrefetchLane {
 public:
  //! The lane of a table in an execution context; prefetch and lookup get the same one. Throws
  //! Error.
  static std::shared_ptr<PrefetchLane> of(const void* context, const std::string& table);

  PrefetchLane(std::shared_ptr<SideStream> side, std::string table);

  //! gather(side stream), which writes `rows`, runs after all that main holds now; what follows on
  //! main runs after a gather that a failed step left, for which a capture waits here. Throws
  //! Error.
  template <typename Gather>
  void start(cudaStream_t main, const void* rows, const Gather& gather) {
    const std::lock_guard lock(mutex_);
    join_left(main);
    fork(main);
    check_cuda(gather(side_stream()), "launch");
    check_cuda(cudaEventRecord(done_.get(), side_stream()), "end of a prefetch");
    rows_ = rows;
  }

  //! What follows on main runs after the prefetch that was started last, which must be that of
  //! `rows` and not joined yet. Throws Error.
  void join(cudaStream_t main, const void* rows);

 private:
  cudaStream_t side_stream() const;
  void join_left(cudaStream_t main);
  void fork(cudaStream_t main) const;
  void wait(cudaStream_t main);

  std::shared_ptr<SideStream> side_;
  std::string table_;
  Event forked_;
  Event done_;
  std::mutex mutex_;
  const void* rows_ = nullptr;  //!< of the prefetch under way; null: none
  bool captured_ = false;       //!< that prefetch is part of a graph
};

}  // namespace engram::plugins
