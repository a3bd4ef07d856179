// SPDX-License-Identifier: Apache-2.0
//! \file files.h
//! Files of users: read whole or in parts; failures are one line that names the file.
#pragma once

#include <sys/stat.h>

#include <cstdint>
#include <string>

namespace engram {

//! An open file, for reading.
class File {
 public:
  //! `flags` are more of open(2)'s: O_DIRECT.
  explicit File(const std::string& path, int flags = 0);
  ~File();
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  const std::string& path() const { return path_; }
  int handle() const { return handle_; }
  struct stat status() const;
  //! Fills all of `to`. Thread-safe.
  void read(void* to, int64_t num_bytes, int64_t offset) const;
  //! As pread(2), but for signals: fewer bytes may come, 0 at the end, -1 with errno. Thread-safe.
  int64_t read_some(void* to, int64_t num_bytes, int64_t offset) const noexcept;
  //! Throws the Error for errno.
  [[noreturn]] void fail_to_read() const;

 private:
  std::string path_;
  int handle_;
};

//! The status of a regular file, symlinks followed.
struct stat stat_regular(const std::string& path);

//! Past the year 2262 this wraps, which is another time than any of before.
int64_t nanoseconds(const timespec& time);

//! Refuses a folder that others than this user and root could write.
void check_trusted_folder(const std::string& path);

//! A whole file of at most `max_bytes`, which nobody else could write either.
std::string read_trusted_text(const std::string& path, int64_t max_bytes);

//! `name` itself where it is absolute, else inside `folder`.
std::string resolve(const std::string& folder, const std::string& name);

//! The folder that a file lies in.
std::string folder_of(const std::string& path);

}  // namespace engram
