// SPDX-License-Identifier: Apache-2.0
// Memory that processes share: what each kind holds to, and what is refused, with real processes.
#include "table/host_memory.h"

#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/utsname.h>

#include <algorithm>
#include <cstddef>
#include <cstdio>

#include "doctest/doctest.h"
#include "engram/error.h"
#include "ranks.h"
#include "texts.h"

namespace engram {
namespace {

constexpr int64_t kMebi = 1 << 20;

uint8_t byte_at(int64_t i) { return static_cast<uint8_t>(i * 31 + i / 4096 + 7); }

void fill(const HostMemory& memory) {
  for (int64_t i = 0; i < memory.num_bytes(); ++i) memory.data()[i] = byte_at(i);
}

bool is_filled(const HostMemory& memory) {
  for (int64_t i = 0; i < memory.num_bytes(); ++i) {
    if (memory.data()[i] != byte_at(i)) return false;
  }
  return true;
}

bool is_zero(const uint8_t* bytes, int64_t count) {
  return std::all_of(bytes, bytes + count, [](uint8_t byte) { return byte == 0; });
}

std::vector<FileDescriptor> duplicates(const HostMemory& memory) {
  std::vector<FileDescriptor> copies;
  for (const FileDescriptor& one : memory.descriptors()) copies.push_back(one.duplicate());
  return copies;
}

size_t count_mappings() {
  std::ifstream maps("/proc/self/maps");
  return static_cast<size_t>(
      std::count(std::istreambuf_iterator<char>(maps), std::istreambuf_iterator<char>(), '\n'));
}

bool kernel_is(int major, int minor) {
  struct utsname name{};
  int found[2] = {0, 0};
  uname(&name);
  std::sscanf(name.release, "%d.%d", &found[0], &found[1]);
  return found[0] > major || (found[0] == major && found[1] >= minor);
}

const MemoryKind kKinds[] = {MemoryKind::kPrivate, MemoryKind::kMemfd, MemoryKind::kShm};
const MemoryKind kShared[] = {MemoryKind::kMemfd, MemoryKind::kShm};

TEST_CASE("names of memory, pages and NUMA policies") {
  for (const char* name : {"private", "memfd", "shm", "cumem"}) {
    CHECK(memory_kind_name(parse_memory_kind(name)) == std::string(name));
  }
  for (const char* name : {"auto", "4k", "2m"}) {
    CHECK(page_kind_name(parse_page_kind(name)) == std::string(name));
  }
  for (const char* name : {"default", "local", "interleave", "node:0", "node:17", "gpu"}) {
    CHECK(numa_policy_name(parse_numa_policy(name)) == name);
  }
  CHECK(has(message_of([] { parse_memory_kind("mmap"); }), "found \"mmap\""));
  CHECK(has(message_of([] { parse_page_kind("1g"); }), "found \"1g\""));
  for (const char* name : {"node", "node:", "node:-1", "node:1x", "node:99999", ""}) {
    CHECK(has(message_of([&] { parse_numa_policy(name); }), concat("found \"", name, "\"")));
  }
}

TEST_CASE("new memory is zeros on a 2 MiB boundary, and as long as was asked") {
  for (const MemoryKind kind : kKinds) {
    for (const int64_t num_bytes : {int64_t{1}, int64_t{4096}, 3 * kMebi + 5}) {
      CAPTURE(std::string(memory_kind_name(kind)));
      const HostMemory memory = HostMemory::create({.kind = kind}, num_bytes, "zeros");
      CHECK(memory.num_bytes() == num_bytes);
      CHECK(memory.mapped_bytes() == whole_pages(num_bytes, PageKind::kAuto));
      CHECK(memory.mapped_bytes() - num_bytes < small_page_bytes());
      CHECK(reinterpret_cast<uintptr_t>(memory.data()) % kHugePageBytes == 0);
      CHECK(page_share(memory.data(), num_bytes).resident_bytes == 0);
      CHECK(memory.descriptors().size() == (kind == MemoryKind::kPrivate ? 0 : 1));
      CHECK(is_zero(memory.data(), memory.mapped_bytes()));
    }
  }
  CHECK(has(message_of([] { HostMemory::create({}, 0, "none"); }), "found 0"));
}

TEST_CASE("another process sees what is written, and holds the memory by itself") {
  for (const MemoryKind kind : kShared) {
    CAPTURE(std::string(memory_kind_name(kind)));
    const int64_t num_bytes = 5 * kMebi + 123;
    Signal attached;
    Signal written;
    auto memory =
        std::make_unique<HostMemory>(HostMemory::create({.kind = kind}, num_bytes, "shared"));
    Process other([&] {
      const HostMemory mine =
          HostMemory::attach({.kind = kind}, duplicates(*memory), num_bytes, "attached");
      attached.set();
      if (!written.wait()) return std::string("not written");
      if (!is_filled(mine)) return std::string("other bytes");
      return std::string(is_zero(mine.data() + num_bytes, mine.mapped_bytes() - num_bytes)
                             ? "the same bytes"
                             : "no zeros at the end");
    });
    REQUIRE(attached.wait());
    memory->prefault(0, num_bytes);
    fill(*memory);
    memory.reset();  // the other maps it on
    written.set();
    CHECK(other.result() == "the same bytes");
  }
}

TEST_CASE("shared memory is this user's alone, and of one size for good") {
  for (const MemoryKind kind : kShared) {
    CAPTURE(std::string(memory_kind_name(kind)));
    const HostMemory memory = HostMemory::create({.kind = kind}, 10000, "sealed");
    const int file = memory.descriptors().front().get();
    struct stat status{};
    REQUIRE(fstat(file, &status) == 0);
    CHECK((status.st_mode & 0777) == 0600);
    CHECK(status.st_nlink == 0);
    CHECK((fcntl(file, F_GETFD) & FD_CLOEXEC) != 0);
    if (kind == MemoryKind::kShm) continue;
    CHECK(ftruncate(file, 4096) != 0);
    CHECK(ftruncate(file, 1 << 20) != 0);
    CHECK(fcntl(file, F_ADD_SEALS, F_SEAL_WRITE) != 0);
  }
}

TEST_CASE("attach refuses what is not the memory that was announced") {
  const HostMemory memory = HostMemory::create({}, 8192, "original");
  const HostMemory shm = HostMemory::create({.kind = MemoryKind::kShm}, 8192, "original");
  const auto refused = [&](const HostMemoryOptions& options, std::vector<FileDescriptor> files,
                           int64_t num_bytes) {
    return message_of([&] { HostMemory::attach(options, std::move(files), num_bytes, "copy"); });
  };
  CHECK(has(refused({}, duplicates(memory), 8193), "expected shared memory of 12288 bytes"));
  CHECK(has(refused({}, duplicates(memory), 4096), "found 8192"));
  CHECK(has(refused({}, {}, 8192), "expected 1 descriptor"));
  CHECK(has(refused({}, duplicates(shm), 8192), "sealed"));
  CHECK(has(refused({.kind = MemoryKind::kPrivate}, duplicates(memory), 8192), "one process"));
  CHECK(has(refused({.pages = PageKind::k2M}, duplicates(memory), 2 * kMebi), "found 8192"));
  std::vector<FileDescriptor> disk;
  disk.emplace_back(open("/tmp", O_TMPFILE | O_RDWR | O_CLOEXEC, 0600));
  REQUIRE(disk.front());
  REQUIRE(ftruncate(disk.front().get(), 8192) == 0);
  const std::string text = refused({}, std::move(disk), 8192);
  CHECK((has(text, "expected shared memory on a tmpfs") || has(text, "sealed")));
  std::vector<FileDescriptor> unsealed;
  unsealed.emplace_back(memfd_create("unsealed", MFD_CLOEXEC));
  REQUIRE(ftruncate(unsealed.front().get(), 8192) == 0);
  CHECK(has(refused({}, std::move(unsealed), 8192), "sealed"));
}

TEST_CASE("combinations that do not exist are refused") {
  CHECK(has(message_of([] { check_host_memory({MemoryKind::kShm, PageKind::k2M}); }), "/dev/shm"));
  CHECK(has(message_of([] { check_host_memory({MemoryKind::kCumem, PageKind::k4K}); }), "driver"));
  CHECK(has(message_of([] { check_host_memory({.numa = {NumaPolicy::kGpu, -1}}); }), "gpu"));
  CHECK(has(message_of([] { check_host_memory({.numa = {NumaPolicy::kNode, 999}}); }),
            "expected a NUMA node of this machine"));
}

TEST_CASE("prefault gives all pages memory and changes no byte") {
  for (const MemoryKind kind : kKinds) {
    for (const PageKind pages : {PageKind::kAuto, PageKind::k4K}) {
      CAPTURE(std::string(memory_kind_name(kind)));
      CAPTURE(std::string(page_kind_name(pages)));
      const int64_t num_bytes = 70 * kMebi + 4097;  // two pieces, with an end on small pages
      HostMemory memory = HostMemory::create({.kind = kind, .pages = pages}, num_bytes, "faulted");
      memory.data()[0] = 1;
      memory.data()[66 * kMebi] = 2;
      memory.prefault(0, 30 * kMebi + 1);  // parts that meet in a page and inside a huge page
      memory.prefault(30 * kMebi + 1, num_bytes);
      CHECK(memory.data()[0] == 1);
      CHECK(memory.data()[66 * kMebi] == 2);
      CHECK(is_zero(memory.data() + 1, 66 * kMebi - 1));
      CHECK(is_zero(memory.data() + 66 * kMebi + 1, num_bytes - 66 * kMebi - 1));
      const PageShare share = page_share(memory.data(), num_bytes);
      CHECK(share.resident_bytes == memory.mapped_bytes());
      if (pages == PageKind::k4K) CHECK(share.huge_bytes == 0);
      if (pages == PageKind::kAuto && kernel_is(6, 1)) {
        MESSAGE("on huge pages: ", share.huge_bytes, " of ", memory.mapped_bytes());
        WARN(share.huge_bytes >= 66 * kMebi);  // a machine without 2 MiB in one piece has none
      }
      fill(memory);
      memory.prefault(0, num_bytes);
      CHECK(is_filled(memory));
    }
  }
}

TEST_CASE("ranks prefault their parts of one memory side by side") {
  const int64_t num_bytes = 48 * kMebi;
  HostMemory memory = HostMemory::create({}, num_bytes, "parts");
  std::vector<Process> ranks;
  for (int rank = 0; rank < 3; ++rank) {
    ranks.emplace_back([&, rank] {
      HostMemory mine = HostMemory::attach({}, duplicates(memory), num_bytes, "part");
      const int64_t begin = rank * 16 * kMebi;
      mine.prefault(begin, begin + 16 * kMebi);
      for (int64_t i = begin; i < begin + 16 * kMebi; ++i) mine.data()[i] = byte_at(i);
      return std::string("done");
    });
  }
  for (Process& rank : ranks) CHECK(rank.result() == "done");
  CHECK(is_filled(memory));
}

TEST_CASE("a cancelled prefault ends without an error") {
  HostMemory memory = HostMemory::create({}, 256 * kMebi, "cancelled");
  std::atomic<int> pieces{0};
  memory.prefault(0, memory.num_bytes(), [&] { return ++pieces > 1; });
  CHECK(page_share(memory.data(), memory.num_bytes()).resident_bytes <= 64 * kMebi);
  const auto beyond = [&](int64_t begin, int64_t end) {
    return message_of([&] { memory.prefault(begin, end); });
  };
  CHECK(has(beyond(-1, 5), "found -1 to 5"));
  CHECK(has(beyond(0, memory.num_bytes() + 1), "expected a range"));
  CHECK(has(beyond(5, 4), "found 5 to 4"));
}

TEST_CASE("a full /dev/shm is an error with the numbers, and no signal") {
  Process rank([] {
    if (unshare(CLONE_NEWNS) != 0) return std::string("skip");
    if (mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0) return std::string("skip");
    if (mount("none", "/dev/shm", "tmpfs", 0, "size=16m") != 0) return std::string("skip");
    std::string text;
    {
      HostMemory memory =
          HostMemory::create({.kind = MemoryKind::kShm}, 100 * kMebi, "engram.1 values");
      text = message_of([&] { memory.prefault(0, memory.num_bytes()); });
      HostMemory other = HostMemory::create({}, 100 * kMebi, "memfd has no such limit");
      other.prefault(0, other.num_bytes());
    }
    struct statvfs status{};
    statvfs("/dev/shm", &status);
    return concat(text, status.f_bfree == status.f_blocks ? "; all free again" : "; leaked");
  });
  const std::string text = rank.result(60);
  if (text == "skip") {
    MESSAGE("skipped: mount namespaces are off here");
    return;
  }
  CHECK(has(text, "engram.1 values: memory \"shm\" with pages \"auto\": expected 104857600 bytes"));
  CHECK(has(text, "of 16777216 bytes free"));
  CHECK(has(text, "all free again"));
}

//! Madvise as kernels before 5.14 know it, from here on in this process.
bool use_older_madvise() {
  const auto argument = static_cast<uint32_t>(offsetof(seccomp_data, args) + 2 * sizeof(uint64_t));
  sock_filter filter[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_madvise, 0, 3),
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, argument),
      BPF_JUMP(BPF_JMP | BPF_JGE | BPF_K, 22, 0, 1),  // MADV_POPULATE_READ and all after it
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EINVAL),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  const sock_fprog program{sizeof(filter) / sizeof(filter[0]), filter};
  return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
         prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
}

