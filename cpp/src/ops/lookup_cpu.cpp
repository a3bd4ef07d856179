// SPDX-License-Identifier: Apache-2.0
// engram_lookup on the CPU: random rows, so memory is asked for many rows ahead of the arithmetic.
#include <algorithm>
#include <cstring>
#include <vector>

#include "check.h"
#include "engram/layout.h"
#include "engram/ops.h"
#include "ops/adaptive_index.h"
#include "ops/convert_rows.h"
#include "ops/hot_index.h"
#include "ops/lookup_range.h"
#include "ops/lookup_wide.h"
#include "ops/row_runs.h"
#include "ops/staged_scales.h"
#include "parallel.h"

namespace engram {
namespace {

constexpr int64_t kRowsPerRange = 1024;
constexpr int64_t kRowsPerBatch = 16;

//! Writes BF16 rows.
class Bf16Writer {
 public:
  explicit Bf16Writer(const engram_lookup_args& args)
      : out_(static_cast<uint16_t*>(args.out)),
        head_dim_(args.head_dim),
        convert_(widest_convert_rows(args.head_dim)) {
#if defined(__x86_64__)
    const bool aligned = reinterpret_cast<uintptr_t>(out_) % sizeof(__m128i) == 0;
    if (aligned && is_streamed(args)) {
      streamed_.resize(static_cast<size_t>(row_offset(kRowsPerBatch, head_dim_)));
    }
#endif
  }
  ~Bf16Writer() {
#if defined(__x86_64__)
    _mm_sfence();  // streamed rows are seen before the thread says it is done
#endif
  }
  Bf16Writer(const Bf16Writer&) = delete;
  Bf16Writer& operator=(const Bf16Writer&) = delete;

  void write(const Row* rows, int64_t num_rows, int64_t index) {
    uint16_t* const out = out_ + row_offset(index, head_dim_);
    convert_(rows, num_rows, head_dim_, streamed_.empty() ? out : streamed_.data());
#if defined(__x86_64__)
    if (streamed_.empty()) return;
    const auto* const from = reinterpret_cast<const __m128i*>(streamed_.data());
    const int64_t num_vectors = row_offset(num_rows, head_dim_) * 2 / int64_t{sizeof(__m128i)};
    for (int64_t i = 0; i < num_vectors; ++i) {
      _mm_stream_si128(reinterpret_cast<__m128i*>(out) + i, _mm_loadu_si128(from + i));
    }
#endif
  }

 private:
  uint16_t* out_;
  int head_dim_;
  ConvertRows convert_;
  std::vector<uint16_t> streamed_;  // a batch on its way past the caches
};

//! Writes rows as bytes: packed, or values and scales apart.
class ByteWriter {
 public:
  explicit ByteWriter(const engram_lookup_args& args)
      : args_(args),
        values_(static_cast<uint8_t*>(args.out)),
        scales_(args.out_scales),
        num_scales_(scales_per_row(args.head_dim)),
        values_pitch_(args.head_dim),
        scales_pitch_(num_scales_) {
    if (args.form != ENGRAM_ROWS_PACKED) return;
    values_pitch_ = scales_pitch_ = packed_row_bytes(args.head_dim);
    scales_ = values_ + args.head_dim;
  }

  void write(const Row* rows, int64_t num_rows, int64_t index) {
    for (int64_t i = 0; i < num_rows; ++i) write_row(rows[i], index + i);
  }

 private:
  void write_row(const Row& row, int64_t index) {
    uint8_t* const values = values_ + row_offset(index, values_pitch_);
    copy(row.values, args_.head_dim, values);
    if (args_.form != ENGRAM_ROWS_MXFP8_128X4) {
      copy(row.scales, num_scales_, scales_ + row_offset(index, scales_pitch_));
    } else if (row.scales != nullptr) {  // else zero already
      const int64_t token = index / args_.num_columns;
      const int64_t column = index % args_.num_columns;
      stage_scales(row.scales, num_scales_, token, row_offset(column, num_scales_),
                   row_offset(args_.num_columns, num_scales_), scales_);
    }
  }

  static void copy(const uint8_t* from, int num_bytes, uint8_t* to) {
    if (from == nullptr) {
      memset(to, 0, static_cast<size_t>(num_bytes));
    } else {
      memcpy(to, from, static_cast<size_t>(num_bytes));
    }
  }

