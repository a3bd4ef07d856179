// SPDX-License-Identifier: Apache-2.0
//! \file made_file.h
//! A file on the disk to read, gone with its object.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <string>
#include <vector>

#include "doctest/doctest.h"
#include "table/formula.h"

namespace engram {

class MadeFile {
 public:
  //! Bytes of a formula; with `sparse` only where blocks begin, and zeros between.
  explicit MadeFile(int64_t num_bytes, bool sparse = false) : num_bytes_(num_bytes) {
    handle_ = mkstemp(path_.data());
    REQUIRE(handle_ >= 0);
    REQUIRE(fchmod(handle_, 0644) == 0);
    REQUIRE(ftruncate(handle_, num_bytes) == 0);
    const int64_t step = sparse ? 32 << 20 : kChunkBytes;
    for (int64_t at = 0; at < num_bytes; at += step) {
      const int64_t count = std::min(kChunkBytes, num_bytes - at);
      REQUIRE(pwrite(handle_, made(at, count).data(), static_cast<size_t>(count), at) == count);
    }
    REQUIRE(fsync(handle_) == 0);
  }
  ~MadeFile() {
    close(handle_);
    unlink(path_.c_str());
  }
  MadeFile(const MadeFile&) = delete;
  MadeFile& operator=(const MadeFile&) = delete;

  const std::string& path() const { return path_; }
  int handle() const { return handle_; }

  //! What was written, where it was.
  static std::vector<uint8_t> made(int64_t begin, int64_t num_bytes) {
    std::vector<uint8_t> bytes(static_cast<size_t>(num_bytes));
    fill_formula({1, FormulaTensor::kValues, 5}, begin, num_bytes, bytes.data());
    return bytes;
  }

  //! Until its time stamp is another, whose clock ticks seldom.
  void overwrite(const std::string& bytes, int64_t at) const {
    struct stat before{}, after{};
    REQUIRE(fstat(handle_, &before) == 0);
    const auto count = static_cast<ssize_t>(bytes.size());
    do {
      REQUIRE(pwrite(handle_, bytes.data(), bytes.size(), at) == count);
      REQUIRE(fstat(handle_, &after) == 0);
    } while (after.st_mtim.tv_sec == before.st_mtim.tv_sec &&
             after.st_mtim.tv_nsec == before.st_mtim.tv_nsec);
  }

  void drop_cached() const { REQUIRE(posix_fadvise(handle_, 0, 0, POSIX_FADV_DONTNEED) == 0); }

  //! For each page, whether the page cache holds it.
  std::vector<bool> cached() const {
    const auto page_bytes = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    const auto num_bytes = static_cast<size_t>(num_bytes_);
    std::vector<unsigned char> pages((num_bytes + page_bytes - 1) / page_bytes);
    void* const mapped = mmap(nullptr, num_bytes, PROT_NONE, MAP_SHARED, handle_, 0);
    REQUIRE(mapped != MAP_FAILED);
    REQUIRE(mincore(mapped, num_bytes, pages.data()) == 0);
    munmap(mapped, num_bytes);
    std::vector<bool> found(pages.size());
    for (size_t i = 0; i < pages.size(); ++i) found[i] = (pages[i] & 1) != 0;
    return found;
  }

 private:
  static constexpr int64_t kChunkBytes = 1 << 20;

  std::string path_ = "/tmp/engram-XXXXXX";
  int64_t num_bytes_;
  int handle_;
};

}  // namespace engram
