// SPDX-License-Identifier: Apache-2.0
// Rows of files, by io_uring and by threads: right, or NaN with a fault that says where.
#include "table/disk_reader.h"

#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <functional>
#include <string>

#include "doctest/doctest.h"
#include "made_disk_table.h"
#include "ranks.h"
#include "refused_calls.h"

namespace engram {
namespace {

constexpr auto kLast = static_cast<int32_t>(kDiskRows - 1);
constexpr int64_t kPlenty = 64 << 20;

std::vector<int32_t> scattered(size_t count, uint64_t seed = 1) {
  std::vector<int32_t> ids(count);
  for (int32_t& id : ids) {
    seed = formula_mix(seed + kFormulaStep);
    id = static_cast<int32_t>(seed % kDiskRows);
  }
  return ids;
}

//! Runs it with each kind of queue.
void with_each_kind(const std::function<void(const std::string& kind)>& run) {
  run("io_uring");
  if (!run_with_refused({{SYS_io_uring_setup, 0, 0, EPERM}}, [&] { run("pread"); })) {
    MESSAGE("skipped: nobody may refuse calls here, so no reads by threads");
  }
}

TEST_CASE("rows of a table on disk are those of its file, whichever are asked for") {
  std::vector<std::vector<int32_t>> asked = {{},
                                             {0},
                                             {kLast},
                                             {-1, -1},
                                             {3, 2, 1, 0},
                                             {7, 7, 7, -1, 7, kLast, kLast, INT32_MAX, INT32_MIN},
                                             scattered(20000)};
  asked.emplace_back();
  for (int32_t row = kLast; row >= 0; --row) asked.back().push_back(row);
  with_each_kind([&](const std::string& kind) {
    for (const ScalesIn scales_in : {ScalesIn::kFile, ScalesIn::kRam}) {
      for (const int64_t hot_bytes : {int64_t{0}, int64_t{200000}, kPlenty}) {
        CAPTURE(kind);
        CAPTURE(hot_bytes);
        MadeDiskTable table(scales_in, hot_bytes);
        if (table.reader().queue_kind() != kind) {
          MESSAGE("skipped: no io_uring here");
          return;
        }
        for (const std::vector<int32_t>& ids : asked) {
          CHECK(table.num_wrong(ids) == 0);
          CHECK(table.num_wrong(ids) == 0);
        }
        CHECK(!table.reader().take_fault());
      }
    }
  });
}

TEST_CASE("a table of a part of the rows knows no others") {
  MadeDiskTable table(ScalesIn::kFile, kPlenty, 1000, 50);
  CHECK(table.num_wrong({999, 1000, 1049, 1050, 0, -1}) == 0);
  CHECK(table.reader().counts().disk_rows == 2);
}

TEST_CASE("rows of a page, and repeated ones, take one read") {
  MadeDiskTable table(ScalesIn::kRam, 0);
  CHECK(table.num_wrong({100, 101, 102, 100, 100, 101}) == 0);
  CHECK(table.reader().counts().num_reads == 1);
  CHECK(table.num_wrong({0, 10000}) == 0);
  CHECK(table.reader().counts().num_reads == 3);
}

TEST_CASE("rows that were read before are not read again") {
  MadeDiskTable table(ScalesIn::kFile, kPlenty);
  const std::vector<int32_t> ids = scattered(3000);
  CHECK(table.num_wrong(ids) == 0);
  const DiskCounts before = table.reader().counts();
  CHECK(table.num_wrong(ids) == 0);
  CHECK(table.reader().counts().num_reads == before.num_reads);
  CHECK(table.reader().counts().hot_rows == 3000);
}

TEST_CASE("a row past 4 GiB of a file") {
  constexpr int64_t kRows = (int64_t{5} << 30) / kDiskHeadDim;
  std::string path = "/tmp/engram-XXXXXX";
  const FileDescriptor file(mkstemp(path.data()));
  REQUIRE(ftruncate(file.get(), kRows * (kDiskHeadDim + kDiskScales)) == 0);
  const std::vector<int32_t> ids = {16777215, 16777216, 16777217, static_cast<int32_t>(kRows - 1)};
  for (const int32_t id : ids) {
    const std::vector<uint8_t> bytes = MadeFile::made(id * int64_t{kDiskHeadDim}, kDiskHeadDim);
    REQUIRE(pwrite(file.get(), bytes.data(), bytes.size(), id * int64_t{kDiskHeadDim}) ==
            kDiskHeadDim);
  }
  REQUIRE(fsync(file.get()) == 0);
  const DiskArray values({path, 0, kRows * kDiskHeadDim});
  const DiskArray scales({path, kRows * kDiskHeadDim, kRows * kDiskScales});
  TableInfo info;
  info.head_dim = kDiskHeadDim;
  info.num_rows = kRows;
  DiskReader reader(info, values, &scales, nullptr, 0);
  std::vector<uint8_t> found(ids.size() * kDiskHeadDim), found_scales(ids.size() * kDiskScales, 1);
  reader.read(ids.data(), static_cast<int64_t>(ids.size()), found.data(), found_scales.data());
  for (size_t i = 0; i < ids.size(); ++i) {
    const std::vector<uint8_t> row(&found[i * kDiskHeadDim],
                                   &found[i * kDiskHeadDim] + kDiskHeadDim);
    CHECK(row == MadeFile::made(ids[i] * int64_t{kDiskHeadDim}, kDiskHeadDim));
  }
  CHECK(found_scales == std::vector<uint8_t>(found_scales.size()));
  unlink(path.c_str());
}

TEST_CASE("a file that is cut short gives NaN, and stays a fault that names file and offset") {
  with_each_kind([](const std::string& kind) {
    CAPTURE(kind);
    MadeDiskTable table(ScalesIn::kRam, kPlenty);
    CHECK(table.num_wrong({5}) == 0);
    REQUIRE(ftruncate(table.file().handle(), kValuesAt + 1000 * kDiskHeadDim + 100) == 0);
    int64_t lost = 0;
    CHECK(table.num_wrong({5, 1000, -1, 2000}, &lost) == 0);
    CHECK(lost == 2);  // the first is in RAM
    const std::string text = table.reader().take_fault().value_or("none");
    CHECK(text.find(table.file().path()) != std::string::npos);
    const std::string where = " at offset " + std::to_string(kValuesAt + 1000 * kDiskHeadDim);
    CHECK(text.find("row 1000" + where) != std::string::npos);
    CHECK(table.reader().take_fault());
  });
}

TEST_CASE("a file that was written to gives no row of either state") {
  MadeDiskTable table(ScalesIn::kFile, kPlenty);
  CHECK(table.num_wrong({5}) == 0);
  REQUIRE(fchmod(table.file().handle(), 0600) == 0);  // no change
  CHECK(table.num_wrong({5, 6}) == 0);
  table.file().overwrite("new", kValuesAt + 7 * kDiskHeadDim);
  int64_t lost = 0;
  CHECK(table.num_wrong({5, 7, 9000}, &lost) == 0);
  CHECK(lost == 2);
  const std::string text = table.reader().take_fault().value_or("none");
  CHECK(text.find(": changed since it was opened: expected ") != std::string::npos);
}

TEST_CASE("a disk's error is a fault once, and the row comes when the disk does") {
  MadeDiskTable table(ScalesIn::kRam, kPlenty);
  const bool refused =
      run_with_refused({{SYS_io_uring_enter, 0, 0, EPERM}, {SYS_pread64, 0, 0, EIO}}, [&] {
        int64_t lost = 0;
        CHECK(table.num_wrong({-1, 70, 71}, &lost) == 0);
        CHECK(lost == 2);
      });
  if (!refused) {
    MESSAGE("skipped: nobody may refuse calls here");
    return;
  }
  const std::string text = table.reader().take_fault().value_or("none");
  CHECK(text.find("Input/output error (row 70 at offset ") != std::string::npos);
  CHECK(!table.reader().take_fault());
  CHECK(table.num_wrong({70, 71}) == 0);
}

TEST_CASE("what a queue cannot read is read plainly") {
  with_each_kind([](const std::string& kind) {
    CAPTURE(kind);
    MadeDiskTable table(ScalesIn::kFile, 0);
    const FileDescriptor folder(open("/", O_RDONLY | O_DIRECTORY));
    REQUIRE(dup2(folder.get(), table.page_handle()) >= 0);
    CHECK(table.num_wrong(scattered(100)) == 0);
    CHECK(!table.reader().take_fault());
  });
}

TEST_CASE("a ring that breaks under way is not used again") {
  MadeDiskTable table(ScalesIn::kFile, 0);
  const bool refused = run_with_refused({{SYS_io_uring_enter, 0, 0, EBADF}},
                                        [&] { CHECK(table.num_wrong(scattered(1000)) == 0); });
  if (!refused) MESSAGE("skipped: nobody may refuse calls here");
  CHECK(table.num_wrong(scattered(1000)) == 0);
}

TEST_CASE("a child reads by a ring of its own, and so does its parent on") {
  MadeDiskTable table(ScalesIn::kFile, 0);
  CHECK(table.num_wrong(scattered(1000)) == 0);
  Process child([&] { return concat(table.num_wrong(scattered(2000, 2)), " wrong"); });
  CHECK(table.num_wrong(scattered(2000, 3)) == 0);
  CHECK(child.result() == "0 wrong");
}

TEST_CASE("tables on disk that come and go leave no descriptor") {
  const size_t before = count_descriptors();
  for (int turn = 0; turn < 200; ++turn) {
    MadeDiskTable table(ScalesIn::kFile, 1000);
    if (turn % 50 == 0) CHECK(table.num_wrong(scattered(100)) == 0);
  }
  CHECK(count_descriptors() == before);
}

}  // namespace
}  // namespace engram
