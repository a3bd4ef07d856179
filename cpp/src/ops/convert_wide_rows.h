// SPDX-License-Identifier: Apache-2.0
//! \file convert_wide_rows.h
//! A row whose scales are one word to BF16, by AVX-512 with GFNI; bit for bit what row.h says.
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>

#include <array>
#include <cstdint>
#include <cstring>

#include "cache_line.h"
#include "engram/row.h"
#include "multiversion.h"
#include "ops/convert_rows.h"

namespace engram {

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

//! Which of a row's scales the values of its lines have, once they are unpacked.
struct ScaleOrder {
  alignas(kCacheLine) uint8_t lines[kWideRowLines][kCacheLine];
};

constexpr ScaleOrder make_scale_order() {
  ScaleOrder made = {};
  for (int line = 0; line < kWideRowLines; ++line) {
    for (int i = 0; i < kCacheLine; ++i) {
      made.lines[line][i] = static_cast<uint8_t>(2 * line + i / 8 % 2);
    }
  }
  return made;
}

constexpr ScaleOrder kScaleOrder = make_scale_order();

//! Wide rows to BF16. The constants are made once: GCC would make some for each row anew.
class WideConversion {
 public:
  ENGRAM_INLINE_GFNI WideConversion()
      : unpack_order_(keep(_mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7))),
        roll_(keep(_mm512_set1_epi64(bit_matrix({7, 0, 1, 2, 3, 4, 5, 6})))),
        field_bits_(keep(_mm512_set1_epi64(bit_matrix({4, 5, 6, 7, -1, -1, -1, -1})))),
        mantissa_bits_(keep(_mm512_set1_epi64(bit_matrix({0, -1, -1, -1, -1, 1, 2, 3})))),
        subnormal_fields_(keep(each_lane(kSubnormals.fields))),
        subnormal_mantissas_(keep(each_lane(kSubnormals.mantissas))),
        exponent_bits_(keep(bytes_of(0xF0))),
        unscaled_(keep(bytes_of(kUnscaled))),
        highest_scale_(keep(bytes_of(kHighestNormalScale))),
        odd_scale_(keep(bytes_of(kRolledNan - kNumNormalScales))),
        nan_(keep(bytes_of(kRolledNan))) {}

  //! False, and nothing converted, where a value is NaN or a scale not normal.
  ENGRAM_INLINE_GFNI bool convert(const Row& row, __m512i* out) const {
    const __m512i scales = _mm512_set1_epi64(scales_of(row));
    const __m512i below_highest = _mm512_sub_epi8(highest_scale_, scales);
    __m512i largest = _mm512_adds_epu8(below_highest, odd_scale_);
    __m512i rolled[kWideRowLines];
    for (int i = 0; i < kWideRowLines; ++i) {
      const __m512i bytes = _mm512_loadu_si512(row.values + i * kCacheLine);
      const __m512i ordered = _mm512_maskz_permutexvar_epi64(0xFF, unpack_order_, bytes);
      rolled[i] = _mm512_gf2p8affine_epi64_epi8(ordered, roll_, 0);
      largest = _mm512_max_epu8(largest, rolled[i]);
    }
    if (_mm512_cmpge_epu8_mask(largest, nan_) != 0) return false;

    const __m512i lowered_by = _mm512_sub_epi8(unscaled_, scales);
    for (int i = 0; i < kWideRowLines; ++i) {
      const __mmask64 subnormal = _mm512_testn_epi8_mask(rolled[i], exponent_bits_);
      __m512i field = _mm512_gf2p8affine_epi64_epi8(rolled[i], field_bits_, kFieldBase);
      field = _mm512_mask_shuffle_epi8(field, subnormal, subnormal_fields_, rolled[i]);
      __m512i mantissa = _mm512_gf2p8affine_epi64_epi8(rolled[i], mantissa_bits_, 0);
      mantissa = _mm512_mask_shuffle_epi8(mantissa, subnormal, subnormal_mantissas_, rolled[i]);
      const __m512i order = _mm512_load_si512(kScaleOrder.lines[i]);
      const __m512i exponent = _mm512_subs_epu8(field, _mm512_shuffle_epi8(lowered_by, order));
      const __m512i low = _mm512_unpacklo_epi8(mantissa, exponent);
      const __m512i high = _mm512_unpackhi_epi8(mantissa, exponent);
      out[2 * i] = _mm512_shrdi_epi16(low, low, 1);
      out[2 * i + 1] = _mm512_shrdi_epi16(high, high, 1);
    }
    return true;
  }

 private:
  static constexpr int kNumNormalScales = kHighestNormalScale - kLowestNormalScale + 1;

  static ENGRAM_INLINE_GFNI __m512i keep(__m512i constant) {
    asm("" : "+v"(constant));
    return constant;
  }

  __m512i unpack_order_;
  __m512i roll_;
  __m512i field_bits_;
  __m512i mantissa_bits_;
  __m512i subnormal_fields_;
  __m512i subnormal_mantissas_;
  __m512i exponent_bits_;
  __m512i unscaled_;
  __m512i highest_scale_;
  __m512i odd_scale_;
  __m512i nan_;
};

}  // namespace engram
#endif
