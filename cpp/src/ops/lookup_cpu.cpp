// SPDX-License-Identifier: Apache-2.0
// engram_lookup on the CPU: random rows, so memory is asked for many rows ahead of the arithmetic.
#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include "cache_line.h"
#include "check.h"
#include "engram/layout.h"
#include "engram/ops.h"
#include "multiversion_streams.h"
#include "ops/convert_rows.h"
#include "ops/row_runs.h"
#include "ops/staged_scales.h"
#include "parallel.h"

namespace engram {
namespace {

constexpr int64_t kRowsPerRange = 1024;
constexpr int64_t kRowsPerBatch = 16;
constexpr size_t kRowsAhead = 16;
constexpr size_t kPagesAhead = 32;  // a row's first lines wait for their pages, the others do not
constexpr int64_t kCachedBytes = 1 << 20;  // more than what an L2 keeps is written past the caches

bool is_streamed(const engram_lookup_args& args) {
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
#if defined(__x86_64__)
  _mm_sfence();  // streamed rows are seen before the thread says it is done
#endif
}

#if defined(__x86_64__)
constexpr int kWideRow = 8 * kScaleBlock;  // values of a row whose scales are one word
constexpr int kWideRowLines = kWideRow / kCacheLine;

//! A matrix of gf2p8affine: bit i of a result is bit from[i], or 0 where that is negative.
constexpr int64_t bit_matrix(std::array<int, 8> from) {
  uint64_t matrix = 0;
  for (size_t i = 0; i < from.size(); ++i) {
    if (from[i] >= 0) matrix |= uint64_t{1} << (8 * (7 - i) + static_cast<size_t>(from[i]));
  }
  return static_cast<int64_t>(matrix);
}

// FP8 to BF16 in bytes, of which a vector has twice as many as values: BF16 rotated left by a bit
// is a byte of exponent above one of mantissa and sign, mmm0000s. Of an FP8 value, rolled left to
// eeeemmms, the latter has the bits; of the eight subnormals of a sign, a table. The exponent is
// a field, kFieldBase | eeee or the table's, plus the scale, less kUnscaled. It saturates at 0, so
// zero, whose field is 0, stays zero.
constexpr int kFieldBase = 0xF0;
constexpr int kUnscaled = kFieldBase + 7;
constexpr int kRolledNan = kFp8NanMagnitude << 1;

struct Subnormals {
  alignas(16) uint8_t fields[16];
  alignas(16) uint8_t mantissas[16];
};

constexpr Subnormals make_subnormals() {
  Subnormals made = {};
  for (int i = 0; i < 16; ++i) {  // mmms
    const int bits = bf16_from_fp8_normal(static_cast<uint16_t>(i / 2), kLowestNormalScale);
    made.fields[i] = static_cast<uint8_t>(i < 2 ? 0 : (bits >> 7) + kUnscaled - kLowestNormalScale);
    made.mantissas[i] = static_cast<uint8_t>((bits >> 4 & 7) << 5 | (i & 1));
  }
  return made;
}

constexpr Subnormals kSubnormals = make_subnormals();

ENGRAM_INLINE_GFNI __m512i bytes_of(int byte) { return _mm512_set1_epi8(static_cast<char>(byte)); }

ENGRAM_INLINE_GFNI __m512i each_lane(const uint8_t* bytes) {
  const auto* const lane = reinterpret_cast<const __m128i*>(bytes);
  return _mm512_maskz_broadcast_i32x4(0xFFFF, _mm_load_si128(lane));
}

ENGRAM_INLINE_GFNI int64_t scales_of(const Row& row) {
  int64_t scales;
  memcpy(&scales, row.scales, sizeof(scales));
  return scales;
}

//! A wide row to BF16. False, and nothing converted, where a value is NaN or a scale not normal.
ENGRAM_INLINE_GFNI bool convert_normal(const Row& row, __m512i* out) {
  const __m512i unpack_order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
  const __m512i roll = _mm512_set1_epi64(bit_matrix({7, 0, 1, 2, 3, 4, 5, 6}));
  __m512i rolled[kWideRowLines];
  __m512i largest = _mm512_setzero_si512();
  for (int i = 0; i < kWideRowLines; ++i) {
    const __m512i bytes = _mm512_loadu_si512(row.values + i * kCacheLine);
    const __m512i ordered = _mm512_maskz_permutexvar_epi64(0xFF, unpack_order, bytes);
    rolled[i] = _mm512_gf2p8affine_epi64_epi8(ordered, roll, 0);
    largest = _mm512_max_epu8(largest, rolled[i]);
  }
  const __m512i scales = _mm512_set1_epi64(scales_of(row));
  const __m512i below_highest = _mm512_sub_epi8(bytes_of(kHighestNormalScale), scales);
  constexpr int kNumNormal = kHighestNormalScale - kLowestNormalScale + 1;
  const __m512i odd = _mm512_adds_epu8(below_highest, bytes_of(kRolledNan - kNumNormal));
  if (_mm512_cmpge_epu8_mask(_mm512_max_epu8(largest, odd), bytes_of(kRolledNan)) != 0) {
    return false;
  }

  const __m512i field_bits = _mm512_set1_epi64(bit_matrix({4, 5, 6, 7, -1, -1, -1, -1}));
  const __m512i mantissa_bits = _mm512_set1_epi64(bit_matrix({0, -1, -1, -1, -1, 1, 2, 3}));
  const __m512i lowered_by = _mm512_sub_epi8(bytes_of(kUnscaled), scales);
  const __m512i two_blocks = _mm512_maskz_unpacklo_epi64(0xFF, bytes_of(0), bytes_of(1));
  for (int i = 0; i < kWideRowLines; ++i) {
    const __mmask64 subnormal = _mm512_testn_epi8_mask(rolled[i], bytes_of(0xF0));  // no eeee
    __m512i field = _mm512_gf2p8affine_epi64_epi8(rolled[i], field_bits, kFieldBase);
    field = _mm512_mask_shuffle_epi8(field, subnormal, each_lane(kSubnormals.fields), rolled[i]);
    __m512i mantissa = _mm512_gf2p8affine_epi64_epi8(rolled[i], mantissa_bits, 0);
    mantissa =
        _mm512_mask_shuffle_epi8(mantissa, subnormal, each_lane(kSubnormals.mantissas), rolled[i]);
    const __m512i blocks = _mm512_add_epi8(two_blocks, bytes_of(2 * i));
    const __m512i exponent = _mm512_subs_epu8(field, _mm512_shuffle_epi8(lowered_by, blocks));
    const __m512i low = _mm512_unpacklo_epi8(mantissa, exponent);
    const __m512i high = _mm512_unpackhi_epi8(mantissa, exponent);
    out[2 * i] = _mm512_shrdi_epi16(low, low, 1);
    out[2 * i + 1] = _mm512_shrdi_epi16(high, high, 1);
  }
  return true;
}

[[gnu::noinline]] void convert_any(Row row, uint16_t* out) {
  convert_rows_avx512(&row, 1, kWideRow, out);
}

template <typename Stream>
ENGRAM_INLINE_GFNI void put_bf16(const Row& row, Stream& out) {
  __m512i lines[2 * kWideRowLines];
  if (row.values == nullptr || !convert_normal(row, lines)) {
    alignas(kCacheLine) uint16_t converted[kWideRow];
    convert_any(row, converted);
    memcpy(lines, converted, sizeof(lines));
  }
  for (const __m512i line : lines) out.put(line);
}

template <typename Stream>
ENGRAM_INLINE_GFNI void put_packed(const Row& row, Stream& out) {
  const bool is_there = row.values != nullptr;
  for (int i = 0; i < kWideRow; i += kCacheLine) {
    out.put(is_there ? _mm512_loadu_si512(row.values + i) : _mm512_setzero_si512());
  }
  out.put(is_there ? scales_of(row) : 0);
}

//! Wide rows of tokens [begin, end), each written before the next is looked at. NOTE: small and all
//! inlined, for the fewer instructions a row takes, the further ahead the processor asks for rows.
template <bool kPacked, typename Stream>
ENGRAM_TARGET_GFNI void lookup_wide_range(const engram_lookup_args& args, int64_t begin,
                                          int64_t end) {
  constexpr int kRowBytes = kPacked ? packed_row_bytes(kWideRow) : 2 * kWideRow;
  const int64_t first = row_offset(begin, args.num_columns);
  const int64_t last = row_offset(end, args.num_columns);
  Stream out(static_cast<uint8_t*>(args.out) + row_offset(first, kRowBytes));
  Row window[kPagesAhead];
  RowWindow rows(args, kWideRow, begin, end, window);
  for (int64_t index = first; index < last; ++index) {
    if constexpr (kPacked) {
      put_packed(rows.take(), out);
    } else {
      put_bf16(rows.take(), out);
    }
  }
  out.finish();
}
#endif

using LookupRange = void (*)(const engram_lookup_args& args, int64_t begin, int64_t end);

LookupRange fastest_lookup_range(const engram_lookup_args& args) {
  const bool bf16 = args.form == ENGRAM_ROWS_BF16;
#if defined(__x86_64__)
  const bool packed = args.form == ENGRAM_ROWS_PACKED;
  if ((packed || bf16) && args.head_dim == kWideRow && has_avx512_gfni()) {
    const bool aligned = reinterpret_cast<uintptr_t>(args.out) % sizeof(int64_t) == 0;
    if (aligned && is_streamed(args)) {
      return packed ? lookup_wide_range<true, LineStream> : lookup_wide_range<false, LineStream>;
    }
    return packed ? lookup_wide_range<true, CachedStream> : lookup_wide_range<false, CachedStream>;
  }
#endif
  return bf16 ? lookup_range<Bf16Writer> : lookup_range<ByteWriter>;
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
  check_range(args.path, "path", ENGRAM_LOOKUP_AUTO, ENGRAM_LOOKUP_SORTED);
  check_at_least(args.num_read_blocks, "num_read_blocks", 0);
  check_at_least(args.workspace_bytes, "workspace_bytes", 0);
}

void check_lookup(const engram_lookup_args& args) {
  check_lookup_sizes(args);
  if (args.num_tokens == 0) return;
  check_elements(args.ids, "ids");
  check_array(args.out, "out");
  if (args.form == ENGRAM_ROWS_BF16) check_aligned(args.out, "out", alignof(uint16_t));
  if (args.num_rows > 0) {
    check_array(args.values, "values");
    check_array(args.scales, "scales");
  }
  if (args.form >= ENGRAM_ROWS_MXFP8_LINEAR) check_array(args.out_scales, "out_scales");
}

void check_lookup_on_gpu(const engram_lookup_args& args) {
  if (args.num_tokens == 0) return;
  if (args.num_rows > 0) {
    check_aligned(args.values, "values", static_cast<uintptr_t>(lookup_read_bytes(args.form)));
  }
  if (args.form != ENGRAM_ROWS_PACKED) check_aligned(args.out, "out", 16);
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
  parallel_for(args.num_tokens, grain, num_threads, [&](int64_t begin, int64_t end) {
    if (staged) clear_staged_tiles(args.out_scales, begin, end, num_scales);
    look_up(args, begin, end);
  });
}

}  // namespace engram
