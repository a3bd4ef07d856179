// SPDX-License-Identifier: Apache-2.0
// Limits read from files as kernels write them, and what they leave for tables.
#include "table/limits.h"

#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "doctest/doctest.h"
#include "engram/error.h"
#include "ranks.h"
#include "texts.h"

namespace engram {
namespace {

constexpr int64_t kGibi = 1 << 30;

//! A root folder with files of a machine.
class Machine {
 public:
  Machine() {
    char name[] = "/tmp/engram-machine-XXXXXX";
    REQUIRE(mkdtemp(name) != nullptr);
    root_ = name;
  }
  ~Machine() { std::filesystem::remove_all(root_); }
  Machine(const Machine&) = delete;
  Machine& operator=(const Machine&) = delete;

  void write(const std::string& path, const std::string& text) const {
    const std::filesystem::path file = root_ + "/" + path;
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file) << text;
  }
  const std::string& root() const { return root_; }

 private:
  std::string root_;
};

RoomRequest request(int64_t num_bytes, const HostMemoryOptions& options = {}) {
  return {.label = "engram.1 values", .options = options, .num_bytes = num_bytes};
}

std::string refusal(const std::vector<RoomRequest>& requests, const std::vector<Limits>& by_rank) {
  try {
    const std::vector<std::string> warnings = check_room(requests, by_rank);
    return warnings.empty() ? "fits" : "warning: " + warnings.front();
  } catch (const Error& error) {
    CHECK(error.status() == ENGRAM_OUT_OF_MEMORY);
    return error.what();
  }
}

TEST_CASE("cgroup v2: limits of this process's cgroup and those above, page cache left out") {
  const Machine machine;
  machine.write("proc/self/cgroup", "0::/user/job\n");
  machine.write("proc/self/mountinfo",
                "24 1 0:22 / / rw - ext4 /dev/vda rw\n"
                "30 24 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw\n");
  machine.write("sys/fs/cgroup/user/job/memory.max", "max\n");
  machine.write("sys/fs/cgroup/user/job/memory.high", "3000\n");
  machine.write("sys/fs/cgroup/user/job/memory.current", "1000\n");
  machine.write("sys/fs/cgroup/user/job/memory.stat", "anon 100\ninactive_file 300\n");
  machine.write("sys/fs/cgroup/user/memory.max", "8000\n");
  machine.write("sys/fs/cgroup/user/memory.current", "5000\n");
  machine.write("sys/fs/cgroup/user/memory.stat",
                "active_file 600\ninactive_file 400\nfile 9000\n");
  machine.write("sys/fs/cgroup/user/hugetlb.2MB.max", "4194304\n");
  machine.write("sys/fs/cgroup/user/hugetlb.2MB.current", "2097152\n");
  const std::vector<CgroupLimit> cgroups = read_limits(machine.root()).cgroups;
  REQUIRE(cgroups.size() == 3);
  CHECK(cgroups[0].file == machine.root() + "/sys/fs/cgroup/user/job/memory.high");
  CHECK(!cgroups[0].refuses);
  CHECK(cgroups[0].limit == 3000);
  CHECK(cgroups[0].used == 700);
  CHECK(cgroups[1].file == machine.root() + "/sys/fs/cgroup/user/memory.max");
  CHECK(cgroups[1].refuses);
  CHECK(cgroups[1].limit == 8000);
  CHECK(cgroups[1].used == 4000);
  CHECK(cgroups[2].hugetlb);
  CHECK(cgroups[2].used == 2097152);
}

TEST_CASE("cgroup v1 in a container: the mount is this process's cgroup") {
  const Machine machine;
  machine.write("proc/self/cgroup",
                "9:name=systemd:/docker/abc\n5:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n"
                "3:hugetlb:/docker/abc\n0::/\n");
  machine.write("proc/self/mountinfo",
                "31 30 0:27 /docker/abc /sys/fs/cgroup/memory ro master:9 - cgroup cgroup "
                "rw,memory\n"
                "32 30 0:28 /docker/abc /sys/fs/cgroup/huge\\040tlb ro - cgroup cgroup "
                "rw,hugetlb\n");
  machine.write("sys/fs/cgroup/memory/memory.limit_in_bytes", "70000\n");
  machine.write("sys/fs/cgroup/memory/memory.usage_in_bytes", "50000\n");
  machine.write("sys/fs/cgroup/memory/memory.stat",
                "inactive_file 1\ntotal_inactive_file 20000\ntotal_active_file 10000\n");
  machine.write("sys/fs/cgroup/huge tlb/hugetlb.2MB.limit_in_bytes", "9223372036854771712\n");
  const std::vector<CgroupLimit> cgroups = read_limits(machine.root()).cgroups;
  REQUIRE(cgroups.size() == 1);
  CHECK(cgroups[0].limit == 70000);
  CHECK(cgroups[0].used == 20000);
}

TEST_CASE("nodes, hugetlb pages and MemAvailable") {
  const Machine machine;
  machine.write("proc/meminfo", "MemTotal: 100 kB\nMemAvailable:   40 kB\n");
  machine.write("proc/self/status", "Name: x\nMems_allowed_list:\t0\n");
  machine.write("sys/devices/system/node/has_memory", "0-1\n");
  for (const char* node : {"0", "1"}) {
    const std::string folder = std::string("sys/devices/system/node/node") + node + "/";
    machine.write(folder + "meminfo", std::string("Node ") + node + " MemFree:       10 kB\nNode " +
                                          node + " Active(file):       3 kB\n");
    machine.write(folder + "hugepages/hugepages-2048kB/free_hugepages", "2\n");
  }
  const std::string huge = "sys/kernel/mm/hugepages/hugepages-2048kB/";
  machine.write(huge + "free_hugepages", "5\n");
  machine.write(huge + "resv_hugepages", "1\n");
  machine.write(huge + "nr_overcommit_hugepages", "3\n");
  machine.write(huge + "surplus_hugepages", "1\n");
  const Limits limits = read_limits(machine.root());
  CHECK(limits.available_bytes == 40 * 1024);
  CHECK(limits.free_hugetlb_bytes == 6 * kHugePageBytes);
  REQUIRE(limits.nodes.size() == 2);
  CHECK(limits.nodes[0].allowed);
  CHECK(!limits.nodes[1].allowed);
  CHECK(limits.nodes[1].free_bytes == 13 * 1024);
  CHECK(limits.nodes[1].free_hugetlb_bytes == 2 * kHugePageBytes);
}

TEST_CASE("a machine that says nothing bounds nothing") {
  const Machine machine;
  const Limits limits = read_limits(machine.root());
  CHECK(limits.cgroups.empty());
  CHECK(limits.nodes.empty());
  CHECK(limits.available_bytes == -1);
  CHECK(limits.free_hugetlb_bytes == -1);
  CHECK(refusal({request(kGibi << 20)}, {limits}) == "fits");
}

TEST_CASE("this machine has room for a page, and not for an exbibyte on /dev/shm") {
  const Limits limits = read_limits();
  CHECK(limits.available_bytes > 0);
  CHECK(refusal({request(4096)}, {limits}) == "fits");
  if (limits.shm_size_bytes >= 0) {
    const HostMemoryOptions shm{.kind = MemoryKind::kShm};
    CHECK(has(refusal({request(kGibi << 29, shm)}, {limits}), "in /dev/shm ("));
  }
  const nlohmann::json json = nlohmann::json::parse(to_json(limits).dump());
  CHECK(to_json(limits_from_json(json)) == json);
}

TEST_CASE("a limit that this machine's kernel sets") {
  const std::string folder = "/sys/fs/cgroup/memory/engram-test-" + std::to_string(getpid());
  struct Remove {
    std::string folder;
    ~Remove() { rmdir(folder.c_str()); }
  } const remove{folder};
  if (mkdir(folder.c_str(), 0700) != 0 ||
      !(std::ofstream(folder + "/memory.limit_in_bytes") << kGibi << std::flush)) {
    MESSAGE("skipped: no memory cgroup (v1) can be made here");
    return;
  }
  Process rank([&] {
    std::ofstream(folder + "/cgroup.procs") << getpid() << std::flush;
    const Limits limits = read_limits();
    return refusal({request(kGibi / 2)}, {limits}) + "; " + refusal({request(kGibi)}, {limits});
  });
  const std::string text = rank.result();
  CHECK(has(text, "fits; engram.1 values: expected 1073741824 bytes"));
  CHECK(has(text, folder + "/memory.limit_in_bytes (1073741824 bytes, "));
}

TEST_CASE("a cgroup that ranks share holds what all of them touch") {
  Limits rank;
  rank.cgroups = {{.identity = "1", .file = "/own/memory.max", .limit = 6 * kGibi, .used = kGibi},
                  {.identity = "2", .file = "/all/memory.max", .limit = 9 * kGibi, .used = 0}};
  Limits apart = rank;
  apart.cgroups[0].identity = "3";
  RoomRequest table = request(8 * kGibi);
  table.touched = {4 * kGibi, 4 * kGibi};
  CHECK(refusal({table}, {rank, apart}) == "fits");
  const std::string text = refusal({table}, {rank, rank});
  CHECK(has(text,
            "engram.1 values: expected 8589934592 bytes (8.00 GiB) of memory, found "
            "5368709120 bytes (5.00 GiB) in cgroup limit /own/memory.max"));
  CHECK(has(text, "(6442450944 bytes, 1073741824 in use)"));
  table.touched = {5 * kGibi, 5 * kGibi};
  CHECK(has(refusal({table}, {rank, apart}), "/all/memory.max"));
  CHECK(has(refusal({request(7 * kGibi)}, {rank, apart}), "/own/memory.max"));  // rank 0 alone
  // The driver's own memory is nobody's, and hugetlb pages have limits of their own.
  CHECK(refusal({request(7 * kGibi, {.kind = MemoryKind::kCumem})}, {rank}) == "fits");
  rank.free_hugetlb_bytes = 100 * kGibi;
  CHECK(refusal({request(7 * kGibi, {.pages = PageKind::k2M})}, {rank}) == "fits");
  rank.cgroups[0].hugetlb = true;
  CHECK(has(refusal({request(7 * kGibi, {.pages = PageKind::k2M})}, {rank}), "/own/memory.max"));
  rank.cgroups = {{.identity = "4", .file = "/own/memory.high", .refuses = false, .limit = kGibi}};
  CHECK(has(refusal({request(2 * kGibi)}, {rank}), "warning: engram.1 values: expected"));
}

TEST_CASE("/dev/shm bounds shm alone, that of the rank which creates it") {
  Limits container;
  container.shm_identity = "1";
  container.shm_size_bytes = 64 << 20;
  container.shm_free_bytes = 63 << 20;
  Limits host = container;
  host.shm_identity = "2";
  host.shm_free_bytes = kGibi;
  const HostMemoryOptions shm{.kind = MemoryKind::kShm};
  CHECK(refusal({request(80 << 20)}, {container}) == "fits");
  CHECK(has(refusal({request(80 << 20, shm)}, {container, host}),
            "expected 83886080 bytes (0.08 GiB) of memory, found 66060288 bytes (0.06 GiB) in "
            "/dev/shm (67108864 bytes in all)"));
  CHECK(refusal({request(80 << 20, shm)}, {host, container}) == "fits");
  RoomRequest second = request(kGibi - (60 << 20), shm);
  second.label = "engram.14 values";
  CHECK(has(refusal({request(80 << 20, shm), second}, {host}),
            "engram.1 values, engram.14 values: expected"));
  // All that is needed, though the first alone is too much.
  CHECK(has(refusal({request(80 << 20, shm), second}, {container}),
            "engram.1 values, engram.14 values: expected 1094713344 bytes"));
}

TEST_CASE("the largest file of the rank that creates it bounds each memfd and shm file by itself") {
  Limits small;
  small.file_bytes = kGibi - 1;
  RoomRequest one = request(kGibi);
  one.creator = 1;
  CHECK(refusal({one, one}, {{}, small}) ==
        "engram.1 values: expected 1073741824 bytes (1.00 GiB) of memory, found 1073741823 bytes "
        "(1.00 GiB) in the limit on file sizes (ulimit -f) of rank 1");
  CHECK(refusal({one}, {small, {}}) == "fits");
  for (const MemoryKind kind : {MemoryKind::kPrivate, MemoryKind::kCumem}) {
    one.options.kind = kind;
    CHECK(refusal({one}, {{}, small}) == "fits");
  }
  one.options.kind = MemoryKind::kShm;
  small.file_bytes = kGibi;
  CHECK(refusal({one, one}, {{}, small}) == "fits");
}

TEST_CASE("a GPU holds what all its ranks need") {
  const auto on = [](const std::string& gpu, int64_t free_bytes, int64_t needed_bytes) {
    Limits limits;
    limits.gpu = {gpu, free_bytes, needed_bytes};
    return limits_from_json(to_json(limits));  // as it travels
  };
  CHECK(refusal({}, {on("A", 10, 4), on("B", 1, 1), on("A", 8, 4)}) == "fits");
  CHECK(refusal({}, {on("A", 10, 4), on("B", 1, 1), on("A", 7, 4)}) ==
        "GPU A: expected 8 bytes (0.00 GiB) of free memory for the tables of ranks 0, 2, found 7 "
        "bytes (0.00 GiB)");
  CHECK(refusal({}, {{}, on("B", 1, 2)}) ==
        "GPU B: expected 2 bytes (0.00 GiB) of free memory for the tables of rank 1, found 1 "
        "bytes (0.00 GiB)");
}

TEST_CASE("hugetlb pages and NUMA nodes refuse, MemAvailable warns, assume_ram decides") {
  Limits limits;
  limits.available_bytes = 4 * kGibi;
  CHECK(refusal({request(4 * kGibi)}, {limits}) == "fits");
  CHECK(has(refusal({request(4 * kGibi + 1)}, {limits}), "warning: engram.1 values: expected"));
  CHECK(has(refusal({request(5 * kGibi)}, {limits}), "in MemAvailable: a virtual machine"));
  Limits assumed = limits;
  assumed.assumed_bytes = 5 * kGibi;
  CHECK(refusal({request(5 * kGibi)}, {limits, assumed}) == "fits");
  Limits careful = limits;
  careful.assumed_bytes = 3 * kGibi;
  CHECK(has(refusal({request(5 * kGibi)}, {assumed, careful}), "(3.00 GiB) in assume_ram"));
  const HostMemoryOptions huge{.pages = PageKind::k2M};
  CHECK(has(refusal({request(kGibi, huge)}, {limits}), "found 0 bytes (0.00 GiB) in hugetlb"));
  limits.free_hugetlb_bytes = kGibi;
  CHECK(refusal({request(kGibi, huge)}, {limits}) == "fits");
  CHECK(has(refusal({request(kGibi + 1, huge)}, {limits}), "expected 1075838976 bytes"));

  limits.available_bytes = -1;
  limits.nodes = {{.node = 0, .free_bytes = 2 * kGibi, .free_hugetlb_bytes = kGibi}};
  const HostMemoryOptions first{.numa = {NumaPolicy::kNode, 0}};
  CHECK(refusal({request(3 * kGibi, first)}, {limits}) == "fits");  // one node: MemAvailable's
  limits.nodes.push_back({.node = 1, .free_bytes = 4 * kGibi});
  CHECK(has(refusal({request(3 * kGibi, first)}, {limits}),
            "expected 3221225472 bytes (3.00 GiB) of memory, found 2147483648 bytes (2.00 GiB) in "
            "NUMA node 0"));
  CHECK(has(refusal({request(2 * kGibi, first), request(1, first)}, {limits}), "NUMA node 0"));
  CHECK(refusal({request(3 * kGibi, {.numa = {NumaPolicy::kNode, 1}})}, {limits}) == "fits");
  CHECK(has(
      refusal({request(kGibi, {.pages = PageKind::k2M, .numa = {NumaPolicy::kNode, 1}})}, {limits}),
      "NUMA node 1 on hugetlb pages"));
  const HostMemoryOptions spread{.numa = {NumaPolicy::kInterleave, -1}};
  CHECK(refusal({request(4 * kGibi, spread)}, {limits}) == "fits");
  CHECK(has(refusal({request(5 * kGibi, spread)}, {limits}), "warning: engram.1 values"));
  limits.nodes[1].allowed = false;
  CHECK(has(refusal({request(3 * kGibi)}, {limits}), "the cpuset allows (0)"));
}

}  // namespace
}  // namespace engram
