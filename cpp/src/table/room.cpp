// SPDX-License-Identifier: Apache-2.0
// What limits.h's limits leave for tables.
#include <algorithm>
#include <iomanip>
#include <map>

#include "engram/error.h"
#include "table/limits.h"

namespace engram {
namespace {

//! "1234567 bytes (0.00 GiB)": exact, and readable.
std::string text_of(int64_t bytes) {
  return concat(bytes, " bytes (", std::fixed, std::setprecision(2),
                static_cast<double>(bytes) / (int64_t{1} << 30), " GiB)");
}

int64_t size_of(const RoomRequest& request) {
  return request.options.kind == MemoryKind::kCumem
             ? request.num_bytes
             : whole_pages(request.num_bytes, request.options.pages);
}

bool on_hugetlb(const RoomRequest& request) { return request.options.pages == PageKind::k2M; }

//! A sum over requests, and whose they are.
struct Need {
  int64_t bytes = 0;
  std::vector<std::string> labels;

  void add(int64_t more, const std::string& label) {
    if (more == 0) return;
    bytes += more;
    if (std::find(labels.begin(), labels.end(), label) == labels.end()) labels.push_back(label);
  }
  std::string text(int64_t there, const std::string& which) const {
    std::string names;
    for (const std::string& label : labels) names += (names.empty() ? "" : ", ") + label;
    return concat(names, ": expected ", text_of(bytes), " of memory, found ",
                  text_of(std::max<int64_t>(0, there)), " in ", which);
  }
  void refuse_beyond(int64_t there, const std::string& which) const {
    if (bytes > there) throw Error(ENGRAM_OUT_OF_MEMORY, text(there, which));
  }
};

//! What rank `rank` touches of a request.
int64_t touched_by(const RoomRequest& request, size_t rank) {
  if (request.touched.empty()) {
    return static_cast<int>(rank) == request.creator ? size_of(request) : 0;
  }
  return rank < request.touched.size() ? request.touched[rank] : 0;
}

void check_cgroups(const std::vector<RoomRequest>& requests, const std::vector<Limits>& by_rank,
                   std::vector<std::string>& warnings) {
  // Ranks of one container share its cgroup, those of several pay apart, and all pay above.
  struct Shared {
    CgroupLimit limit;
    Need need;
  };
  std::map<std::string, Shared> shared;
  for (size_t rank = 0; rank < by_rank.size(); ++rank) {
    for (const CgroupLimit& limit : by_rank[rank].cgroups) {
      Shared& one = shared.emplace(limit.identity, Shared{limit, {}}).first->second;
      one.limit.used = std::max(one.limit.used, limit.used);
      for (const RoomRequest& request : requests) {
        if (request.options.kind == MemoryKind::kCumem) continue;  // the driver's, never charged
        if (on_hugetlb(request) != limit.hugetlb) continue;
        one.need.add(touched_by(request, rank), request.label);
      }
    }
  }
  for (const auto& [identity, one] : shared) {
    const int64_t there = one.limit.limit - one.limit.used;
    const std::string which = concat("cgroup limit ", one.limit.file, " (", one.limit.limit,
                                     " bytes, ", one.limit.used, " in use)");
    if (one.limit.refuses) {
      one.need.refuse_beyond(there, which);
    } else if (one.need.bytes > there) {
      warnings.push_back(one.need.text(there, which) + ": the kernel slows down beyond it");
    }
  }
}

void check_shm(const std::vector<RoomRequest>& requests, const std::vector<Limits>& by_rank) {
  struct Shared {
    const Limits* limits;
    Need need;
  };
  std::map<std::string, Shared> shared;
  for (const RoomRequest& request : requests) {
    if (request.options.kind != MemoryKind::kShm) continue;
    const Limits& limits = by_rank.at(static_cast<size_t>(request.creator));
    if (limits.shm_free_bytes < 0) continue;
    Shared& one = shared.emplace(limits.shm_identity, Shared{&limits, {}}).first->second;
    one.need.add(size_of(request), request.label);
  }
  for (const auto& [identity, one] : shared) {
    one.need.refuse_beyond(one.limits->shm_free_bytes,
                           concat("/dev/shm (", one.limits->shm_size_bytes, " bytes in all)"));
  }
}

//! Each array is a file of its own.
void check_files(const std::vector<RoomRequest>& requests, const std::vector<Limits>& by_rank) {
  for (const RoomRequest& request : requests) {
    const MemoryKind kind = request.options.kind;
    if (kind != MemoryKind::kMemfd && kind != MemoryKind::kShm) continue;
    const int64_t most = by_rank.at(static_cast<size_t>(request.creator)).file_bytes;
    if (most < 0) continue;
    Need need;
    need.add(size_of(request), request.label);
    need.refuse_beyond(most,
                       concat("the limit on file sizes (ulimit -f) of rank ", request.creator));
  }
}

void check_gpus(const std::vector<Limits>& by_rank) {
  struct Gpu {
    int64_t needed = 0;
    int64_t there = INT64_MAX;
    std::string ranks;
    int num_ranks = 0;
  };
  std::map<std::string, Gpu> gpus;
  for (size_t rank = 0; rank < by_rank.size(); ++rank) {
    const GpuRoom& room = by_rank[rank].gpu;
    if (room.gpu.empty()) continue;
    Gpu& gpu = gpus[room.gpu];
    gpu.needed += room.needed_bytes;
    gpu.there = std::min(gpu.there, room.free_bytes);
    gpu.ranks += concat(gpu.ranks.empty() ? "" : ", ", rank);
    ++gpu.num_ranks;
  }
  for (const auto& [name, gpu] : gpus) {
    if (gpu.needed <= gpu.there) continue;
    throw Error(ENGRAM_OUT_OF_MEMORY,
                concat("GPU ", name, ": expected ", text_of(gpu.needed),
                       " of free memory for the tables of rank", gpu.num_ranks == 1 ? " " : "s ",
                       gpu.ranks, ", found ", text_of(gpu.there)));
  }
}

//! Nodes that a rank's cpuset allows; empty where its machine does not say.
std::vector<int> allowed_by(const Limits& limits) {
  std::vector<int> nodes;
  for (const NodeRoom& room : limits.nodes) {
    if (room.allowed) nodes.push_back(room.node);
  }
  return nodes;
}

void check_nodes(const std::vector<RoomRequest>& requests, const std::vector<Limits>& by_rank,
                 bool hugetlb, std::vector<std::string>& warnings) {
  std::map<int, int64_t> rooms;
  for (const Limits& limits : by_rank) {
    for (const NodeRoom& node : limits.nodes) {
      const int64_t room = hugetlb ? node.free_hugetlb_bytes : node.free_bytes;
      const auto [found, added] = rooms.emplace(node.node, room);
      if (!added) found->second = std::min(found->second, room);
    }
  }
  if (rooms.size() < 2) return;  // the machine's memory, which the other limits are about
  std::map<int, Need> bound;
  std::map<int, Need> spread;
  std::map<std::vector<int>, Need> within;  // of cpusets
  for (const RoomRequest& request : requests) {
    if (on_hugetlb(request) != hugetlb) continue;
    const NumaPolicy& numa = request.options.numa;
    const std::vector<int> allowed = allowed_by(by_rank.at(static_cast<size_t>(request.creator)));
    if (numa.kind == NumaPolicy::kNode) bound[numa.node].add(size_of(request), request.label);
    within[allowed].add(size_of(request), request.label);
    if (numa.kind != NumaPolicy::kInterleave) continue;
    for (const int node : allowed) {
      spread[node].add(size_of(request) / static_cast<int64_t>(allowed.size()), request.label);
    }
  }
  const std::string pages = hugetlb ? " on hugetlb pages of 2 MiB" : "";
  for (const auto& [node, room] : rooms) {
    const std::string which = concat("NUMA node ", node, pages);
    bound[node].refuse_beyond(room, which);
    const int64_t rest = room - bound[node].bytes;
    if (spread[node].bytes > rest) {
      warnings.push_back(spread[node].text(rest, which) + ": other nodes get what is over");
    }
  }
  for (const auto& [allowed, need] : within) {
    if (allowed.empty() || allowed.size() == rooms.size()) continue;
    int64_t there = 0;
    std::string names;
    for (const int node : allowed) {
      there += rooms[node];
      names += (names.empty() ? "" : ", ") + std::to_string(node);
    }
    need.refuse_beyond(there, concat("the NUMA nodes that the cpuset allows (", names, ")", pages));
  }
}

//! The least of what ranks say about their machine; -1 where none says.
int64_t least(const std::vector<Limits>& by_rank, int64_t Limits::* number) {
  int64_t smallest = -1;
  for (const Limits& limits : by_rank) {
    const int64_t value = limits.*number;
    if (value >= 0 && (smallest < 0 || value < smallest)) smallest = value;
  }
  return smallest;
}

}  // namespace

std::vector<std::string> check_room(const std::vector<RoomRequest>& requests,
                                    const std::vector<Limits>& by_rank) {
  std::vector<std::string> warnings;
  check_gpus(by_rank);
  check_files(requests, by_rank);
  check_shm(requests, by_rank);
  Need ordinary;
  Need hugetlb;
  for (const RoomRequest& request : requests) {
    (on_hugetlb(request) ? hugetlb : ordinary).add(size_of(request), request.label);
  }
  const int64_t free_hugetlb = least(by_rank, &Limits::free_hugetlb_bytes);
  if (hugetlb.bytes > 0) {
    hugetlb.refuse_beyond(std::max<int64_t>(0, free_hugetlb),
                          "hugetlb pages of 2 MiB (vm.nr_hugepages sets them aside)");
  }
  check_cgroups(requests, by_rank, warnings);
  for (const bool on_huge : {false, true}) check_nodes(requests, by_rank, on_huge, warnings);
  const int64_t available = least(by_rank, &Limits::available_bytes);
  const int64_t assumed = least(by_rank, &Limits::assumed_bytes);
  if (assumed >= 0) {
    ordinary.refuse_beyond(assumed, "assume_ram");
  } else if (available >= 0 && ordinary.bytes > available) {
    warnings.push_back(ordinary.text(available, "MemAvailable") +
                       ": a virtual machine may be given more (assume_ram says how much)");
  }
  return warnings;
}

}  // namespace engram
