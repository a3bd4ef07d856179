// SPDX-License-Identifier: Apache-2.0
//! \file limits.h
//! Whether the memory of tables fits, told before any is allocated.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "table/host_memory.h"

namespace engram {

//! What a cgroup allows: this process's own or one above it.
struct CgroupLimit {
  std::string identity;  //!< equal for two processes if and only if it is the same cgroup
  std::string file;      //!< the limit's, as this process sees it: /sys/fs/cgroup/.../memory.max
  bool hugetlb = false;  //!< on hugetlb pages of 2 MiB, else on all other memory
  bool refuses = true;   //!< false: beyond it the kernel only slows down (memory.high)
  int64_t limit = 0;     //!< bytes
  int64_t used = 0;      //!< bytes, without what makes way at once (page cache of files)
};

//! Room on a NUMA node.
struct NodeRoom {
  int node = 0;
  bool allowed = true;             //!< by this process's cpuset
  int64_t free_bytes = 0;          //!< free, or page cache of files, which makes way
  int64_t free_hugetlb_bytes = 0;  //!< on hugetlb pages of 2 MiB
};

//! A rank's GPU, and what it is to hold for the rank.
struct GpuRoom {
  std::string gpu;  //!< its PCI bus id; empty: nothing is asked of any
  int64_t free_bytes = 0;
  int64_t needed_bytes = 0;
};

//! What bounds the memory of one process, as it stands now; -1 where the machine does not say.
struct Limits {
  std::vector<CgroupLimit> cgroups;
  std::vector<NodeRoom> nodes;
  int64_t available_bytes = -1;     //!< MemAvailable
  int64_t assumed_bytes = -1;       //!< what the user says in its place (assume_ram)
  int64_t free_hugetlb_bytes = -1;  //!< on hugetlb pages of 2 MiB
  std::string shm_identity;         //!< of /dev/shm, as for cgroups
  int64_t shm_size_bytes = -1;      //!< of /dev/shm, where it is a tmpfs with a size
  int64_t shm_free_bytes = -1;
  int64_t file_bytes = -1;  //!< of one file that the process makes (ulimit -f)
  GpuRoom gpu;              //!< whoever asks for GPU memory sets it
};

//! Reads them. What cannot be read bounds nothing. `root` is another folder in tests alone: that of
//! the files, /dev/shm is always the machine's.
Limits read_limits(const std::string& root = "/");

//! One allocation that is to be.
struct RoomRequest {
  std::string label;  //!< the table and array, for errors
  HostMemoryOptions options;
  int64_t num_bytes = 0;
  int creator = 0;  //!< the rank that creates it, whose /dev/shm holds it (kShm)
  //! Bytes that each rank touches first (loads), for these its cgroup pays; by rank, in sum
  //! num_bytes. Empty: the creator touches all.
  std::vector<int64_t> touched;
};

//! Refuses (ENGRAM_OUT_OF_MEMORY) what the limits of a group's processes, by rank, do not allow
//! together: one line with the bytes needed, the bytes there, and which limit it is. cgroups,
//! /dev/shm, ulimit -f (memfd and shm are files), hugetlb pages, GPUs and, on machines with
//! several, NUMA nodes refuse. MemAvailable too small
//! is a warning, for virtual machines grow it, and so are memory.high and uneven interleaving: they
//! are returned, a line each. assumed_bytes, the least that any rank has, stands in for
//! MemAvailable and does refuse, for who gives it knows. RLIMIT_MEMLOCK is not asked: it bounds
//! mlock(), which nothing here calls; the CUDA driver pins without counting against it (see
//! registration.cpp), and allocates kCumem without any cgroup's being charged
//! (kernel-open/nvidia/nv-vm.c asks for no __GFP_ACCOUNT).
std::vector<std::string> check_room(const std::vector<RoomRequest>& requests,
                                    const std::vector<Limits>& by_rank);

//! For messages between ranks.
nlohmann::json to_json(const Limits& limits);
Limits limits_from_json(const nlohmann::json& json);

}  // namespace engram
