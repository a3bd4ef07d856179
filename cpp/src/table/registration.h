// SPDX-License-Identifier: Apache-2.0
//! \file registration.h
//! Host memory made readable for GPUs in place.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <vector>

#include "table/host_memory.h"

namespace engram {

//! Whether the driver registers a mapping that was attached as Access::kReadOnly. Many do not (a
//! B300 with driver 610): then attach for writing, register, and HostMemory::protect(). False
//! without a device.
bool can_register_read_only(int device);

//! The pages of a HostMemory pinned and mapped for every GPU of this process, until its end.
//! Move-only. Each process registers its own mapping.
class Registration {
 public:
  //! Pieces of at most this are registered side by side. One call for a whole table would have one
  //! core pin all pages, and drivers from 580 on refuse 512 GiB in one call.
  static constexpr int64_t kPieceBytes = int64_t{1} << 30;

  //! Registers all of `memory`, in pieces, through the context of `device`; afterwards either all
  //! pieces are registered, or none. Prefault and load come before, HostMemory::protect() after.
  //! `cancelled` is asked before each piece, on any thread; may be empty. Throws Error and leaves
  //! no CUDA error behind: ENGRAM_CUDA_UNAVAILABLE (no GPU), ENGRAM_CUDA_ERROR or
  //! ENGRAM_OUT_OF_MEMORY with the piece and the driver's text, ENGRAM_INVALID_ARGUMENT where
  //! cancelled. kPrivate is no longer inherited by forks then (see HostMemory::set_inherited).
  //! kCumem was mapped for its device when it was made: there is nothing to register.
  //! `memory` must not end before this does; it may be moved.
  Registration(HostMemory& memory, int device, const std::function<bool()>& cancelled);
  Registration(Registration&& other) noexcept;
  Registration& operator=(Registration&& other) noexcept;
  //! Unregisters, in pieces side by side; does nothing in a forked child.
  ~Registration();

  //! Where kernels of `device` read the memory's first byte; the rest follows without a gap, over
  //! all pieces. Any device of this process, but for kCumem. Thread-safe. Throws Error. NOTE: a
  //! kernel reads across pieces; one copy (cudaMemcpy*) must not, for it takes one registration.
  const uint8_t* on_device(int device) const;

  double seconds() const { return seconds_; }  //!< that the registration took

 private:
  void release() noexcept;
  void swap(Registration& other) noexcept;

  uint8_t* data_ = nullptr;
  std::vector<int64_t> ends_;     // of the pieces, ascending
  std::vector<char> registered_;  // whether each piece is; empty for kCumem
  int device_ = -1;
  double seconds_ = 0;
  pid_t owner_ = 0;
};

}  // namespace engram