TEST_CASE("an older kernel, too, prefaults without a signal") {
  Process rank([] {
    const bool small_shm = unshare(CLONE_NEWNS) == 0 &&
                           mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0 &&
                           mount("none", "/dev/shm", "tmpfs", 0, "size=16m") == 0;
    if (!use_older_madvise() || madvise(nullptr, 0, 23) == 0) return std::string("skip");
    for (const MemoryKind kind : kKinds) {
      HostMemory memory = HostMemory::create({.kind = kind}, 9 * kMebi + 1, "older");
      fill(memory);
      memory.prefault(0, memory.num_bytes());
      if (!is_filled(memory)) return concat(memory_kind_name(kind), " lost bytes");
      const HostMemory empty = HostMemory::create({.kind = kind}, 1, "older");
      HostMemory touched = HostMemory::create({.kind = kind}, 3 * kMebi, "older");
      touched.prefault(0, touched.num_bytes());
      const PageShare share = page_share(touched.data(), touched.num_bytes());
      if (share.resident_bytes != 3 * kMebi) return concat(share.resident_bytes, " resident");
      if (!is_zero(touched.data(), touched.num_bytes())) return std::string("not zero");
    }
    if (!small_shm) return std::string("as it should, but for a full /dev/shm: skipped");
    HostMemory memory = HostMemory::create({.kind = MemoryKind::kShm}, 20 * kMebi, "full");
    const std::string text = message_of([&] { memory.prefault(0, memory.num_bytes()); });
    return text.find("No space left") == std::string::npos ? text : "as it should";
  });
  const std::string text = rank.result(60);
  if (text == "skip") MESSAGE("skipped: seccomp is off here");
  INFO(text);
  CHECK((text == "skip" || text.rfind("as it should", 0) == 0));
}

