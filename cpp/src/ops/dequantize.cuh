// SPDX-License-Identifier: Apache-2.0
//! \file dequantize.cuh
//! bf16_from_fp8 (row.h) for four and for eight values at once, bit for bit.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "engram/row.h"

namespace engram {

__device__ __forceinline__ uint32_t multiply_bf16x2(uint32_t a, uint32_t b) {
  const __nv_bfloat162 product = __hmul2_rn(reinterpret_cast<const __nv_bfloat162&>(a),
                                            reinterpret_cast<const __nv_bfloat162&>(b));
  return reinterpret_cast<const uint32_t&>(product);
}

constexpr uint32_t kTwoTo120Pair = 0x7B807B80u;
constexpr int kMaxFoldedScale = 134;  //!< 2^(134-7) is BF16's largest power of two

//! 2^120 * 2^(scale-127) as a pair, for scales up to kMaxFoldedScale.
__device__ __forceinline__ uint32_t folded_factor_pair(uint8_t scale) {
  return (scale + 120u) * 0x00800080u;
}

constexpr uint32_t kLowPair = 0x1404;   //!< bytes 0 and 1 to the high bytes of two halves
constexpr uint32_t kHighPair = 0x3424;  //!< bytes 2 and 3

//! Two FP8 values, the two bytes of `values` that `selector` picks, times 2^-120: sign, exponent
//! and mantissa moved to BF16's places read so, for FP8 subnormals (BF16 subnormals there) too.
__device__ __forceinline__ uint32_t moved_pair(uint32_t values, uint32_t selector) {
  const uint32_t high_bytes = __byte_perm(values, 0, selector);
  return (high_bytes & 0x80008000u) | ((high_bytes >> 4) & 0x07F007F0u);
}

//! The pair times 2^(scale-127). Times 2^120 the moved pair is exact, so the second product is the
//! only one that rounds: once, to nearest even, BF16 subnormals kept, overflow infinite, -0 kept.
__device__ __forceinline__ uint32_t scaled_pair(uint32_t values, uint32_t selector,
                                                uint32_t scale_pair) {
  return multiply_bf16x2(multiply_bf16x2(moved_pair(values, selector), kTwoTo120Pair), scale_pair);
}

//! The top bit of each byte that is an FP8 NaN: magnitude 0x7F alone carries into it.
__device__ __forceinline__ uint32_t fp8_nan_bits(uint32_t values) {
  return ((values & 0x7F7F7F7Fu) + 0x01010101u) & 0x80808080u;
}

//! 0xFFFF for each of the pair's two values that `nan_bytes` marks by its byte's top bit.
__device__ __forceinline__ uint32_t nan_pair(uint32_t nan_bytes, uint32_t selector) {
  return ((__byte_perm(nan_bytes, 0, selector) >> 15) & 0x00010001u) * 0xFFFFu;
}

//! The four FP8 bytes of `values`, lowest first, times 2^(scale-127), as four BF16.
__device__ __forceinline__ uint2 bf16x4_from_fp8(uint32_t values, uint8_t scale) {
  constexpr uint32_t kNanPair = 0x7FFF7FFFu;
  constexpr uint32_t kTwoToMinus127 = 0x0040;  // a BF16 subnormal
  const uint32_t scale_bits = scale == 0 ? kTwoToMinus127 : static_cast<uint32_t>(scale) << 7;
  const uint32_t scale_pair = scale_bits << 16 | scale_bits;
  uint2 result = {scaled_pair(values, kLowPair, scale_pair),
                  scaled_pair(values, kHighPair, scale_pair)};

  const uint32_t nan_bytes = scale == kE8m0Nan ? 0x80808080u : fp8_nan_bits(values);
  if (nan_bytes != 0) {
    const uint32_t low = nan_pair(nan_bytes, kLowPair);
    const uint32_t high = nan_pair(nan_bytes, kHighPair);
    result.x = (result.x & ~low) | (kNanPair & low);
    result.y = (result.y & ~high) | (kNanPair & high);
  }
  return result;
}

//! The eight FP8 bytes of `values`, lowest first, times 2^(scale-127), as eight BF16. Scales up to
//! 2^7 go into one product with the 2^120, 2^(scale-7) in all: half the work, rounded once too.
__device__ __forceinline__ uint4 bf16x8_from_fp8(uint2 values, uint8_t scale) {
  if (scale > kMaxFoldedScale || (fp8_nan_bits(values.x) | fp8_nan_bits(values.y)) != 0) {
    const uint2 low = bf16x4_from_fp8(values.x, scale);
    const uint2 high = bf16x4_from_fp8(values.y, scale);
    return make_uint4(low.x, low.y, high.x, high.y);
  }
  const uint32_t factor_pair = folded_factor_pair(scale);
  return make_uint4(multiply_bf16x2(moved_pair(values.x, kLowPair), factor_pair),
                    multiply_bf16x2(moved_pair(values.x, kHighPair), factor_pair),
                    multiply_bf16x2(moved_pair(values.y, kLowPair), factor_pair),
                    multiply_bf16x2(moved_pair(values.y, kHighPair), factor_pair));
}

}  // namespace engram
