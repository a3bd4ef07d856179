// SPDX-License-Identifier: Apache-2.0
// Pages of shared memory: prefaulted, huge, and refused without a signal where there are none.
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/utsname.h>

#include <cstddef>
#include <cstdio>

#include "memories.h"

namespace engram {
namespace {

bool kernel_is(int major, int minor) {
  struct utsname name{};
  int found[2] = {0, 0};
  uname(&name);
  std::sscanf(name.release, "%d.%d", &found[0], &found[1]);
  return found[0] > major || (found[0] == major && found[1] >= minor);
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

}  // namespace
}  // namespace engram
