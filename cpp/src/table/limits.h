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

//! A cgroup that bounds memory: this process's own or one above it.
struct CgroupLimit {
  std::string identity;  //!< equal for two processes if and only if it is the same cgroup
  std::string path;      //!< of its folder, as this process sees it
  std::string file;      //!< that holds the limit, such as "memory.max"
  bool hugetlb = false;  //!< bounds pages of hugetlb (2 MiB), else all other memory
  bool refuses = true;   //!< false: the kernel slows down beyond it (memory.high), for a warning
  int64_t limit = 0;     //!< bytes
  int64_t used = 0;      //!< bytes, less what the kernel can drop at once (page cache of files)
};

//! Room on a NUMA node.
struct NodeRoom {
  int node = 0;
  bool allowed = true;          //!< by this process's cpuset
  int64_t free_bytes = 0;       //!< free, or page cache of files, which makes way
  int64_t free_huge_bytes = 0;  //!< on hugetlb pages of 2 MiB
};

//! What bounds the memory of one process, as it stands now; -1 where the machine does not say.
struct Limits {
  std::vector<CgroupLimit> cgroups;
  std::vector<NodeRoom> nodes;
  int64_t available_bytes = -1;  //!< MemAvailable
  int64_t free_huge_bytes = -1;  //!< hugetlb pages of 2 MiB nobody has or reserved
  int64_t shm_size_bytes = -1;   //!< of /dev/shm
  int64_t shm_free_bytes = -1;
};

//! Reads them. `root` is "/" but for tests, which bring files of their own; then /dev/shm is left
//! out. What cannot be read bounds nothing.
Limits read_limits(const std::string& root = "/");

//! Of one allocation.
struct RoomRequest {
  std::string label;  //!< the table and array, for errors
  HostMemoryOptions options;
  int64_t num_bytes = 0;
  int creator = 0;  //!< rank whose /dev/shm holds it (kShm)
  //! Bytes that each rank's process touches first, and its cgroup pays for: sums to num_bytes.
  //! Empty: the creator touches all.
  std::vector<int64_t> touched;
};

//! Refuses (ENGRAM_OUT_OF_MEMORY) what the limits of the group's processes, by rank, do not allow
//! together: one line with the bytes needed, the bytes there, and which limit. cgroups, /dev/shm,
//! NUMA nodes and hugetlb pages refuse; MemAvailable too small is a warning that is returned, for
//! virtual machines grow it. assume_ram (bytes) replaces MemAvailable, and refuses: who gives it
//! knows. RLIMIT_MEMLOCK is not asked: neither the driver's pinning nor ours counts it (see
//! registration.cpp).
std::vector<std::string> check_room(const std::vector<RoomRequest>& requests,
                                    const std::vector<Limits>& by_rank,
                                    std::optional<int64_t> assume_ram = std::nullopt);

//! For messages between ranks.
nlohmann::json to_json(const Limits& limits);
Limits limits_from_json(const nlohmann::json& json);

}  // namespace engram
