// SPDX-License-Identifier: Apache-2.0
#include "table/store_file.h"

#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <new>

#include "engram/error.h"

namespace engram {
namespace {

constexpr int64_t kDirectAlign = 4096;  // no disk asks for more

int64_t align_down(int64_t place) { return place / kDirectAlign * kDirectAlign; }
int64_t align_up(int64_t place) { return align_down(place + kDirectAlign - 1); }

struct FreeAligned {
  void operator()(uint8_t* bytes) const {
    operator delete[](bytes, std::align_val_t{kDirectAlign});
  }
};
using AlignedBytes = std::unique_ptr<uint8_t[], FreeAligned>;

constexpr int64_t kBounceBytes = StoreFile::kPieceBytes + 2 * kDirectAlign;

uint8_t* bounce_buffer() {
  static thread_local const AlignedBytes buffer(new (std::align_val_t{kDirectAlign})
                                                    uint8_t[kBounceBytes]);
  return buffer.get();
}

//! What the file system or the memory has against direct reading; another way may do.
bool is_refusal(int error) { return error == EINVAL || error == EFAULT || error == EOPNOTSUPP; }

FileStamp make_stamp(const std::string& path, const struct stat& status) {
  return {.file = path,
          .device = status.st_dev,
          .inode = status.st_ino,
          .num_bytes = status.st_size,
          .mtime_ns = nanoseconds(status.st_mtim),
          .ctime_ns = nanoseconds(status.st_ctim)};
}

std::string described(const FileStamp& stamp) {
  return concat(stamp.num_bytes, " bytes in inode ", stamp.device, ":", stamp.inode, ", mtime_ns ",
                stamp.mtime_ns, ", ctime_ns ", stamp.ctime_ns);
}

}  // namespace

FileStamp stamp_file(const std::string& path) { return make_stamp(path, stat_regular(path)); }

void check_stamp(const FileStamp& stamp) {
  const FileStamp found = stamp_file(stamp.file);
  ENGRAM_CHECK(found == stamp, stamp.file, ": changed while it was loaded: expected ",
               described(stamp), ", found ", described(found));
}

void check_contents(const FileStamp& stamp) {
  FileStamp found = stamp_file(stamp.file);
  found.ctime_ns = stamp.ctime_ns;
  ENGRAM_CHECK(found == stamp, stamp.file, ": changed since it was opened: expected ",
               described(stamp), ", found ", described(found));
}

StoreFile::StoreFile(const std::string& path, int64_t offset, int64_t num_bytes)
    : file_(path), begin_(offset), end_(offset + num_bytes) {
  const struct stat status = file_.status();
  ENGRAM_CHECK(S_ISREG(status.st_mode), path, ": expected a regular file");
  ENGRAM_CHECK(num_bytes <= status.st_size - offset, path, ": expected ", num_bytes,
               " bytes at offset ", offset, ", found a file of ", status.st_size, " bytes");
  stamp_ = make_stamp(path, status);
  // What is not cached is read as wanted, with nothing behind it.
  posix_fadvise(file_.handle(), 0, 0, POSIX_FADV_RANDOM);
  try {
    direct_.emplace(path, O_DIRECT);
  } catch (const Error&) {
    return;  // through the page cache, then
  }
  const FileStamp again = make_stamp(path, direct_->status());
  ENGRAM_CHECK(again == stamp_, path, ": changed while it was opened: expected ", described(stamp_),
               ", found ", described(again));
}

StoreFile::~StoreFile() {
  if (cached_) cached_->drop_others();
}

void StoreFile::read(uint8_t* to, int64_t num_bytes, int64_t offset) const {
  const int64_t end = offset + num_bytes;
  for (int64_t at = offset; at < end; at += kPieceBytes) {
    read_piece(to + (at - offset), at, std::min(at + kPieceBytes, end));
  }
}

void StoreFile::read_piece(uint8_t* to, int64_t begin, int64_t end) const {
  const int64_t head_end = cached().head_end(begin, end);
  // Cached pages between others are read with these: a disk likes one range better than many.
  const int64_t tail_begin = cached().tail_begin(head_end, end);
  const auto place = [&](int64_t at) { return to + (at - begin); };
  file_.read(to, head_end - begin, begin);
  int64_t at = head_end;
  if (direct_ && at < tail_begin) {
    const uintptr_t phase = reinterpret_cast<uintptr_t>(to) - static_cast<uintptr_t>(begin);
    if (phase % static_cast<uintptr_t>(kDirectAlign) == 0) {
      at = read_bounced(place(at), at, std::min(align_up(at), tail_begin));
      at = read_straight(place(at), at, align_down(tail_begin));
    }
    at = read_bounced(place(at), at, tail_begin);
  }
  file_.read(place(at), tail_begin - at, at);
  if (at < tail_begin) cached().drop_others(at, tail_begin);
  file_.read(place(tail_begin), end - tail_begin, tail_begin);
}

//! Direct reading of whole sectors. Returns how far it came.
int64_t StoreFile::read_straight(uint8_t* to, int64_t begin, int64_t end) const {
  int64_t at = begin;
  while (at < end && at % kDirectAlign == 0) {
    const int64_t count = direct_->read_some(to + (at - begin), end - at, at);
    if (count < 0 && !is_refusal(errno)) direct_->fail_to_read();
    if (count <= 0) break;
    at += count;
  }
  return at;
}

//! Direct reading of any range, through a buffer. Returns how far it came.
int64_t StoreFile::read_bounced(uint8_t* to, int64_t begin, int64_t end) const {
  int64_t at = begin;
  while (at < end) {
    const int64_t from = align_down(at);
    const int64_t wanted = std::min(align_up(end) - from, kBounceBytes);
    const int64_t found = direct_->read_some(bounce_buffer(), wanted, from);
    if (found < 0 && !is_refusal(errno)) direct_->fail_to_read();
    const int64_t count = std::min(from + found, end) - at;
    if (found <= 0 || count <= 0) break;
    memcpy(to + (at - begin), bounce_buffer() + (at - from), static_cast<size_t>(count));
    at += count;
  }
  return at;
}

const CachedPages& StoreFile::cached() const {
  std::call_once(asked_, [&] { cached_.emplace(file_.handle(), begin_, end_); });
  return *cached_;
}

}  // namespace engram
