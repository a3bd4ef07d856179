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

//! Whether the driver registers a mapping that was attached as Access::kReadOnly. Most do not (H200
//! and B300 up to driver 610): then attach for writing, register, and HostMemory::protect(). False
//! without a device.
bool can_register_read_only(int device);

//! The pages of a HostMemory pinned and mapped for every GPU of this process, until its end. Move
//! only. Only for whole pages of the memory; each process registers its own mapping.
class Registration {
 public:
  //! Pieces are registered side by side, each of at most this: one call for a large table takes
  //! the driver more than a minute on one core, and from 512 GiB it refuses.
  static constexpr int64_t kPieceBytes = int64_t{4} << 30;

  //! Registers all of `memory` on the current device's context, in pieces; either all pieces are
  //! registered afterwards, or none. Prefault, load and protect first. `cancelled` is asked
  //! between pieces, on any thread; may be empty. Throws Error and leaves no CUDA error behind:
  //! ENGRAM_CUDA_UNAVAILABLE (no GPU), ENGRAM_CUDA_ERROR or ENGRAM_OUT_OF_MEMORY with the bytes,
  //! the piece and what the machine allows, ENGRAM_INVALID_ARGUMENT where cancelled.
  //! kCumem needs no registration and gets an empty one. `memory` must outlive this.
  Registration(HostMemory& memory, int device, const std::function<bool()>& cancelled);
  Registration(Registration&& other) noexcept;
  Registration& operator=(Registration&& other) noexcept;
  //! Unregisters; not in a forked child.
  ~Registration();

  //! Where kernels of `device` read the memory's first byte; the rest follows without a gap, over
  //! all pieces. Throws Error.
  const uint8_t* on_device(int device) const;

  //! End of the piece that holds byte `offset`. A kernel reads across pieces; NOTE: a copy
  //! (cudaMemcpy*) must not, it takes one registration at a time.
  int64_t piece_end(int64_t offset) const;

  double seconds() const { return seconds_; }  //!< that the registration took

 private:
  void release() noexcept;

  HostMemory* memory_ = nullptr;
  std::vector<int64_t> ends_;  // of the registered pieces, ascending
  double seconds_ = 0;
  pid_t owner_ = 0;
};

}  // namespace engram
