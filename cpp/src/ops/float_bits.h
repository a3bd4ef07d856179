// SPDX-License-Identifier: Apache-2.0
//! \file float_bits.h
//! BF16 and FP16 bits to and from float, for CPU and GPU alike: nearest even, subnormals kept,
//! every NaN written as 0x7FFF. Branch-free and free of FP32 subnormals, so that a loop over them
//! becomes vector code and a host process that flushes subnormals gets the same bits.
#pragma once

#include <cstdint>
#include <cstring>

#include "engram/row.h"

#if defined(__CUDACC__)
#include <cuda_fp16.h>
#endif

namespace engram {

constexpr uint16_t kFp16Nan = 0x7FFF;  //!< every NaN is written as this one

ENGRAM_HOST_DEVICE float float_from_bits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

ENGRAM_HOST_DEVICE uint32_t bits_from_float(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  return bits;
}

//! yes or no, as masks: of two arms the compiler computes one late, and no loop over that is vector
//! code.
ENGRAM_HOST_DEVICE uint32_t select_bits(bool condition, uint32_t yes, uint32_t no) {
  const uint32_t mask = condition ? ~0u : 0u;
  return (yes & mask) | (no & ~mask);
}

ENGRAM_HOST_DEVICE float float_from_bf16(uint16_t bits) {
  return float_from_bits(static_cast<uint32_t>(bits) << 16);
}

ENGRAM_HOST_DEVICE uint16_t bf16_from_float(float value) {
  const uint32_t bits = bits_from_float(value);
  const uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  return static_cast<uint16_t>((bits & 0x7FFFFFFFu) > 0x7F800000u ? kBf16Nan : rounded);
}

ENGRAM_HOST_DEVICE float float_from_fp16(uint16_t bits) {
#if defined(__CUDA_ARCH__)
  return __half2float(__ushort_as_half(bits));
#else
  const uint32_t sign = (bits & 0x8000u) << 16;
  const uint32_t magnitude = bits & 0x7FFFu;
  const uint32_t rebias = 112u << 23;  // exponent bias 15 to 127
  const uint32_t subnormal =
      bits_from_float(static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-24f);
  const uint32_t normal = (magnitude << 13) + rebias + (magnitude >= 0x7C00u ? rebias : 0u);
  return float_from_bits(sign | select_bits(magnitude < 0x0400u, subnormal, normal));
#endif
}

ENGRAM_HOST_DEVICE uint16_t fp16_from_float(float value) {
#if defined(__CUDA_ARCH__)
  return value != value ? kFp16Nan : __half_as_ushort(__float2half_rn(value));
#else
  const uint32_t bits = bits_from_float(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  const uint32_t rebased = magnitude - (112u << 23);
  const uint32_t normal = (rebased + 0x0FFFu + ((rebased >> 13) & 1u)) >> 13;
  // One ulp of 0.5 is one FP16 subnormal step, so the addition does the rounding.
  const uint32_t subnormal = bits_from_float(float_from_bits(magnitude) + 0.5f) - 0x3F000000u;
  const uint32_t in_range = select_bits(magnitude < 0x38800000u, subnormal, normal);  // 2^-14
  const uint32_t finite = select_bits(magnitude >= 0x47800000u, 0x7C00u, in_range);   // 2^16
  const bool is_nan = magnitude > 0x7F800000u;
  return static_cast<uint16_t>(select_bits(is_nan, kFp16Nan, sign | finite));
#endif
}

}  // namespace engram
