// SPDX-License-Identifier: Apache-2.0
// engram_lookup on the CPU: random rows, so memory is asked for several rows ahead of the
// arithmetic.
#include <algorithm>
#include <cstring>

#include "check.h"
#include "engram/layout.h"
#include "engram/ops.h"
#include "multiversion.h"
#include "ops/staged_scales.h"
#include "parallel.h"

namespace engram {
namespace {

constexpr int64_t kRowsPerRange = 1024;
constexpr int kRowsAhead = 12;
constexpr int kCacheLine = 64;

struct Row {
  const uint8_t* values;  // null: reads as zeros
  const uint8_t* scales;
};

//! The rows of tokens [begin, end) in order.
class RowCursor {
 public:
  RowCursor(const engram_lookup_args& args, int64_t token)
      : args_(args), ids_(args.ids + row_offset(token, args.ids_stride)) {}

  ENGRAM_HOST_DEVICE Row next() {
    const int64_t row = ids_[column_] - args_.first_row;
    if (++column_ == args_.num_columns) {
      column_ = 0;
      ids_ += args_.ids_stride;
    }
    if (row < 0 || row >= args_.num_rows) return {nullptr, nullptr};
    return {args_.values + row_offset(row, args_.head_dim),
            args_.scales + row_offset(row, scales_per_row(args_.head_dim))};
  }

