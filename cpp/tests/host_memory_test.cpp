// SPDX-License-Identifier: Apache-2.0
// Memory that processes share: what each kind holds to, and what is refused, with real processes.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <fstream>

#include "memories.h"

namespace engram {
namespace {

size_t count_mappings() {
  std::ifstream maps("/proc/self/maps");
  return static_cast<size_t>(
      std::count(std::istreambuf_iterator<char>(maps), std::istreambuf_iterator<char>(), '\n'));
}

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
    memory.seal();
    if (kind == MemoryKind::kMemfd) {
      const int file = memory.descriptors().at(0).get();
      CHECK(mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0) == MAP_FAILED);
      CHECK(pwrite(file, "", 1, 0) < 0);
    }
    // For a registration: what was mapped for writing may be again, and nothing else.
    for (HostMemory* const one : {&memory, &reader}) one->unprotect();
    CHECK(memory.access() == Access::kReadWrite);
    CHECK(reader.access() == Access::kReadOnly);
    memory.data()[0] = byte_at(0);
    CHECK(is_filled(reader));
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

}  // namespace
}  // namespace engram
