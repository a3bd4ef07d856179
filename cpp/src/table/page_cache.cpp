// SPDX-License-Identifier: Apache-2.0
#include "table/page_cache.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>

#include "engram/row.h"
#include "parallel.h"
#include "table/pages.h"

namespace engram {
namespace {

constexpr int64_t kBits = 64;               // of a word
constexpr int64_t kAskedBytes = 64 << 20;   // at a time: whole words of bits
constexpr int64_t kStretchBytes = 4 << 20;  // that two probes stand for
constexpr int64_t kPastTheEnd = 64 << 20;   // more than any page of the cache is large

//! Whether the cache holds all of a range. Cheap, but Linux has it from 6.5 on, and overlayfs
//! answers for a cache of its own, which is empty: a no means nothing.
bool is_all_cached(int handle, int64_t begin, int64_t end) {
  constexpr int64_t kCachestat = 451;  // SYS_cachestat, which older headers lack
  const uint64_t range[2] = {static_cast<uint64_t>(begin), static_cast<uint64_t>(end - begin)};
  uint64_t counts[5] = {};  // struct cachestat: nr_cache is the first
  return syscall(kCachestat, handle, range, counts, 0) == 0 &&
         static_cast<int64_t>(counts[0]) * small_page_bytes() >= end - begin;
}

//! Sets the lowest bit of those that are cached. Nothing is ever read through the mapping.
bool find_cached(int handle, int64_t begin, int64_t end, std::vector<unsigned char>& cached) {
  const auto num_bytes = static_cast<size_t>(end - begin);
  cached.resize(num_bytes / static_cast<size_t>(small_page_bytes()));
  void* const pages = mmap(nullptr, num_bytes, PROT_NONE, MAP_SHARED, handle, begin);
  if (pages == MAP_FAILED) return false;
  const bool found = mincore(pages, num_bytes, cached.data()) == 0;
  munmap(pages, num_bytes);
  return found;
}

//! A place that no page of a file is near.
int64_t place_behind(int handle) {
  struct stat status{};
  if (fstat(handle, &status) != 0) return 0;
  return ceil_div(status.st_size + kPastTheEnd, small_page_bytes()) * small_page_bytes();
}

//! Whether mincore tells the truth: to who may not ask, all is cached, what lies behind a file's
//! end too.
bool may_ask(int handle) {
  const int64_t behind = place_behind(handle);
  std::vector<unsigned char> cached;
  return find_cached(handle, behind, behind + small_page_bytes(), cached) && (cached[0] & 1) == 0;
}

//! As pread(2) of one byte, but only if that is cached; if not, the kernel begins to read its page.
ssize_t probe(int handle, int64_t place) {
  char byte;
  const iovec one{&byte, 1};
  return preadv2(handle, &one, 1, place, RWF_NOWAIT);
}

}  // namespace

CachedPages::CachedPages(int handle, int64_t begin, int64_t end)
    : handle_(handle),
      first_(begin / small_page_bytes()),
      last_(ceil_div(end, small_page_bytes())) {
  bits_.resize(static_cast<size_t>(ceil_div(last_ - first_, kBits)));
  means_ = may_ask(handle)                            ? Means::kMincore
           : probe(handle, place_behind(handle)) == 0 ? Means::kProbes
                                                      : Means::kNone;
  if (means_ == Means::kNone) return;
  parallel_for(last_ - first_, kAskedBytes / small_page_bytes(), 0,
               [&](int64_t from, int64_t to) { ask(first_ + from, first_ + to); });
}

void CachedPages::ask(int64_t first, int64_t last) {
  if (is_all_cached(handle_, first * small_page_bytes(), last * small_page_bytes())) {
    for (int64_t page = first; page < last; ++page) set_cached(page);
    return;
  }
  if (means_ == Means::kMincore) {
    std::vector<unsigned char> cached;
    if (!find_cached(handle_, first * small_page_bytes(), last * small_page_bytes(), cached))
      return;
    for (int64_t page = first; page < last; ++page) {
      if (cached[static_cast<size_t>(page - first)] & 1) set_cached(page);
    }
    return;
  }
  const int64_t stretch = kStretchBytes / small_page_bytes();
  for (int64_t from = first; from < last; from += stretch) {
    const int64_t to = std::min(from + stretch, last);
    const bool is_there = probe(handle_, from * small_page_bytes()) == 1 ||
                          probe(handle_, (to - 1) * small_page_bytes()) == 1;
    if (!is_there) continue;
    for (int64_t page = from; page < to; ++page) set_cached(page);
  }
}

int64_t CachedPages::head_end(int64_t begin, int64_t end) const {
  int64_t page = begin / small_page_bytes();
  while (page * small_page_bytes() < end && is_cached(page)) ++page;
  return std::clamp(page * small_page_bytes(), begin, end);
}

int64_t CachedPages::tail_begin(int64_t begin, int64_t end) const {
  int64_t page = ceil_div(end, small_page_bytes());
  while (page * small_page_bytes() > begin && is_cached(page - 1)) --page;
  return std::clamp(page * small_page_bytes(), begin, end);
}

void CachedPages::drop_others(int64_t begin, int64_t end) const {
  const int64_t last = std::min(ceil_div(end, small_page_bytes()), last_);
  for (int64_t page = std::max(begin / small_page_bytes(), first_); page < last; ++page) {
    const int64_t from = page;
    while (page < last && !is_cached(page)) ++page;
    if (from == page) continue;
    posix_fadvise(handle_, from * small_page_bytes(), (page - from) * small_page_bytes(),
                  POSIX_FADV_DONTNEED);
  }
}

void CachedPages::drop_others() const {
  if (means_ != Means::kNone) drop_others(first_ * small_page_bytes(), last_ * small_page_bytes());
}

bool CachedPages::is_cached(int64_t page) const {
  if (page < first_ || page >= last_) return false;
  const auto place = static_cast<size_t>(page - first_);
  return (bits_[place / kBits] >> (place % kBits) & 1) != 0;
}

//! NOTE: the threads that ask write to words of their own.
void CachedPages::set_cached(int64_t page) {
  const auto place = static_cast<size_t>(page - first_);
  bits_[place / kBits] |= uint64_t{1} << (place % kBits);
}

}  // namespace engram
