// SPDX-License-Identifier: Apache-2.0
//! \file page_cache.h
//! What of a file the page cache holds.
#pragma once

#include <cstdint>
#include <vector>

namespace engram {

//! The pages of a range of a file, as they were when this object was made: the kernel may read
//! ahead of a reader, so what is cached while a file is read says little.
//!
//! The kernel tells what is cached only to users who own the file or may write to it. For others a
//! stretch of 4 MiB counts as cached whose first or last page is; where the file system cannot even
//! say that (no RWF_NOWAIT), nothing counts as cached.
class CachedPages {
 public:
  //! Asks, by several threads. The handle must stay open as long as this object lives.
  CachedPages(int handle, int64_t begin, int64_t end);

  //! Where the cached pages at the beginning of [begin, end) end: `begin` to `end`. What is outside
  //! the object's range counts as not cached.
  int64_t head_end(int64_t begin, int64_t end) const;
  //! Where the cached pages at the end of [begin, end) begin: `begin` to `end`.
  int64_t tail_begin(int64_t begin, int64_t end) const;

  //! Drops the pages of [begin, end) from the cache that were not in it.
  void drop_others(int64_t begin, int64_t end) const;
  //! The same for the whole range; where nothing could be known, nothing.
  void drop_others() const;

 private:
  void ask(int64_t first, int64_t last);
  bool is_cached(int64_t page) const;
  void set_cached(int64_t page);

  int handle_;
  int64_t first_;  //!< pages of the file
  int64_t last_;
  enum class Means { kNone, kProbes, kMincore } means_;
  std::vector<uint64_t> bits_;  //!< one for each page
};

}  // namespace engram
