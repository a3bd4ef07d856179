// SPDX-License-Identifier: Apache-2.0
//! \file host_memory.h
//! Host memory that several processes map: one allocation of one table array. It has no name, so
//! it is gone with the last process that maps it or holds a descriptor of it.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "table/descriptor.h"
#include "table/numa.h"
#include "table/pages.h"

namespace engram {

class CumemMemory;

enum class MemoryKind {
  kPrivate,  //!< anonymous memory of this process
  kMemfd,    //!< an anonymous file: no quota but the cgroup's
  kShm,      //!< a nameless file on /dev/shm, whose size bounds it
  kCumem,    //!< memory of the CUDA driver on a NUMA node: mapped for the GPU from the start
};

//! "private", "memfd", "shm" or "cumem".
const char* memory_kind_name(MemoryKind kind);
//! The inverse. Throws Error, naming what there is.
MemoryKind parse_memory_kind(const std::string& name);

struct HostMemoryOptions {
  MemoryKind kind = MemoryKind::kMemfd;
  PageKind pages = PageKind::kAuto;
  NumaPolicy numa;
  int device = -1;  //!< kCumem alone: the CUDA device of this rank; the others need none
};

//! Refuses combinations that do not exist (kShm on hugetlb, kCumem on 4 KiB pages, kGpu, a node
//! outside the cpuset): Error (ENGRAM_INVALID_ARGUMENT). Allocates nothing; for a vote.
void check_host_memory(const HostMemoryOptions& options);

//! What a mapping may do to the bytes.
enum class Access { kReadOnly, kReadWrite };

//! Move-only. Unmaps and closes at its end, in the process that made it; a forked child's copy
//! unmaps what the child inherited and leaves CUDA alone.
//! NOTE: a Registration (registration.h) of it must end first.
class HostMemory {
 public:
  //! New memory, all zeros (kCumem: as the driver gives it). Reserves an address range (and hugetlb
  //! pages), touches no page; nobody can resize it (kMemfd is sealed). The NUMA policy holds for
  //! every process that touches it. num_bytes > 0. `label` stands in errors and, for kMemfd, in
  //! /proc/PID/maps: the table's and the array's name. Throws Error: ENGRAM_OUT_OF_MEMORY with
  //! numbers, ENGRAM_CUDA_UNAVAILABLE and ENGRAM_CUDA_ERROR (kCumem).
  static HostMemory create(const HostMemoryOptions& options, int64_t num_bytes,
                           const std::string& label);

  //! Memory that another process created with the same kind, pages and num_bytes, from the
  //! descriptors of its descriptors(). Refuses descriptors of anything else: another size, file
  //! system, page size, or without the seals. kPrivate cannot be attached. Throws Error.
  //! A read-only mapping is registered with a GPU only where can_register_read_only().
  static HostMemory attach(const HostMemoryOptions& options,
                           std::vector<FileDescriptor> descriptors, int64_t num_bytes,
                           const std::string& label, Access access = Access::kReadWrite);

  HostMemory(HostMemory&& other) noexcept;
  HostMemory& operator=(HostMemory&& other) noexcept;
  ~HostMemory();

  //! On a 2 MiB boundary. The bytes from num_bytes() to the end of its page are zeros.
  uint8_t* data() const { return data_; }
  int64_t num_bytes() const { return num_bytes_; }
  //! What it takes up: num_bytes() in whole pages.
  int64_t mapped_bytes() const { return mapped_bytes_; }
  const HostMemoryOptions& options() const { return options_; }
  const std::string& label() const { return label_; }
  Access access() const { return access_; }

  //! What others attach; send duplicates. One, but none for kPrivate and one a node for kCumem
  //! with kInterleave. Same user only: they are readable and writable.
  const std::vector<FileDescriptor>& descriptors() const { return descriptors_; }
  //! The same for who must not write (a keeper's clients): opened again for reading. kMemfd and
  //! kShm alone, others get duplicates. Throws Error.
  std::vector<FileDescriptor> read_only_descriptors() const;

  //! Places, advises and touches the pages that hold bytes [begin, end), and collapses them into
  //! huge pages; thread-safe for ranges that share no page; changes no byte. Before registration:
  //! pinned pages do not collapse. Ranks prefault the ranges that they load, which should begin on
  //! 2 MiB boundaries. Memory that is not to be had is an Error (ENGRAM_OUT_OF_MEMORY) with the
  //! numbers, never a signal. `cancelled` as in populate_pages (pages.h). kCumem: nothing to do.
  void prefault(int64_t begin, int64_t end, const std::function<bool()>& cancelled = {});

  //! Forbids this process to write, from now on: for after loading and registration. Throws Error.
  //! kCumem: nothing to do.
  void protect();
  //! Takes protect() back, for a registration. Throws Error. Nothing where the memory was attached
  //! for reading.
  void unprotect();
  //! Forbids all processes to map it for writing, or to write through its descriptors, from now on:
  //! once all have mapped it. kMemfd alone, as far as the kernel can.
  void seal() const;

  //! Whether forked children get the memory (the default). Registered kPrivate memory should not
  //! be: a fork copies pages that a device has pinned, all of them.
  void set_inherited(bool inherited);

 private:
  HostMemory();
  static HostMemory prepare(const HostMemoryOptions& options, int64_t num_bytes,
                            const std::string& label);
  void map();
  uint8_t* reserve(int64_t num_bytes, int protection, int flags, int file);
  void take(CumemMemory&& cumem);
  void set_access(Access access);
  void swap(HostMemory& other) noexcept;

  HostMemoryOptions options_;
  std::string label_;
  Access access_ = Access::kReadWrite;
  bool may_write_ = true;  // by the descriptor that it was attached by
  uint8_t* data_ = nullptr;
  int64_t num_bytes_ = 0;
  int64_t mapped_bytes_ = 0;
  uint8_t* reserved_ = nullptr;  // the range of addresses that data_ lies in
  int64_t reserved_bytes_ = 0;
  bool inherited_ = true;
  pid_t owner_ = 0;
  std::vector<FileDescriptor> descriptors_;
  std::unique_ptr<CumemMemory> cumem_;
};

}  // namespace engram
