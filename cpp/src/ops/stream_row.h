// SPDX-License-Identifier: Apache-2.0
//! \file stream_row.h
//! Rows on their way through a CPU to somebody else's reads: past its caches.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace engram {

//! num_bytes, a multiple of 32, to a place that is aligned to 16.
inline void stream_row(const uint8_t* from, int num_bytes, uint8_t* to) {
#if defined(__x86_64__)
  for (int i = 0; i < num_bytes; i += int{sizeof(__m128i)}) {
    _mm_stream_si128(reinterpret_cast<__m128i*>(to + i),
                     _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i)));
  }
#else
  std::memcpy(to, from, static_cast<size_t>(num_bytes));
#endif
}

//! What this thread has streamed is seen before what it stores from here on.
inline void finish_streamed_rows() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

}  // namespace engram
