// SPDX-License-Identifier: Apache-2.0
//! \file cumem.h
//! Host memory of the CUDA driver (cuMemCreate on NUMA nodes), shared by descriptors. HostMemory
//! uses it for MemoryKind::kCumem; the vote asks cumem_problem().
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>
#include <vector>

#include "table/descriptor.h"
#include "table/numa.h"

namespace engram {

//! Why this process cannot create, share and read memory of this kind with `device`, in one line;
//! empty where it can. Tries all of it on one granule. Leaves no CUDA error behind.
std::string cumem_problem(int device);

//! Mapped at one address range for the CPU and for one GPU. Ends in the process that made it
//! alone: a forked child's copy does nothing, for the child has no such mapping.
class CumemMemory {
 public:
  //! One part a node, of equal size but for the last. kNode: that node; kInterleave: one part on
  //! each node that the process may use; else the GPU's node (where unknown: this thread's).
  //! Throws Error: ENGRAM_CUDA_UNAVAILABLE, ENGRAM_OUT_OF_MEMORY, ENGRAM_CUDA_ERROR.
  static CumemMemory create(int device, const NumaPolicy& numa, int64_t num_bytes,
                            const std::string& label);
  //! What another process created with the same num_bytes and policy. Throws Error.
  static CumemMemory attach(int device, const std::vector<FileDescriptor>& descriptors,
                            int64_t num_bytes, const std::string& label);
  CumemMemory(CumemMemory&& other) noexcept;
  CumemMemory& operator=(CumemMemory&& other) = delete;
  ~CumemMemory();

  uint8_t* data() const;
  int64_t mapped_bytes() const { return mapped_bytes_; }
  //! New descriptors of the parts, in order: POSIX ones of the driver or, on machines that share
  //! by fabric alone, small files with the fabric handles. Throws Error.
  std::vector<FileDescriptor> export_descriptors() const;

 private:
  struct Part {
    uint64_t handle = 0;
    int64_t begin = 0;
    int64_t num_bytes = 0;
    bool mapped = false;
  };

  CumemMemory() = default;
  void map(int device, const std::string& label);
  void release() noexcept;

  uint64_t address_ = 0;
  int64_t mapped_bytes_ = 0;
  int64_t part_bytes_ = 0;
  bool fabric_ = false;
  int device_ = -1;
  pid_t owner_ = 0;
  std::vector<Part> parts_;
};

}  // namespace engram
