// SPDX-License-Identifier: Apache-2.0
//! \file convert_rows.h
//! A row of FP8 values and E8M0 scales to BF16 on the CPU. All forms do what row.h says, bit for
//! bit.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "engram/row.h"
#include "multiversion.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace engram {

//! A row's bytes; null reads as zeros.
struct Row {
  const uint8_t* values;
  const uint8_t* scales;
};

//! Rows to BF16, one after the other.
using ConvertRows = void (*)(const Row* rows, int64_t num_rows, int head_dim, uint16_t* out);

struct RowConversion {
  static ENGRAM_HOST_DEVICE void run(const Row& row, int head_dim, uint16_t* __restrict out) {
    constexpr int kStep = 256;  // widened first, so that all vectors of the arithmetic are full
    for (int first = 0; first < head_dim; first += kStep) {
      const int step = std::min(kStep, head_dim - first);
      uint16_t wide[kStep];
      for (int i = 0; i < step; ++i) wide[i] = row.values[first + i];
      for (int block = 0; block < step; block += kScaleBlock) {
        const uint8_t scale = row.scales[(first + block) / kScaleBlock];
        const uint16_t* const in = wide + block;
        uint16_t* const block_out = out + first + block;
        if (is_normal_scale(scale)) {
          for (int i = 0; i < kScaleBlock; ++i) block_out[i] = bf16_from_fp8_normal(in[i], scale);
        } else {
          for (int i = 0; i < kScaleBlock; ++i) {
            block_out[i] = bf16_from_fp8(static_cast<uint8_t>(in[i]), scale);
          }
        }
      }
    }
  }
};

struct RowsConversion {
  static ENGRAM_HOST_DEVICE void run(const Row* rows, int64_t num_rows, int head_dim,
                                     uint16_t* out) {
    for (int64_t i = 0; i < num_rows; ++i) {
      uint16_t* const row_out = out + row_offset(i, head_dim);
      if (rows[i].values == nullptr) {
        memset(row_out, 0, static_cast<size_t>(head_dim) * sizeof(uint16_t));
      } else {
        RowConversion::run(rows[i], head_dim, row_out);
      }
    }
  }
};

inline void convert_rows_baseline(const Row* rows, int64_t num_rows, int head_dim, uint16_t* out) {
  RowsConversion::run(rows, num_rows, head_dim, out);
}

#if defined(__x86_64__)
ENGRAM_TARGET_AVX2 inline void convert_rows_avx2(const Row* rows, int64_t num_rows, int head_dim,
                                                 uint16_t* out) {
  RowsConversion::run(rows, num_rows, head_dim, out);
}

ENGRAM_TARGET_AVX512 inline void convert_rows_avx512(const Row* rows, int64_t num_rows,
                                                     int head_dim, uint16_t* out) {
  RowsConversion::run(rows, num_rows, head_dim, out);
}

//! Low and high bytes of bf16_from_fp8_normal at the scale that adds nothing.
struct ConversionTable {
  alignas(64) uint8_t low[128];
  alignas(64) uint8_t high[128];
};

constexpr ConversionTable make_conversion_table() {
  ConversionTable table = {};
  for (int magnitude = 0; magnitude < 128; ++magnitude) {
    const uint16_t bits =
        bf16_from_fp8_normal(static_cast<uint16_t>(magnitude), kLowestNormalScale);
    table.low[magnitude] = static_cast<uint8_t>(bits & 0xFF);
    table.high[magnitude] = static_cast<uint8_t>(bits >> 8);
  }
  return table;
}

inline constexpr ConversionTable kConversionTable = make_conversion_table();

#define ENGRAM_TARGET_VBMI __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi")))

inline bool has_avx512_vbmi() { return has_avx512() && __builtin_cpu_supports("avx512vbmi"); }

//! RowConversion with the magnitudes' two bytes from tables in registers: a third of its
//! instructions. That counts twice, for the fewer there are, the further ahead the processor asks
//! for rows. NOTE: a wide load of the scales would wait for the line after them.
struct TableConversion {
  static constexpr int kStep = 2 * kScaleBlock;

