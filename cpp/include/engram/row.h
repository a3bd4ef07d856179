// SPDX-License-Identifier: Apache-2.0
//! \file row.h
//! The row format of V4.1's tables and its arithmetic, for CPU and GPU alike. This file and
//! layout.h are the only ones that know what is particular to the model.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define ENGRAM_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define ENGRAM_HOST_DEVICE inline __attribute__((always_inline))
#endif

namespace engram {

constexpr int kScaleBlock = 32;  //!< values that share one E8M0 scale; weights use 32x32 blocks
constexpr uint16_t kBf16Nan = 0x7FFF;  //!< every NaN is written as this one
constexpr uint16_t kBf16Inf = 0x7F80;
constexpr uint8_t kFp8NanMagnitude = 0x7F;
constexpr uint8_t kE8m0Nan = 0xFF;
constexpr int kStageTileRows = 128;  //!< F8_128x4: rows of a scale tile
constexpr int kStageTileScales = 4;  //!< F8_128x4: scales of a scale tile
constexpr int kStageTileBytes = kStageTileRows * kStageTileScales;

//! Byte (or element) offset of a row. The one place where a row index is multiplied: a 32-bit
//! product overflows at row 8.4 million of 256 bytes.
ENGRAM_HOST_DEVICE int64_t row_offset(int64_t row, int64_t row_size) { return row * row_size; }

ENGRAM_HOST_DEVICE constexpr int scales_per_row(int head_dim) { return head_dim / kScaleBlock; }
ENGRAM_HOST_DEVICE constexpr int packed_row_bytes(int head_dim) {
  return head_dim + scales_per_row(head_dim);
}
ENGRAM_HOST_DEVICE constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

//! Bytes of a scale array of num_rows x num_scales in F8_128x4 order.
ENGRAM_HOST_DEVICE int64_t staged_scale_bytes(int64_t num_rows, int64_t num_scales) {
  return ceil_div(num_rows, kStageTileRows) * ceil_div(num_scales, kStageTileScales) *
         kStageTileBytes;
}

//! Offset of scale s of row r in F8_128x4 order, the layout that cuBLAS and CUTLASS read block
//! scales in.
ENGRAM_HOST_DEVICE int64_t staged_scale_offset(int64_t r, int64_t s, int64_t num_scales) {
  const int64_t tile =
      r / kStageTileRows * ceil_div(num_scales, kStageTileScales) + s / kStageTileScales;
  return tile * kStageTileBytes + r % 32 * 16 + r % kStageTileRows / 32 * 4 + s % kStageTileScales;
}

//! FP8 E4M3 bits times 2^(scale-127) as BF16 bits: exact value, rounded once to nearest even,
//! subnormals kept, overflow infinity, NaN (0x7F, 0xFF, scale 255) as kBf16Nan. Integers only, so
//! every compiler and GPU gives the same bits.
ENGRAM_HOST_DEVICE uint16_t bf16_from_fp8(uint8_t value, uint8_t scale) {
  const uint32_t sign = (value & 0x80u) << 8;
  const uint32_t magnitude = value & 0x7Fu;
  if (magnitude == kFp8NanMagnitude || scale == kE8m0Nan) return kBf16Nan;
  if (magnitude == 0) return static_cast<uint16_t>(sign);
  // magnitude = significand * 2^(exponent - 10), normalised to 8 <= significand < 16.
  int exponent = static_cast<int>(magnitude >> 3);
  uint32_t significand = magnitude & 7u;
  if (exponent == 0) {
    exponent = 1;
    while (significand < 8) {
      significand <<= 1;
      --exponent;
    }
  } else {
    significand |= 8u;
  }
  // Leading bit is 2^(exponent-7): BF16's biased exponent is exponent - 7 + 127 + (scale - 127).
  const int biased = exponent - 7 + static_cast<int>(scale);
  if (biased >= 255) return static_cast<uint16_t>(sign | kBf16Inf);
  if (biased > 0)
    return static_cast<uint16_t>(sign | (static_cast<uint32_t>(biased) << 7) |
                                 ((significand & 7u) << 4));
  // Subnormal: significand << 4 is 1.mmmmmmm at biased exponent 1; shift right by 1 - biased, to
  // nearest even.
  const int shift = 1 - biased;
  if (shift > 9) return static_cast<uint16_t>(sign);
  const uint32_t wide = significand << 4;
  const uint32_t kept = wide >> shift;
  const uint32_t lost = wide & ((1u << shift) - 1u);
  const uint32_t half = 1u << (shift - 1);
  const uint32_t up = (lost > half || (lost == half && (kept & 1u))) ? 1u : 0u;
  return static_cast<uint16_t>(sign | (kept + up));
}

//! Scales for which bf16_from_fp8_normal is exact for every FP8 value: no result is subnormal or
//! infinite.
constexpr uint8_t kLowestNormalScale = 10;
constexpr uint8_t kHighestNormalScale = 246;

ENGRAM_HOST_DEVICE bool is_normal_scale(uint8_t scale) {
  return scale >= kLowestNormalScale && scale <= kHighestNormalScale;
}

ENGRAM_HOST_DEVICE constexpr uint16_t smaller(uint16_t a, uint16_t b) { return b < a ? b : a; }

//! bf16_from_fp8 for a scale with is_normal_scale(), without branches: a loop over it becomes
//! vector code (value is wide for that reason). As a function of the magnitude m the BF16 bits run
//! along four lines: slope 16 for normal FP8 values, 32, 64 and 128 for subnormals, whose leading
//! bit is 4, 2 or 1. Each is the lowest one where it counts.
ENGRAM_HOST_DEVICE constexpr uint16_t bf16_from_fp8_normal(uint16_t value, uint8_t scale) {
  const uint16_t m = value & 0x7F;
  const uint16_t normal = static_cast<uint16_t>((m << 4) + 384);
  const uint16_t four = static_cast<uint16_t>((m << 5) + 256);
  const uint16_t two = static_cast<uint16_t>((m << 6) + 128);
  const uint16_t one = static_cast<uint16_t>(m << 7);
  const uint16_t lowest = smaller(smaller(one, two), smaller(four, normal));
  const uint16_t scaled = static_cast<uint16_t>(lowest + ((scale - kLowestNormalScale) << 7));
  const uint16_t magnitude = lowest == 0 ? uint16_t{0} : scaled;
  const uint16_t nan = (kFp8NanMagnitude << 4) + 384;
  return lowest == nan ? kBf16Nan : static_cast<uint16_t>(magnitude | (value & 0x80) << 8);
}

}  // namespace engram
