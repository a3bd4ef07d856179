// SPDX-License-Identifier: Apache-2.0
#include "table/page_cache.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>

namespace engram {
namespace {

//! Pages of [begin, end) in the cache, or -1. Cheap, but Linux has it from 6.5 on, and overlayfs
//! answers for a cache of its own, which is empty.
int64_t count_cached(int handle, int64_t begin, int64_t end) {
  constexpr int64_t kCachestat = 451;  // SYS_cachestat, which older headers lack
  const uint64_t range[2] = {static_cast<uint64_t>(begin), static_cast<uint64_t>(end - begin)};
  uint64_t counts[5] = {};  // struct cachestat: nr_cache is the first
  if (syscall(kCachestat, handle, range, counts, 0) != 0) return -1;
  return static_cast<int64_t>(counts[0]);
}

//! Sets the lowest bit of those that are cached.
bool find_cached(int handle, int64_t begin, int64_t end, unsigned char* cached) {
  const auto num_bytes = static_cast<size_t>(end - begin);
  // Nothing is ever read through this mapping.
  void* const pages = mmap(nullptr, num_bytes, PROT_NONE, MAP_SHARED, handle, begin);
  if (pages == MAP_FAILED) return false;
  const bool found = mincore(pages, num_bytes, cached) == 0;
  munmap(pages, num_bytes);
  return found;
}

}  // namespace

int64_t page_bytes() {
  static const int64_t bytes = sysconf(_SC_PAGESIZE);
  return bytes;
}

bool may_ask_cached(const std::string& path, const struct stat& status) {
  return geteuid() == 0 || status.st_uid == geteuid() ||
         faccessat(AT_FDCWD, path.c_str(), W_OK, AT_EACCESS) == 0;
}

CachedPages::CachedPages(int handle, int64_t begin, int64_t end)
    : handle_(handle), begin_(begin), end_(end) {
  const int64_t first = begin / page_bytes();
  const int64_t num_pages = (end + page_bytes() - 1) / page_bytes() - first;
  const int64_t from = first * page_bytes();
  const int64_t to = from + num_pages * page_bytes();
  if (count_cached(handle, from, to) >= num_pages) return;
  cached_.resize(static_cast<size_t>(num_pages));
  if (!find_cached(handle, from, to, cached_.data())) std::fill(cached_.begin(), cached_.end(), 0);
  for (unsigned char& page : cached_) page &= 1;
}

int64_t CachedPages::head_end() const {
  const auto missing = std::find(cached_.begin(), cached_.end(), 0);
  return missing == cached_.end() ? end_ : place(static_cast<size_t>(missing - cached_.begin()));
}

int64_t CachedPages::tail_begin() const {
  const auto missing = std::find(cached_.rbegin(), cached_.rend(), 0);
  return missing == cached_.rend() ? end_ : place(static_cast<size_t>(cached_.rend() - missing));
}

void CachedPages::drop_others() const {
  for (auto from = cached_.begin(); from != cached_.end();) {
    from = std::find(from, cached_.end(), 0);
    const auto to = std::find(from, cached_.end(), 1);
    if (from == to) return;
    const int64_t first = begin_ / page_bytes() + (from - cached_.begin());
    posix_fadvise(handle_, first * page_bytes(), (to - from) * page_bytes(), POSIX_FADV_DONTNEED);
    from = to;
  }
}

int64_t CachedPages::place(size_t i) const {
  const int64_t page = begin_ / page_bytes() + static_cast<int64_t>(i);
  return std::clamp(page * page_bytes(), begin_, end_);
}

}  // namespace engram