TEST_CASE("a limit on file sizes is an error, and no signal") {
  Process rank([] {
    struct rlimit limit{1 << 20, 1 << 20};
    setrlimit(RLIMIT_FSIZE, &limit);
    return message_of([] { HostMemory::create({}, 2 * kMebi, "limited"); });
  });
  CHECK(has(rank.result(), "ulimit -f) of 1048576"));
}

TEST_CASE("hugetlb pages that were set aside") {
  const char* const path = "/proc/sys/vm/nr_hugepages";
  int64_t before = 0;
  std::ifstream(path) >> before;
  const bool writes = static_cast<bool>(std::ofstream(path) << before + 8 << std::flush);
  struct Restore {
    const char* path;
    int64_t pages;
    ~Restore() { std::ofstream(path) << pages << std::flush; }
  } const restore{path, before};
  if (!writes || free_hugetlb_bytes() < 16 * kMebi) {
    MESSAGE("skipped: no hugetlb pages can be set aside here");
    return;
  }
  for (const MemoryKind kind : {MemoryKind::kMemfd, MemoryKind::kPrivate}) {
    CAPTURE(std::string(memory_kind_name(kind)));
    const HostMemoryOptions options{.kind = kind, .pages = PageKind::k2M};
    const int64_t there = free_hugetlb_bytes();
    {
      HostMemory memory = HostMemory::create(options, 7 * kMebi, "huge");
      CHECK(memory.mapped_bytes() == 8 * kMebi);
      CHECK(free_hugetlb_bytes() == there - 8 * kMebi);  // reserved before any touch
      memory.prefault(0, memory.num_bytes());
      fill(memory);
      const PageShare share = page_share(memory.data(), memory.num_bytes());
      CHECK(share.huge_bytes == 8 * kMebi);
      CHECK(share.resident_bytes == 8 * kMebi);
      if (kind == MemoryKind::kMemfd) {
        CHECK(is_filled(HostMemory::attach(options, duplicates(memory), 7 * kMebi, "copy")));
      }
      memory.set_inherited(false);
      memory.protect();
    }
    CHECK(free_hugetlb_bytes() == there);
    const std::string text =
        message_of([&] { HostMemory::create(options, there + 2 * kMebi, "too large"); });
    CHECK(has(text, concat("expected ", there + 2 * kMebi, " bytes of memory, found ", there)));
    CHECK(free_hugetlb_bytes() == there);
  }
}

