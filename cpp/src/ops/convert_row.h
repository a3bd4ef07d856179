// SPDX-License-Identifier: Apache-2.0
//! \file convert_row.h
//! A row of FP8 values and E8M0 scales to BF16 on the CPU. All forms do what row.h says, bit for
//! bit.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "engram/row.h"
#include "multiversion.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace engram {

//! head_dim values and head_dim/32 scales to head_dim BF16.
using ConvertRow = void (*)(const uint8_t* values, const uint8_t* scales, int head_dim,
                            uint16_t* out);

struct RowConversion {
  static ENGRAM_HOST_DEVICE void run(const uint8_t* values, const uint8_t* scales, int head_dim,
                                     uint16_t* __restrict out) {
    constexpr int kStep = 256;  // widened first, so that all vectors of the arithmetic are full
    for (int first = 0; first < head_dim; first += kStep) {
      const int step = std::min(kStep, head_dim - first);
      uint16_t wide[kStep];
      for (int i = 0; i < step; ++i) wide[i] = values[first + i];
      for (int block = 0; block < step; block += kScaleBlock) {
        const uint8_t scale = scales[(first + block) / kScaleBlock];
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

#if defined(__x86_64__)
ENGRAM_TARGET_AVX2 inline void convert_row_avx2(const uint8_t* values, const uint8_t* scales,
                                                int head_dim, uint16_t* out) {
  RowConversion::run(values, scales, head_dim, out);
}

ENGRAM_TARGET_AVX512 inline void convert_row_avx512(const uint8_t* values, const uint8_t* scales,
                                                    int head_dim, uint16_t* out) {
  RowConversion::run(values, scales, head_dim, out);
}

//! Low and high bytes of bf16_from_fp8_normal(magnitude, 10), whose scale adds nothing.
struct ConversionTable {
  alignas(64) uint8_t low[128];
  alignas(64) uint8_t high[128];
};

constexpr ConversionTable make_conversion_table() {
  ConversionTable table = {};
  for (int magnitude = 0; magnitude < 128; ++magnitude) {
    const uint16_t bits = bf16_from_fp8_normal(static_cast<uint16_t>(magnitude), 10);
    table.low[magnitude] = static_cast<uint8_t>(bits & 0xFF);
    table.high[magnitude] = static_cast<uint8_t>(bits >> 8);
  }
  return table;
}

inline constexpr ConversionTable kConversionTable = make_conversion_table();

#define ENGRAM_TARGET_VBMI __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi")))

inline bool has_avx512_vbmi() { return has_avx512() && __builtin_cpu_supports("avx512vbmi"); }

//! Two blocks a step: both bytes of the magnitudes from tables in registers, then signs and scales.
//! Half the instructions of RowConversion, which counts: the processor looks further ahead, and so
//! has more rows' reads in flight.
ENGRAM_TARGET_VBMI inline void convert_row_vbmi(const uint8_t* values, const uint8_t* scales,
                                                int head_dim, uint16_t* out) {
  constexpr int kStep = 2 * kScaleBlock;
  const __m512i low0 = _mm512_load_si512(kConversionTable.low);
  const __m512i low1 = _mm512_load_si512(kConversionTable.low + 64);
  const __m512i high0 = _mm512_load_si512(kConversionTable.high);
  const __m512i high1 = _mm512_load_si512(kConversionTable.high + 64);
  const __m512i unpack_order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
  const __m512i sign = _mm512_set1_epi8(-128);
  const __m512i magnitude = _mm512_set1_epi16(0x7FFF);
  int i = 0;
  for (; i + kStep <= head_dim; i += kStep) {
    const uint8_t* const scale = scales + i / kScaleBlock;
    const __m512i bytes = _mm512_loadu_si512(values + i);
    // NaN is all ones beside the sign.
    const __mmask64 nans =
        _mm512_cmpeq_epi8_mask(_mm512_or_si512(bytes, sign), _mm512_set1_epi8(-1));
    if (nans != 0 || !is_normal_scale(scale[0]) || !is_normal_scale(scale[1])) {
      RowConversion::run(values + i, scale, kStep, out + i);
      continue;
    }
    const __m512i ordered = _mm512_maskz_permutexvar_epi64(0xFF, unpack_order, bytes);
    const __m512i low = _mm512_permutex2var_epi8(low0, ordered, low1);
    const __m512i unsigned_high = _mm512_permutex2var_epi8(high0, ordered, high1);
    const __m512i high = _mm512_or_si512(unsigned_high, _mm512_and_si512(ordered, sign));
    for (int block = 0; block < 2; ++block) {
      const __m512i bits =
          block == 0 ? _mm512_unpacklo_epi8(low, high) : _mm512_unpackhi_epi8(low, high);
      const __m512i exponent = _mm512_set1_epi16(static_cast<int16_t>((scale[block] - 10) << 7));
      const __mmask32 nonzero = _mm512_test_epi16_mask(bits, magnitude);
      _mm512_storeu_si512(out + i + block * kScaleBlock,
                          _mm512_mask_add_epi16(bits, nonzero, bits, exponent));
    }
  }
  if (i < head_dim) RowConversion::run(values + i, scales + i / kScaleBlock, head_dim - i, out + i);
}
#endif

inline void convert_row_baseline(const uint8_t* values, const uint8_t* scales, int head_dim,
                                 uint16_t* out) {
  RowConversion::run(values, scales, head_dim, out);
}

//! The fastest form on this CPU.
inline ConvertRow widest_convert_row() {
#if defined(__x86_64__)
  if (has_avx512_vbmi()) return convert_row_vbmi;
  if (has_avx512()) return convert_row_avx512;
  if (has_avx2()) return convert_row_avx2;
#endif
  return convert_row_baseline;
}

}  // namespace engram
