// SPDX-License-Identifier: Apache-2.0
//! \file multiversion_streams.h
//! Bytes to memory one after the other, by lines of 64 bytes and words of 8.
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "multiversion.h"

namespace engram {

//! Bytes one after the other into the caches.
class CachedStream {
 public:
  ENGRAM_INLINE_GFNI explicit CachedStream(uint8_t* to) : to_(to) {}

  ENGRAM_INLINE_GFNI void put(__m512i line) {
    _mm512_storeu_si512(to_, line);
    to_ += sizeof(line);
  }
  ENGRAM_INLINE_GFNI void put(int64_t word) {
    memcpy(to_, &word, sizeof(word));
    to_ += sizeof(word);
  }
  ENGRAM_INLINE_GFNI void finish() {}

 private:
  uint8_t* to_;
};

//! Lines one after the other past the caches, from the start of one on.
class AlignedLineStream {
 public:
  ENGRAM_INLINE_GFNI explicit AlignedLineStream(uint8_t* to)
      : to_(reinterpret_cast<__m512i*>(to)) {}

  ENGRAM_INLINE_GFNI void put(__m512i line) { _mm512_stream_si512(to_++, line); }
  ENGRAM_INLINE_GFNI void finish() {
    _mm_sfence();  // lines are seen before the thread says it is done
  }

 private:
  __m512i* to_;
};

//! Bytes one after the other past the caches, in whole lines, from any word on. The first and the
//! last line may be another range's as well, which writes its own words of them.
class LineStream {
 public:
  ENGRAM_INLINE_GFNI explicit LineStream(uint8_t* to)
      : num_pending_(static_cast<int>(reinterpret_cast<uintptr_t>(to) % kLine) / kWord),
        num_foreign_(num_pending_),
        line_(to - num_pending_ * kWord),
        pending_(_mm512_setzero_si512()),
        order_(_mm512_sub_epi64(_mm512_setr_epi64(8, 9, 10, 11, 12, 13, 14, 15),
                                _mm512_set1_epi64(num_pending_))) {}

  ENGRAM_INLINE_GFNI void put(__m512i line) {
    write(_mm512_permutex2var_epi64(pending_, order_, line));
    pending_ = line;
  }
  ENGRAM_INLINE_GFNI void put(int64_t word) {
    const __m512i moved = _mm512_maskz_alignr_epi64(0xFF, pending_, pending_, 1);
    pending_ = _mm512_mask_set1_epi64(moved, 0x80, word);
    order_ = _mm512_sub_epi64(order_, _mm512_set1_epi64(1));
    if (++num_pending_ < kWords) return;
    num_pending_ = 0;
    order_ = _mm512_add_epi64(order_, _mm512_set1_epi64(kWords));
    write(pending_);
  }
  ENGRAM_INLINE_GFNI void finish() {
    const int words = (1 << num_pending_) - (1 << num_foreign_);
    _mm512_mask_storeu_epi64(line_, static_cast<__mmask8>(words),
                             _mm512_maskz_permutexvar_epi64(0xFF, order_, pending_));
    _mm_sfence();  // lines are seen before the thread says it is done
  }

 private:
  static constexpr int kWord = sizeof(int64_t);
  static constexpr int kLine = sizeof(__m512i);
  static constexpr int kWords = kLine / kWord;

  ENGRAM_INLINE_GFNI void write(__m512i line) {
    if (num_foreign_ == 0) {
      _mm512_stream_si512(reinterpret_cast<__m512i*>(line_), line);
    } else {
      _mm512_mask_storeu_epi64(line_, static_cast<__mmask8>(-(1 << num_foreign_)), line);
      num_foreign_ = 0;
    }
    line_ += kLine;
  }

  int num_pending_;  // words of the line that are not written, with the foreign ones
  int num_foreign_;  // words at the start of the line that are not this stream's
  uint8_t* line_;
  __m512i pending_;  // ends with the pending words
  __m512i order_;    // the pending words, then what is new
};

}  // namespace engram
#endif
