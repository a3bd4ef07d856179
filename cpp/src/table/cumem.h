// SPDX-License-Identifier: Apache-2.0
//! \file cumem.h
//! Host memory of the CUDA driver (cuMemCreate on NUMA nodes), shared by descriptors. HostMemory
//! uses it for MemoryKind::kCumem; the vote asks cumem_problem().
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "table/descriptor.h"
#include "table/numa.h"

namespace engram {

//! Why this process cannot create, share and read memory of this kind with `device`, in one line;
//! empty where it can. Tries all of it, with a granule on each node of the policy (those of
//! CumemMemory::create). Leaves nothing allocated and no CUDA error behind.
std::string cumem_problem(int device, const NumaPolicy& numa);

//! The NUMA nodes of a policy's memory beside this device: what CumemMemory::create() goes
//! through. In a build with CUDA alone.
std::vector<int> cumem_nodes(const NumaPolicy& numa, int device);

//! Mapped at one address range for the CPU and for one GPU. Ends in the process that made it
//! alone: a forked child's copy does nothing, for the child has no such mapping.
class CumemMemory {
 public:
  //! In up to kMaxParts parts of equal size (but for the last). kNode: on that node; kInterleave:
  //! part by part on the nodes that the process may use; else on the GPU's node (where unknown:
  //! this thread's). Throws Error: ENGRAM_CUDA_UNAVAILABLE, ENGRAM_OUT_OF_MEMORY,
  //! ENGRAM_CUDA_ERROR.
  static CumemMemory create(int device, const NumaPolicy& numa, int64_t num_bytes,
                            const std::string& label);
  //! What another process created with the same num_bytes. Throws Error.
  static CumemMemory attach(int device, const std::vector<FileDescriptor>& descriptors,
                            int64_t num_bytes, const std::string& label);
  CumemMemory(CumemMemory&& other) noexcept;
  CumemMemory& operator=(CumemMemory&& other) = delete;
  ~CumemMemory();

  //! Size of a part, or more where kMaxParts would not do: a message holds only so many
  //! descriptors. Several, so that threads allocate (the kernel clears pages) side by side.
  static constexpr int64_t kPartBytes = int64_t{1} << 30;
  static constexpr int64_t kMaxParts = 16;

  uint8_t* data() const;
  int64_t mapped_bytes() const;
  //! New descriptors of the parts, in order: POSIX ones of the driver or, on machines that share
  //! by fabric handles alone, small files that hold those. Throws Error.
  std::vector<FileDescriptor> export_descriptors() const;

 private:
  class Parts;
  explicit CumemMemory(std::unique_ptr<Parts> parts);

  std::unique_ptr<Parts> parts_;
};

}  // namespace engram