TEST_CASE("who must not write cannot") {
  for (const MemoryKind kind : kShared) {
    CAPTURE(std::string(memory_kind_name(kind)));
    HostMemory memory = HostMemory::create({.kind = kind}, 4 * kMebi, "protected");
    memory.prefault(0, memory.num_bytes());
    fill(memory);
    std::vector<FileDescriptor> files = memory.read_only_descriptors();
    REQUIRE(files.size() == 1);
    CHECK(mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, files[0].get(), 0) == MAP_FAILED);
    HostMemory reader = HostMemory::attach({.kind = kind}, std::move(files), 4 * kMebi, "reader",
                                           Access::kReadOnly);
    CHECK(is_filled(reader));
    CHECK(has(message_of([&] { reader.prefault(0, 1); }), "read-only"));
    memory.protect();
    CHECK(memory.access() == Access::kReadOnly);
    CHECK(is_filled(memory));
    for (HostMemory* const one : {&memory, &reader}) {
      Process writer([&] {
        std::signal(SIGSEGV, SIG_DFL);
        *static_cast<volatile uint8_t*>(one->data()) = 1;
        return std::string("written");
      });
      CHECK(writer.result().empty());
    }
  }
}

TEST_CASE("a forked child leaves the parent's memory alone") {
  for (const MemoryKind kind : kKinds) {
    for (const bool inherited : {true, false}) {
      CAPTURE(std::string(memory_kind_name(kind)));
      CAPTURE(inherited);
      HostMemory memory = HostMemory::create({.kind = kind}, 4 * kMebi, "forked");
      fill(memory);
      memory.set_inherited(inherited);
      Process child([&] {
        unsigned char page = 0;
        if ((mincore(memory.data(), 1, &page) == 0) != inherited) return std::string("inherited?");
        if (inherited && !is_filled(memory)) return std::string("other bytes");
        // What the child mapped since in the place of memory that it did not get must stay.
        void* const own = inherited ? nullptr
                                    : mmap(memory.data(), 4096, PROT_READ | PROT_WRITE,
                                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
        {
          const HostMemory ends = std::move(memory);
        }
        if (own != nullptr) *static_cast<volatile uint8_t*>(own) = 1;
        return std::string("ended");
      });
      CHECK(child.result() == "ended");
      CHECK(is_filled(memory));
    }
  }
}

TEST_CASE("200 rounds of create, attach and end leave nothing behind") {
  const auto round = [](MemoryKind kind) {
    HostMemory memory = HostMemory::create({.kind = kind}, 3 * kMebi, "round");
    memory.prefault(0, kMebi);
    HostMemory moved = std::move(memory);
    if (kind == MemoryKind::kPrivate) return;
    HostMemory copy = HostMemory::attach({.kind = kind}, duplicates(moved), 3 * kMebi, "copy");
    copy = std::move(moved);
    CHECK(copy.label() == "round");
  };
  for (const MemoryKind kind : kKinds) round(kind);
  const size_t descriptors = count_descriptors();
  const size_t mappings = count_mappings();
  for (int i = 0; i < 200; ++i) {
    for (const MemoryKind kind : kKinds) round(kind);
  }
  CHECK(count_descriptors() == descriptors);
  CHECK(count_mappings() <= mappings + 2);  // the sanitizers' own come and go
}

TEST_CASE("shares of pages are those of each range") {
  HostMemory small = HostMemory::create({.pages = PageKind::k4K}, 8 * kMebi, "small");
  HostMemory other = HostMemory::create({.kind = MemoryKind::kPrivate}, 8 * kMebi, "other");
  small.prefault(0, 3 * kMebi);
  const std::vector<PageShare> shares =
      page_shares({{small.data(), 8 * kMebi}, {other.data(), 8 * kMebi}, {nullptr, 0}});
  CHECK(shares.size() == 3);
  CHECK(shares[0].resident_bytes == 3 * kMebi);
  CHECK(shares[0].huge_bytes == 0);
  CHECK(shares[1].resident_bytes == 0);
  CHECK(shares[2].resident_bytes == 0);
}

TEST_CASE("NUMA nodes of this machine") {
  CHECK(parse_id_list("0-2,5\n") == std::vector<int>{0, 1, 2, 5});
  CHECK(parse_id_list("7") == std::vector<int>{7});
  CHECK(parse_id_list("").empty());
  const std::vector<int> nodes = memory_nodes();
  REQUIRE(!nodes.empty());
  REQUIRE(!allowed_nodes().empty());
  for (const NumaPolicy& policy :
       {NumaPolicy{}, NumaPolicy{NumaPolicy::kLocal, -1}, NumaPolicy{NumaPolicy::kInterleave, -1},
        NumaPolicy{NumaPolicy::kNode, allowed_nodes().back()}}) {
    CAPTURE(numa_policy_name(policy));
    for (const MemoryKind kind : kKinds) {
      HostMemory memory = HostMemory::create({.kind = kind, .numa = policy}, 32 * kMebi, "placed");
      memory.prefault(0, memory.num_bytes());
      const std::vector<int64_t> bytes = node_bytes(memory.data(), memory.num_bytes());
      if (bytes.empty()) continue;  // the kernel or a container says nothing
      int64_t sum = 0;
      for (size_t node = 0; node < bytes.size(); ++node) {
        sum += bytes[node];
        if (policy.kind == NumaPolicy::kNode) {
          CHECK((bytes[node] == 0 || static_cast<int>(node) == policy.node));
        }
        if (policy.kind == NumaPolicy::kInterleave) {
          const auto count = static_cast<int64_t>(allowed_nodes().size());
          CHECK(bytes[node] <= 32 * kMebi / count * 5 / 4);
        }
      }
      CHECK(sum > 31 * kMebi);
    }
  }
}

}  // namespace
}  // namespace engram
