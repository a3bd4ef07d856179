// SPDX-License-Identifier: Apache-2.0
#include "table/store_file.h"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <functional>
#include <utility>

#include "doctest/doctest.h"
#include "engram/error.h"
#include "made_file.h"
#include "refused_calls.h"

namespace engram {
namespace {

constexpr int64_t kMebi = 1 << 20;
constexpr uid_t kNobody = 65534;

std::vector<uint8_t> read_all(const StoreFile& file, int64_t offset, int64_t num_bytes) {
  std::vector<uint8_t> bytes(static_cast<size_t>(num_bytes));
  file.read(bytes.data(), num_bytes, offset);
  return bytes;
}

//! Brings a range into the page cache, with as little beside it as `alone` says.
void warm(const MadeFile& file, int64_t begin, int64_t end, bool alone) {
  const File reader(file.path());
  if (alone) posix_fadvise(reader.handle(), 0, 0, POSIX_FADV_RANDOM);
  std::vector<uint8_t> bytes(1 << 16);
  for (int64_t at = begin; at < end; at += 1 << 16) {
    reader.read(bytes.data(), std::min(int64_t{1 << 16}, end - at), at);
  }
}

int64_t num_cached(const MadeFile& file) {
  const std::vector<bool> cached = file.cached();
  return std::count(cached.begin(), cached.end(), true);
}

//! What the kernel still reads ahead counts only once it is there.
void wait_for_reading_ahead(const MadeFile& file) {
  for (int64_t before = -1; before != num_cached(file);) {
    before = num_cached(file);
    usleep(300000);
  }
}

//! A kernel short of memory takes pages out of its cache when it likes: what is wrong with the code
//! is so in every turn.
bool holds_in_a_turn(const std::function<bool()>& holds) {
  for (int turn = 0; turn < 5; ++turn) {
    if (holds()) return true;
  }
  return false;
}

//! Another effective user for a scope.
class Becoming {
 public:
  explicit Becoming(uid_t user) { REQUIRE(seteuid(user) == 0); }
  ~Becoming() { REQUIRE(seteuid(getuid()) == 0); }
  Becoming(const Becoming&) = delete;
  Becoming& operator=(const Becoming&) = delete;
};

TEST_CASE("a store file gives its bytes, cached or not, to memory of any alignment") {
  constexpr int64_t kBytes = 9 * kMebi + 1234;
  const MadeFile file(kBytes);
  std::vector<uint8_t> memory(kBytes + 8192);
  const auto base = reinterpret_cast<uintptr_t>(memory.data());
  uint8_t* const aligned = memory.data() + (4096 - base % 4096);
  for (const auto& [offset, num_bytes] : {std::pair{int64_t{0}, kBytes},
                                          {1000, 5 * kMebi + 7},
                                          {4096, 8192},
                                          {4095, 2},
                                          {8 * kMebi, kMebi + 1234},
                                          {kBytes - 3, 3},
                                          {77, 0}}) {
    for (const int64_t phase : {int64_t{0}, int64_t{8}, offset % 4096}) {
      for (const char* state : {"cold", "warm", "mixed"}) {
        CAPTURE(offset);
        CAPTURE(num_bytes);
        CAPTURE(phase);
        CAPTURE(state);
        file.drop_cached();
        if (*state != 'c') warm(file, *state == 'm' ? 2 * kMebi : 0, 3 * kMebi, true);
        std::fill(memory.begin(), memory.end(), 0);
        const StoreFile store(file.path(), offset, num_bytes);
        store.read(aligned + phase, num_bytes, offset);
        const std::vector<uint8_t> expected = MadeFile::made(offset, num_bytes);
        CHECK(std::equal(expected.begin(), expected.end(), aligned + phase));
        CHECK(aligned[phase + num_bytes] == 0);
      }
    }
  }
}

TEST_CASE("reading a store file leaves the page cache as it was") {
  constexpr int64_t kBytes = 48 * kMebi;
  const MadeFile file(kBytes);
  file.drop_cached();
  if (num_cached(file) > 0) {
    MESSAGE("skipped: this file system keeps all in memory");
    return;
  }
  std::vector<std::pair<const char*, std::function<void()>>> states = {
      {"nothing cached", [] {}},
      {"all cached", [&] { warm(file, 0, kBytes, true); }},
      {"parts cached",
       [&] {
         warm(file, 8 * kMebi, 12 * kMebi, true);
         warm(file, 24 * kMebi, 32 * kMebi, true);
       }},
      {"cached with marks at which the kernel reads ahead",
       [&] { warm(file, 0, 12 * kMebi, false); }},
      // By page, as only the owner is told.
      {"single pages cached", [&] {
         for (int64_t at = 5 * kMebi; at < 20 * kMebi; at += 3 << 16)
           warm(file, at, at + 8192, true);
       }}};
  std::vector<uid_t> users{geteuid()};
  // Who neither owns a file nor may write to it is not told which of its pages are cached.
  if (geteuid() == 0) users.push_back(kNobody);
  for (const uid_t user : users) {
    for (const auto& [name, warm_up] : states) {
      CAPTURE(user);
      CAPTURE(std::string(name));
      int64_t num_added = 0;
      int64_t num_lost = 0;
      CAPTURE(num_added);
      CAPTURE(num_lost);
      CHECK(holds_in_a_turn([&, &warm_up = warm_up] {
        file.drop_cached();
        warm_up();
        wait_for_reading_ahead(file);
        const std::vector<bool> before = file.cached();
        {
          const Becoming other(user);
          const StoreFile store(file.path(), 0, kBytes);
          CHECK(read_all(store, 0, kBytes) == MadeFile::made(0, kBytes));
        }
        const std::vector<bool> after = file.cached();
        num_added = num_lost = 0;
        for (size_t page = 0; page < after.size(); ++page) {
          num_lost += before[page] && !after[page];
          num_added += after[page] && !before[page];
        }
        // Asking itself may make the kernel read ahead, where it may only be asked by reading.
        const int64_t most = user == geteuid() ? 0 : 12 * kMebi;
        return num_lost == 0 && num_added * sysconf(_SC_PAGESIZE) <= most;
      }));
    }
    states.pop_back();
  }
}

TEST_CASE("a store file is read by the means that there are") {
  constexpr int64_t kBytes = 16 * kMebi + 77;
  constexpr uint32_t kCachestat = 451;
  const RefusedCall no_direct{SYS_openat, 2, O_DIRECT, EINVAL};
  const RefusedCall no_cachestat{kCachestat, 0, 0, ENOSYS};
  const RefusedCall no_mincore{SYS_mincore, 0, 0, ENOSYS};
  const RefusedCall no_nowait{SYS_preadv2, 5, RWF_NOWAIT, EOPNOTSUPP};
  const MadeFile file(kBytes);
  for (const std::vector<RefusedCall>& refused : {std::vector{no_direct},
                                                  {no_cachestat},
                                                  {no_direct, no_cachestat},
                                                  {no_mincore},
                                                  {no_cachestat, no_mincore},
                                                  {no_cachestat, no_mincore, no_nowait}}) {
    CAPTURE(refused.size());
    CAPTURE(refused.front().number);
    CHECK(holds_in_a_turn([&] {
      file.drop_cached();
      warm(file, 4 * kMebi, 12 * kMebi, true);
      const std::vector<bool> before = file.cached();
      bool grew = false;
      const bool ran = run_with_refused(refused, [&] {
        const StoreFile store(file.path(), 0, kBytes);
        CHECK(read_all(store, 0, kBytes) == MadeFile::made(0, kBytes));
        // Not only at the end: the cache must not grow while a table is loaded.
        grew = refused.front().number == no_direct.number && file.cached() != before;
      });
      if (!ran) MESSAGE("skipped: no system call can be refused here");
      return !grew && file.cached() == before;
    }));
  }
}

TEST_CASE("a store file fills memory that disks may not write to, as drivers' is") {
  constexpr int64_t kBytes = 2 * kMebi;
  const auto secret = static_cast<int>(syscall(SYS_memfd_secret, 0));
  if (secret < 0) {
    MESSAGE("skipped: no memfd_secret here");
    return;
  }
  REQUIRE(ftruncate(secret, kBytes) == 0);
  void* const memory = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED, secret, 0);
  close(secret);
  REQUIRE(memory != MAP_FAILED);
  const MadeFile file(kBytes);
  file.drop_cached();
  StoreFile(file.path(), 0, kBytes).read(static_cast<uint8_t*>(memory), kBytes, 0);
  CHECK(memcmp(memory, MadeFile::made(0, kBytes).data(), kBytes) == 0);
  munmap(memory, kBytes);
}

TEST_CASE("what is no store file is refused") {
  const MadeFile file(kMebi);
  CHECK_THROWS_WITH_AS(StoreFile("/nowhere", 0, 1),
                       "/nowhere: cannot read: No such file or directory", Error);
  CHECK_THROWS_WITH_AS(StoreFile("/tmp", 0, 1), "/tmp: expected a regular file", Error);
  CHECK_THROWS_WITH_AS(
      StoreFile(file.path(), 1000, kMebi),
      (file.path() + ": expected 1048576 bytes at offset 1000, found a file of 1048576 bytes")
          .c_str(),
      Error);
}

TEST_CASE("a store file that is cut short is an error") {
  constexpr int64_t kBytes = 5 * kMebi;
  for (const bool cached : {false, true}) {
    const MadeFile file(kBytes);
    const StoreFile store(file.path(), 0, kBytes);
    if (!cached) file.drop_cached();
    CHECK(read_all(store, 4096, 4096) == MadeFile::made(4096, 4096));
    REQUIRE(ftruncate(file.handle(), kMebi + 10) == 0);
    try {
      read_all(store, 0, kBytes);
      FAIL("expected an error");
    } catch (const Error& error) {
      const std::string text = error.what();
      CHECK(text.find(file.path() + ": expected ") == 0);
      CHECK(text.find(" more bytes at offset 1048586, found the end") != std::string::npos);
    }
  }
}

TEST_CASE("a stamp tells a file from what it was") {
  const MadeFile file(kMebi);
  const FileStamp stamp = stamp_file(file.path());
  CHECK(StoreFile(file.path(), 0, kMebi).stamp() == stamp);
  CHECK_NOTHROW(check_stamp(stamp));
  SUBCASE("written") { file.overwrite("x", 0); }
  SUBCASE("longer") { REQUIRE(ftruncate(file.handle(), kMebi + 1) == 0); }
  SUBCASE("replaced") {
    const MadeFile other(kMebi);
    REQUIRE(rename(other.path().c_str(), file.path().c_str()) == 0);
  }
  const std::string expected = file.path() + ": changed while it was loaded: expected 1048576";
  try {
    check_stamp(stamp);
    FAIL("expected an error");
  } catch (const Error& error) {
    CHECK(std::string(error.what()).substr(0, expected.size()) == expected);
  }
}

}  // namespace
}  // namespace engram