  const engram_lookup_args& args_;
  uint8_t* values_;
  uint8_t* scales_;
  int num_scales_;
  int64_t values_pitch_;
  int64_t scales_pitch_;
};

//! Rows of tokens [begin, end), by the batch.
template <typename Writer>
void lookup_range(const engram_lookup_args& args, int64_t begin, int64_t end) {
  const int64_t last = row_offset(end, args.num_columns);
  Writer writer(args);
  Row window[kPagesAhead];
  RowWindow next_rows(args, args.head_dim, begin, end, window);
  Row rows[kRowsPerBatch];
  for (int64_t index = row_offset(begin, args.num_columns); index < last; index += kRowsPerBatch) {
    const int64_t num_rows = std::min(kRowsPerBatch, last - index);
    for (int64_t i = 0; i < num_rows; ++i) rows[i] = next_rows.take();
    writer.write(rows, num_rows, index);
  }
}

bool has_lost_ids(const engram_lookup_args& args, int64_t begin, int64_t end) {
  bool found = false;
  for (int64_t token = begin; token < end; ++token) {
    const int32_t* const ids = args.ids + row_offset(token, args.ids_stride);
    for (int32_t column = 0; column < args.num_columns; ++column) found |= ids[column] == kLostId;
  }
  return found;
}

//! Writes NaN rows over the zeros that all missing rows are in the loops above: those have no
//! instruction to spare.
template <typename Writer>
void write_lost_rows(const engram_lookup_args& args, int64_t begin, int64_t end) {
  const auto head_dim = static_cast<size_t>(args.head_dim);
  const std::vector<uint8_t> values(head_dim, kFp8NanMagnitude);
  const std::vector<uint8_t> scales(head_dim / kScaleBlock, kE8m0Nan);
  const Row row = {values.data(), scales.data()};
  Writer writer(args);
  for (int64_t token = begin; token < end; ++token) {
    const int32_t* const ids = args.ids + row_offset(token, args.ids_stride);
    for (int32_t column = 0; column < args.num_columns; ++column) {
      if (ids[column] != kLostId) continue;
      writer.write(&row, 1, row_offset(token, args.num_columns) + column);
    }
  }
}

LookupRange fastest_lookup_range(const engram_lookup_args& args) {
  if (const LookupRange wide = wide_lookup_range(args)) return wide;
  return args.form == ENGRAM_ROWS_BF16 ? lookup_range<Bf16Writer> : lookup_range<ByteWriter>;
}

}  // namespace

void check_lookup_sizes(const engram_lookup_args& args) {
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
  check_range(args.path, "path", ENGRAM_LOOKUP_AUTO, ENGRAM_LOOKUP_GATHERED);
  check_at_least(args.num_read_blocks, "num_read_blocks", 0);
  check_at_least(args.workspace_bytes, "workspace_bytes", 0);
}

void check_lookup_call(const engram_lookup_args& args) {
  check_lookup_sizes(args);
  if (args.num_tokens == 0) return;
  check_elements(args.ids, "ids");
  check_array(args.out, "out");
  if (args.form == ENGRAM_ROWS_BF16) check_aligned(args.out, "out", alignof(uint16_t));
  if (args.form >= ENGRAM_ROWS_MXFP8_LINEAR) check_array(args.out_scales, "out_scales");
}

void check_lookup(const engram_lookup_args& args) {
  check_lookup_call(args);
  if (args.num_tokens == 0 || args.num_rows == 0) return;
  check_array(args.values, "values");
  check_array(args.scales, "scales");
}

void check_lookup_on_gpu(const engram_lookup_args& args) {
  if (args.num_tokens == 0) return;
  if (args.num_rows > 0) {
    check_aligned(args.values, "values", static_cast<uintptr_t>(lookup_read_bytes(args.form)));
  }
  if (args.form != ENGRAM_ROWS_PACKED) check_aligned(args.out, "out", 16);
  check_range(args.hot.num_buckets, "hot.num_buckets", 0, INT32_MAX);
  if (args.hot.num_buckets > 0) {
    check_array(args.hot.keys, "hot.keys");
    check_aligned(args.hot.keys, "hot.keys", alignof(HotBucket));
    check_array(args.hot.values, "hot.values");
    check_aligned(args.hot.values, "hot.values", 8);
  }
  const engram_adaptive_rows& adaptive = args.hot.adaptive;
  check_range(adaptive.num_buckets, "hot.adaptive.num_buckets", 0, INT32_MAX);
  if (adaptive.num_buckets > 0) {
    check_array(adaptive.slots, "hot.adaptive.slots");
    check_aligned(adaptive.slots, "hot.adaptive.slots", alignof(AdaptiveBucket));
    check_array(adaptive.values, "hot.adaptive.values");
    check_aligned(adaptive.values, "hot.adaptive.values", alignof(uint64_t));
  }
  check_aligned(args.hot.counts, "hot.counts", alignof(uint64_t));
  if (lookup_path(args) == ENGRAM_LOOKUP_GATHERED) check_array(args.lanes, "lanes");
  if (lookup_path(args) != ENGRAM_LOOKUP_SORTED) return;
  check_at_least(args.workspace_bytes, "workspace_bytes", lookup_workspace_bytes(args));
  check_array(args.workspace, "workspace");
  check_aligned(args.workspace, "workspace", alignof(RowRun));
}

void lookup_cpu(const engram_lookup_args& args, int num_threads) {
  const bool staged = args.form == ENGRAM_ROWS_MXFP8_128X4;
  const int64_t grain = staged ? kStageTileRows : ceil_div(kRowsPerRange, args.num_columns);
  const int64_t num_scales = row_offset(args.num_columns, scales_per_row(args.head_dim));
  const LookupRange look_up = fastest_lookup_range(args);
  const LookupRange write_lost =
      args.form == ENGRAM_ROWS_BF16 ? write_lost_rows<Bf16Writer> : write_lost_rows<ByteWriter>;
  parallel_for(args.num_tokens, grain, num_threads, [&](int64_t begin, int64_t end) {
    if (staged) clear_staged_tiles(args.out_scales, begin, end, num_scales);
    look_up(args, begin, end);
    if (has_lost_ids(args, begin, end)) write_lost(args, begin, end);
  });
}

}  // namespace engram