 private:
  const engram_lookup_args& args_;
  const int32_t* ids_;
  int32_t column_ = 0;
};

ENGRAM_HOST_DEVICE void prefetch_row(const Row& row, int head_dim) {
  if (row.values == nullptr) return;
  for (int i = 0; i < head_dim; i += kCacheLine) __builtin_prefetch(row.values + i);
  __builtin_prefetch(row.scales);
}

ENGRAM_HOST_DEVICE void convert_row(const Row& row, int head_dim, uint16_t* out) {
  for (int block = 0; block < scales_per_row(head_dim); ++block) {
    const uint8_t scale = row.scales[block];
    const uint8_t* const values = row.values + block * kScaleBlock;
    uint16_t* const block_out = out + block * kScaleBlock;
    if (is_normal_scale(scale)) {
      for (int i = 0; i < kScaleBlock; ++i) block_out[i] = bf16_from_fp8_normal(values[i], scale);
    } else {
      for (int i = 0; i < kScaleBlock; ++i) block_out[i] = bf16_from_fp8(values[i], scale);
    }
  }
}

//! Writes row `column` of `token`, whose flat index is `index`.
template <int kForm>
ENGRAM_HOST_DEVICE void write_row(const engram_lookup_args& args, const Row& row, int64_t token,
                                  int32_t column, int64_t index) {
  const int head_dim = args.head_dim;
  const int num_scales = scales_per_row(head_dim);
  if constexpr (kForm == ENGRAM_ROWS_BF16) {
    uint16_t* const out = static_cast<uint16_t*>(args.out) + row_offset(index, head_dim);
    if (row.values == nullptr) {
      memset(out, 0, static_cast<size_t>(head_dim) * sizeof(uint16_t));
    } else {
      convert_row(row, head_dim, out);
    }
  } else {
    const bool packed = kForm == ENGRAM_ROWS_PACKED;
    uint8_t* const out = static_cast<uint8_t*>(args.out) +
                         row_offset(index, packed ? packed_row_bytes(head_dim) : head_dim);
    uint8_t* const scales =
        packed ? out + head_dim : args.out_scales + row_offset(index, num_scales);
    if (row.values == nullptr) {
      memset(out, 0, static_cast<size_t>(head_dim));
      // Staged scales are zero already.
      if (kForm != ENGRAM_ROWS_MXFP8_128X4) memset(scales, 0, static_cast<size_t>(num_scales));
      return;
    }
    memcpy(out, row.values, static_cast<size_t>(head_dim));
    if (kForm == ENGRAM_ROWS_MXFP8_128X4) {
      stage_scales(row.scales, num_scales, token, row_offset(column, num_scales),
                   row_offset(args.num_columns, num_scales), args.out_scales);
    } else {
      memcpy(scales, row.scales, static_cast<size_t>(num_scales));
    }
  }
}

template <int kForm>
struct LookupRange {
  static ENGRAM_HOST_DEVICE void run(const engram_lookup_args& args, int64_t begin, int64_t end) {
    const int64_t last = row_offset(end, args.num_columns);
    int64_t index = row_offset(begin, args.num_columns);
    int64_t ahead_index = std::min(index + kRowsAhead, last);
    RowCursor rows(args, begin);
    RowCursor ahead(args, begin);
    for (int64_t i = index; i < ahead_index; ++i) prefetch_row(ahead.next(), args.head_dim);
    for (int64_t token = begin; token < end; ++token) {
      for (int32_t column = 0; column < args.num_columns; ++column, ++index) {
        if (ahead_index < last) {
          prefetch_row(ahead.next(), args.head_dim);
          ++ahead_index;
        }
        write_row<kForm>(args, rows.next(), token, column, index);
      }
    }
  }
};

template <int kForm>
void lookup_form(const engram_lookup_args& args, int num_threads) {
  constexpr bool kStaged = kForm == ENGRAM_ROWS_MXFP8_128X4;
  const int64_t grain = kStaged ? kStageTileRows : ceil_div(kRowsPerRange, args.num_columns);
  const int64_t num_scales = row_offset(args.num_columns, scales_per_row(args.head_dim));
  parallel_for(args.num_tokens, grain, num_threads, [&](int64_t begin, int64_t end) {
    if (kStaged) clear_staged_tiles(args.out_scales, begin, end, num_scales);
    run_widest<LookupRange<kForm>>(args, begin, end);
  });
}

}  // namespace

void check_lookup(const engram_lookup_args& args) {
  check_range(args.form, "form", ENGRAM_ROWS_BF16, ENGRAM_ROWS_MXFP8_128X4);
  check_range(args.num_tokens, "num_tokens", 0, INT32_MAX);
  check_at_least(args.num_rows, "num_rows", 0);
  check_at_least(args.first_row, "first_row", 0);
  check_at_least(args.num_columns, "num_columns", 1);
  check_multiple(args.head_dim, "head_dim", kScaleBlock);
  check_at_least(args.ids_stride, "ids_stride", args.num_columns);
  check_product({args.num_columns, args.head_dim, 2}, "bytes of a token's rows", INT32_MAX);
  check_product({args.num_tokens + kStageTileRows, args.num_columns, args.head_dim, 2},
                "bytes of out");
  check_product({args.num_tokens, args.ids_stride, 4}, "bytes of ids");
  check_product({args.num_rows, args.head_dim}, "bytes of values");
  if (args.num_tokens == 0) return;
  check_array(args.ids, "ids");
  check_array(args.out, "out");
  check_aligned(args.ids, "ids", alignof(int32_t));
  if (args.form == ENGRAM_ROWS_BF16) check_aligned(args.out, "out", alignof(uint16_t));
  if (args.num_rows > 0) {
    check_array(args.values, "values");
    check_array(args.scales, "scales");
  }
  if (args.form >= ENGRAM_ROWS_MXFP8_LINEAR) check_array(args.out_scales, "out_scales");
}

void lookup_cpu(const engram_lookup_args& args, int num_threads) {
  switch (args.form) {
    case ENGRAM_ROWS_BF16:
      return lookup_form<ENGRAM_ROWS_BF16>(args, num_threads);
    case ENGRAM_ROWS_PACKED:
      return lookup_form<ENGRAM_ROWS_PACKED>(args, num_threads);
    case ENGRAM_ROWS_MXFP8_LINEAR:
      return lookup_form<ENGRAM_ROWS_MXFP8_LINEAR>(args, num_threads);
    default:
      return lookup_form<ENGRAM_ROWS_MXFP8_128X4>(args, num_threads);
  }
}

}  // namespace engram