  static bool takes(int head_dim) { return head_dim % kStep == 0; }

  ENGRAM_TARGET_VBMI static inline void run(const Row* rows, int64_t num_rows, int head_dim,
                                            uint16_t* out) {
    for (int64_t i = 0; i < num_rows; ++i) {
      if (!convert(rows[i], head_dim, out + row_offset(i, head_dim))) {
        convert_rows_avx512(rows + i, 1, head_dim, out + row_offset(i, head_dim));
      }
    }
  }

 private:
  //! False, with nothing of use in out, where a value is NaN or a scale not normal.
  ENGRAM_TARGET_VBMI static inline __attribute__((always_inline)) bool convert(Row row,
                                                                               int head_dim,
                                                                               uint16_t* out) {
    if (row.values == nullptr) return false;
    const __m512i low0 = _mm512_load_si512(kConversionTable.low);
    const __m512i low1 = _mm512_load_si512(kConversionTable.low + 64);
    const __m512i high0 = _mm512_load_si512(kConversionTable.high);
    const __m512i high1 = _mm512_load_si512(kConversionTable.high + 64);
    const __m512i unpack_order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
    const __m512i sign = _mm512_set1_epi8(-128);

    __m512i largest = sign;  // NaN is all ones beside the sign
    __m512i farthest =
        _mm512_setzero_si512();  // scales above the lowest normal one; below it wraps
    for (int i = 0; i < head_dim; i += kStep) {
      const uint8_t* const scale = row.scales + i / kScaleBlock;
      const __m512i scale0 = above_lowest(scale[0]);
      const __m512i scale1 = above_lowest(scale[1]);
      farthest = _mm512_max_epu16(farthest, _mm512_max_epu16(scale0, scale1));
      const __m512i bytes = _mm512_loadu_si512(row.values + i);
      largest = _mm512_max_epu8(largest, _mm512_or_si512(bytes, sign));
      const __m512i ordered = _mm512_maskz_permutexvar_epi64(0xFF, unpack_order, bytes);
      const __m512i low = _mm512_permutex2var_epi8(low0, ordered, low1);
      const __m512i unsigned_high = _mm512_permutex2var_epi8(high0, ordered, high1);
      const __m512i high = _mm512_or_si512(unsigned_high, _mm512_and_si512(ordered, sign));
      store(_mm512_unpacklo_epi8(low, high), scale0, out + i);
      store(_mm512_unpackhi_epi8(low, high), scale1, out + i + kScaleBlock);
    }
    const __m512i span = _mm512_set1_epi16(kHighestNormalScale - kLowestNormalScale);
    const __mmask32 not_normal = _mm512_cmpgt_epu16_mask(farthest, span);
    return (_mm512_cmpeq_epi8_mask(largest, _mm512_set1_epi8(-1)) | not_normal) == 0;
  }

  ENGRAM_TARGET_VBMI static inline __attribute__((always_inline)) __m512i
  above_lowest(uint8_t scale) {
    return _mm512_sub_epi16(_mm512_set1_epi16(scale), _mm512_set1_epi16(kLowestNormalScale));
  }

  //! Adds the scale to all but zeros.
  ENGRAM_TARGET_VBMI static inline __attribute__((always_inline)) void store(__m512i bits,
                                                                             __m512i scale,
                                                                             uint16_t* out) {
    const __mmask32 nonzero = _mm512_test_epi16_mask(bits, _mm512_set1_epi16(0x7FFF));
    const __m512i exponent = _mm512_slli_epi16(scale, 7);
    _mm512_storeu_si512(out, _mm512_mask_add_epi16(bits, nonzero, bits, exponent));
  }
};
#endif

//! The fastest form on this CPU.
inline ConvertRows widest_convert_rows([[maybe_unused]] int head_dim) {
#if defined(__x86_64__)
  if (has_avx512_vbmi() && TableConversion::takes(head_dim)) return TableConversion::run;
  if (has_avx512()) return convert_rows_avx512;
  if (has_avx2()) return convert_rows_avx2;
#endif
  return convert_rows_baseline;
}

}  // namespace engram
