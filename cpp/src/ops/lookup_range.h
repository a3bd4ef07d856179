// SPDX-License-Identifier: Apache-2.0
//! \file lookup_range.h
//! What the forms of the lookup on the CPU share: rows asked for ahead of the arithmetic.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cache_line.h"
#include "engram/ops.h"
#include "engram/row.h"
#include "ops/convert_rows.h"

namespace engram {

//! Looks up the rows of tokens [begin, end).
using LookupRange = void (*)(const engram_lookup_args& args, int64_t begin, int64_t end);

constexpr size_t kRowsAhead = 16;
constexpr size_t kPagesAhead = 32;  // a row's first lines wait for their pages, the others do not
constexpr int64_t kCachedBytes = 1 << 20;  // more than what an L2 keeps is written past the caches

//! Whether rows go past the caches.
inline bool is_streamed(const engram_lookup_args& args) {
  const int row_bytes = args.form == ENGRAM_ROWS_BF16 ? 2 * args.head_dim : args.head_dim;
  return row_offset(row_offset(args.num_tokens, args.num_columns), row_bytes) > kCachedBytes;
}

//! The rows of tokens in order, asked for before they are taken: their pages first, for a prefetch
//! holds up what comes after it until its page is found. NOTE: all of it is inlined, for GCC drops
//! calls of functions that do nothing but prefetch.
class RowWindow {
 public:
  //! `rows` has kPagesAhead elements. NOTE: as a member they would keep all others in memory.
  ENGRAM_HOST_DEVICE RowWindow(const engram_lookup_args& args, int head_dim, int64_t begin,
                               int64_t end, Row* rows)
      : rows_(rows),
        values_(args.values),
        scales_(args.scales),
        ids_(args.ids + row_offset(begin, args.ids_stride)),
        ids_stride_(args.ids_stride),
        first_row_(args.first_row),
        num_rows_(args.num_rows),
        num_left_(row_offset(end - begin, args.num_columns)),
        num_columns_(args.num_columns),
        head_dim_(head_dim),
        lines_end_(head_dim + bytes_into_line(args.values)) {
    for (size_t i = 0; i < kPagesAhead; ++i) rows_[i] = begin_row();
    for (size_t i = 0; i < kRowsAhead; ++i) prefetch(rows_[i].values, kCacheLine, lines_end_);
  }

  ENGRAM_HOST_DEVICE Row take() {
    Row& place = rows_[next_ % kPagesAhead];
    const Row row = place;
    place = begin_row();
    prefetch(rows_[(next_ + kRowsAhead) % kPagesAhead].values, kCacheLine, lines_end_);
    ++next_;
    return row;
  }

 private:
  ENGRAM_HOST_DEVICE Row begin_row() {
    if (num_left_ == 0) return {nullptr, nullptr};
    --num_left_;
    const int64_t row = ids_[column_] - first_row_;
    if (++column_ == num_columns_) {
      column_ = 0;
      ids_ += ids_stride_;
    }
    if (row < 0 || row >= num_rows_) return {nullptr, nullptr};
    const Row begun = {values_ + row_offset(row, head_dim_),
                       scales_ + row_offset(row, scales_per_row(head_dim_))};
    prefetch(begun.values, 0, kCacheLine);
    prefetch(begun.scales, 0, kCacheLine);
    return begun;
  }

  static ENGRAM_HOST_DEVICE void prefetch(const uint8_t* bytes, int from, int to) {
    if (bytes == nullptr) return;
    for (int i = from; i < to; i += kCacheLine) __builtin_prefetch(bytes + i, 0, 2);
  }

  Row* rows_;
  const uint8_t* values_;
  const uint8_t* scales_;
  const int32_t* ids_;
  int64_t ids_stride_;
  int64_t first_row_;
  int64_t num_rows_;
  int64_t num_left_;  // not begun
  int32_t num_columns_;
  int32_t head_dim_;
  int32_t lines_end_;  // of a row: one that starts within a line ends in a line more
  int32_t column_ = 0;
  size_t next_ = 0;
};

}  // namespace engram
