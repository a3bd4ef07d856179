// SPDX-License-Identifier: Apache-2.0
#include "table/files.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>

#include "engram/error.h"

namespace engram {
namespace {

[[noreturn]] void fail(const std::string& path, const char* verb) {
  throw Error(ENGRAM_INVALID_ARGUMENT, concat(path, ": cannot ", verb, ": ", std::strerror(errno)));
}

struct stat stat_any(const std::string& path) {
  struct stat status{};
  if (stat(path.c_str(), &status) != 0) fail(path, "read");
  return status;
}

void check_regular(const std::string& path, const struct stat& status) {
  ENGRAM_CHECK(S_ISREG(status.st_mode), path, ": expected a regular file");
}

void check_trusted(const std::string& path, const struct stat& status) {
  ENGRAM_CHECK(status.st_uid == geteuid() || status.st_uid == 0, path,
               ": expected an owner that is this user (", geteuid(), ") or root, found user ",
               status.st_uid);
  // Of one that is everybody's, as /tmp is, nobody is to change the rights.
  const bool shared = S_ISDIR(status.st_mode) && (status.st_mode & S_ISVTX) != 0;
  ENGRAM_CHECK(
      (status.st_mode & (S_IWGRP | S_IWOTH)) == 0, path,
      ": expected nobody but the owner to have the right to write, found mode ", std::oct,
      status.st_mode & 07777,
      shared ? "; a folder of this user's own in it will do" : "; chmod go-w takes it away");
}

}  // namespace

// Nobody waits for the other end of a pipe.
File::File(const std::string& path, int flags)
    : path_(path), handle_(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | flags)) {
  if (handle_ < 0) fail(path, "read");
}

File::~File() { close(handle_); }

struct stat File::status() const {
  struct stat status{};
  if (fstat(handle_, &status) != 0) fail(path_, "read");
  return status;
}

void File::read(void* to, int64_t num_bytes, int64_t offset) const {
  auto* bytes = static_cast<char*>(to);
  while (num_bytes > 0) {
    const int64_t count = read_some(bytes, num_bytes, offset);
    if (count < 0) fail_to_read();
    ENGRAM_CHECK(count > 0, path_, ": expected ", num_bytes, " more bytes at offset ", offset,
                 ", found the end");
    bytes += count;
    offset += count;
    num_bytes -= count;
  }
}

int64_t File::read_some(void* to, int64_t num_bytes, int64_t offset) const noexcept {
  constexpr int64_t kMostPerCall = 1 << 30;  // Linux reads no more than 2 GiB at once
  const auto count = static_cast<size_t>(std::min(num_bytes, kMostPerCall));
  for (;;) {
    const ssize_t found = pread(handle_, to, count, offset);
    if (found >= 0 || errno != EINTR) return found;
  }
}

void File::fail_to_read() const { fail(path_, "read"); }

struct stat stat_regular(const std::string& path) {
  const struct stat status = stat_any(path);
  check_regular(path, status);
  return status;
}

int64_t nanoseconds(const timespec& time) {
  return static_cast<int64_t>(static_cast<uint64_t>(time.tv_sec) * 1000000000 +
                              static_cast<uint64_t>(time.tv_nsec));
}

void check_trusted_folder(const std::string& path) { check_trusted(path, stat_any(path)); }

std::string read_trusted_text(const std::string& path, int64_t max_bytes) {
  // NOTE: of the file that is open, which no other can take the place of.
  const File file(path);
  const struct stat status = file.status();
  check_trusted(path, status);
  check_regular(path, status);
  ENGRAM_CHECK(status.st_size <= max_bytes, path, ": expected at most ", max_bytes,
               " bytes, found ", status.st_size);
  std::string text(static_cast<size_t>(status.st_size), '\0');
  file.read(text.data(), status.st_size, 0);
  return text;
}

std::string resolve(const std::string& folder, const std::string& name) {
  return (std::filesystem::path(folder) / name).lexically_normal().string();
}

std::string folder_of(const std::string& path) {
  const std::filesystem::path folder = std::filesystem::path(path).parent_path();
  return folder.empty() ? "." : folder.string();
}

}  // namespace engram
