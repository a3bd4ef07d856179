// SPDX-License-Identifier: Apache-2.0
//! \file store_file.h
//! A large file, read without leaving the page cache fuller than it was.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "table/files.h"

namespace engram {

//! What tells one state of a file from another.
struct FileStamp {
  std::string file;
  uint64_t device = 0;
  uint64_t inode = 0;
  int64_t num_bytes = 0;
  int64_t mtime_ns = 0;
  int64_t ctime_ns = 0;

  bool operator==(const FileStamp&) const = default;
};

//! The stamp of whatever has the name now, symlinks followed. Throws Error unless that is a regular
//! file.
FileStamp stamp_file(const std::string& path);

//! Throws Error, with the file's name and what differs, unless the file that has the stamp's name
//! still is that one and nobody has written to it.
void check_stamp(const FileStamp& stamp);

//! An open regular file. Pages that the page cache holds are copied from there and stay; what it
//! does not hold is read past it (O_DIRECT) where the file system can, else through it, and these
//! pages are dropped again. The file is never mapped to be read: one that is cut short while it is
//! read is an Error, not a SIGBUS.
class StoreFile {
 public:
  //! Throws Error for what cannot be opened or is no regular file.
  explicit StoreFile(const std::string& path);

  //! Of the open file.
  const FileStamp& stamp() const { return stamp_; }

  //! Fills `to` (any alignment) with bytes [offset, offset + num_bytes) on the calling thread.
  //! Thread-safe; read in pieces of about kPieceBytes, from several threads. Throws Error: the file
  //! ends before that, or the disk's error.
  void read(uint8_t* to, int64_t num_bytes, int64_t offset) const;

  static constexpr int64_t kPieceBytes = 4 << 20;

 private:
  File file_;
  FileStamp stamp_;
};

}  // namespace engram
