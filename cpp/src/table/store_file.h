// SPDX-License-Identifier: Apache-2.0
//! \file store_file.h
//! A large file, read without leaving the page cache fuller than it was.
#pragma once

#include <cstdint>
#include <mutex>
#include <optional>
#include <string>

#include "table/files.h"
#include "table/page_cache.h"

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

//! The same for a file that stays open: a new mode or another link, which move ctime_ns alone, are
//! no change then.
void check_contents(const FileStamp& stamp);

//! A range of an open regular file. Pages that the page cache holds before the first read are
//! copied from there and stay. What it does not hold is read past it (O_DIRECT) where the file
//! system can, else through it, and dropped again, at the end with what the kernel read ahead of
//! its own accord. The file is never mapped to be read: one that is cut short while it is read is
//! an Error, not a SIGBUS.
class StoreFile {
 public:
  static constexpr int64_t kPieceBytes = 4 << 20;

  //! Bytes [offset, offset + num_bytes). Throws Error for what cannot be opened, is no regular file
  //! or ends before that.
  StoreFile(const std::string& path, int64_t offset, int64_t num_bytes);
  ~StoreFile();

  //! Of the open file.
  const FileStamp& stamp() const { return stamp_; }

  //! Fills `to` (any alignment) with bytes [offset, offset + num_bytes) of the file, on the calling
  //! thread in pieces of kPieceBytes. Thread-safe: several threads are needed for a disk's whole
  //! speed. Throws Error: the file ends before that, or the disk's error.
  void read(uint8_t* to, int64_t num_bytes, int64_t offset) const;

  //! The same for a few bytes, through the page cache, which keeps their pages.
  void read_few(uint8_t* to, int64_t num_bytes, int64_t offset) const {
    file_.read(to, num_bytes, offset);
  }
  //! For other calls that read whole pages of 4096 bytes, past the page cache where that can be.
  int page_handle() const { return direct_ ? direct_->handle() : file_.handle(); }

 private:
  void read_piece(uint8_t* to, int64_t begin, int64_t end) const;
  int64_t read_straight(uint8_t* to, int64_t begin, int64_t end) const;
  int64_t read_bounced(uint8_t* to, int64_t begin, int64_t end) const;
  const CachedPages& cached() const;

  File file_;
  std::optional<File> direct_;  //!< the same file past the page cache, where there is such a way
  FileStamp stamp_;
  int64_t begin_;
  int64_t end_;
  mutable std::once_flag asked_;
  mutable std::optional<CachedPages> cached_;
};

}  // namespace engram
