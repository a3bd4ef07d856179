// SPDX-License-Identifier: Apache-2.0
//! \file lookup_wide.h
//! The lookup of V4.1's rows on CPUs with AVX-512 and GFNI.
#pragma once

#include "ops/lookup_range.h"

#if defined(__x86_64__)
#include <cstring>

#include "multiversion_streams.h"
#include "ops/convert_wide_rows.h"
#endif

namespace engram {

#if defined(__x86_64__)
[[gnu::noinline]] inline void convert_any(Row row, uint16_t* out) {
  convert_rows_avx512(&row, 1, kWideRow, out);
}

template <typename Stream>
ENGRAM_INLINE_GFNI void put_bf16(const WideConversion& conversion, const Row& row, Stream& out) {
  __m512i lines[2 * kWideRowLines];
  if (row.values == nullptr || !conversion.convert(row, lines)) {
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
  const WideConversion conversion;
  Row window[kPagesAhead];
  RowWindow rows(args, kWideRow, begin, end, window);
  for (int64_t index = first; index < last; ++index) {
    if constexpr (kPacked) {
      put_packed(rows.take(), out);
    } else {
      put_bf16(conversion, rows.take(), out);
    }
  }
  out.finish();
}

//! The form for these arguments; null where there is none.
inline LookupRange wide_lookup_range(const engram_lookup_args& args) {
  const bool bf16 = args.form == ENGRAM_ROWS_BF16;
  const bool packed = args.form == ENGRAM_ROWS_PACKED;
  if (!(bf16 || packed) || args.head_dim != kWideRow || !has_avx512_gfni()) return nullptr;
  if (is_streamed(args)) {
    const int into_line = bytes_into_line(args.out);
    if (bf16 && into_line == 0) return lookup_wide_range<false, AlignedLineStream>;
    if (into_line % static_cast<int>(sizeof(int64_t)) == 0) {
      return packed ? lookup_wide_range<true, LineStream> : lookup_wide_range<false, LineStream>;
    }
  }
  return packed ? lookup_wide_range<true, CachedStream> : lookup_wide_range<false, CachedStream>;
}
#else
inline LookupRange wide_lookup_range(const engram_lookup_args&) { return nullptr; }
#endif

}  // namespace engram
