// SPDX-License-Identifier: Apache-2.0
//! \file dequantize.cuh
//! bf16_from_fp8 (row.h) for four values at once, bit for bit.
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

//! Two FP8 values, the two bytes of `values` that `selector` picks, times 2^(scale-127).
//! Sign, exponent and mantissa moved to BF16's places read as value * 2^-120, for FP8 subnormals
//! (BF16 subnormals there) too. Times 2^120 that is exact, so the second product is the only one
//! that rounds: once, to nearest even, BF16 subnormals kept, overflow infinite, -0 kept.
__device__ __forceinline__ uint32_t scaled_pair(uint32_t values, uint32_t selector,
                                                uint32_t scale_pair) {
  constexpr uint32_t kTwoTo120 = 0x7B807B80u;
  const uint32_t high_bytes = __byte_perm(values, 0, selector);
  const uint32_t moved = (high_bytes & 0x80008000u) | ((high_bytes >> 4) & 0x07F007F0u);
  return multiply_bf16x2(multiply_bf16x2(moved, kTwoTo120), scale_pair);
}

//! 0xFFFF for each of the pair's two values that `nan_bytes` marks by its byte's top bit.
__device__ __forceinline__ uint32_t nan_pair(uint32_t nan_bytes, uint32_t selector) {
  return ((__byte_perm(nan_bytes, 0, selector) >> 15) & 0x00010001u) * 0xFFFFu;
}

//! The four FP8 bytes of `values`, lowest first, times 2^(scale-127), as four BF16.
__device__ __forceinline__ uint2 bf16x4_from_fp8(uint32_t values, uint8_t scale) {
  constexpr uint32_t kLowPair = 0x1404;   // bytes 0 and 1 to the high bytes of the two halves
  constexpr uint32_t kHighPair = 0x3424;  // bytes 2 and 3
  constexpr uint32_t kNanPair = 0x7FFF7FFFu;
  constexpr uint32_t kTwoToMinus127 = 0x0040;  // a BF16 subnormal
  const uint32_t scale_bits = scale == 0 ? kTwoToMinus127 : static_cast<uint32_t>(scale) << 7;
  const uint32_t scale_pair = scale_bits << 16 | scale_bits;
  uint2 result = {scaled_pair(values, kLowPair, scale_pair),
                  scaled_pair(values, kHighPair, scale_pair)};

  // Magnitude 0x7F is the only one that carries into the top bit.
  const uint32_t nan_bytes =
      scale == kE8m0Nan ? 0x80808080u : ((values & 0x7F7F7F7Fu) + 0x01010101u) & 0x80808080u;
  if (nan_bytes != 0) {
    const uint32_t low = nan_pair(nan_bytes, kLowPair);
    const uint32_t high = nan_pair(nan_bytes, kHighPair);
    result.x = (result.x & ~low) | (kNanPair & low);
    result.y = (result.y & ~high) | (kNanPair & high);
  }
  return result;
}

}  // namespace engram
