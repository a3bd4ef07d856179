// SPDX-License-Identifier: Apache-2.0
//! \file lane.h
//! The side stream of an execution context, and the events by which a table's prefetch leaves the
//! main stream and a lookup joins it again.
#pragma once

#include <memory>
#include <string>

#include "cuda_handles.h"

namespace engram::plugins {

//! One stream an execution context: prefetches run in the order of the layers that need them.
class SideStream;

class PrefetchLane {
 public:
  //! The lane of a table in an execution context; prefetch and lookup get the same one. Throws
  //! Error.
  static std::shared_ptr<PrefetchLane> of(const void* context, const std::string& table);

  explicit PrefetchLane(std::shared_ptr<SideStream> side);

  cudaStream_t side_stream() const;
  //! What follows on the side stream runs after all that main holds now.
  cudaError_t fork(cudaStream_t main) const;
  //! Marks the end of a prefetch on the side stream.
  cudaError_t done() const;
  //! What follows on main runs after the last prefetch marked so far.
  cudaError_t wait(cudaStream_t main) const;

 private:
  std::shared_ptr<SideStream> side_;
  Event forked_;
  Event done_;
};

}  // namespace engram::plugins
