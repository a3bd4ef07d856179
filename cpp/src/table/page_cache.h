// SPDX-License-Identifier: Apache-2.0
//! \file page_cache.h
//! What of a file the page cache holds.
#pragma once

#include <sys/stat.h>

#include <cstdint>
#include <string>
#include <vector>

namespace engram {

int64_t page_bytes();

//! Whether this user may ask: to others the kernel says that every page is cached.
bool may_ask_cached(const std::string& path, const struct stat& status);

//! The pages that a range of a file lies in.
class CachedPages {
 public:
  //! Asks. No page counts as cached where the file system has no answer. Reads and maps nothing
  //! for longer than this call.
  CachedPages(int handle, int64_t begin, int64_t end);

  //! Where the cached pages at the beginning end: `begin` to `end`.
  int64_t head_end() const;
  //! Where the cached pages at the end begin: head_end() to `end`.
  int64_t tail_begin() const;
  //! Drops those pages from the cache that were not in it when this object was made.
  void drop_others() const;

 private:
  //! The place of page i, inside the range.
  int64_t place(size_t i) const;

  int handle_;
  int64_t begin_;
  int64_t end_;
  std::vector<unsigned char> cached_;  //!< one for each page; empty: all are cached
};

}  // namespace engram
