// SPDX-License-Identifier: Apache-2.0
// The ceilings that lookups are measured against: every byte of random blocks read once, and
// nothing else or only as many bytes written as a lookup writes.
#include <atomic>
#include <cstring>

#include "bench/read_blocks.h"
#include "cache_line.h"
#include "engram/row.h"
#include "multiversion.h"
#include "parallel.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace engram {
namespace {

constexpr int64_t kBlocksPerRange = 4096;  // they fill whole lines, however few bytes for each
constexpr int64_t kBlocksAhead = 32;
constexpr int64_t kPagesAhead = 64;  // a block's first line waits for its page, the rest no more

struct Blocks {
  const uint8_t* base;
  const int64_t* ids;
  int32_t bytes;

  ENGRAM_HOST_DEVICE const uint8_t* at(int64_t i) const { return base + row_offset(ids[i], bytes); }
};

//! Blocks [begin, end) in order.
class BlockReader {
 public:
  ENGRAM_HOST_DEVICE BlockReader(const Blocks& blocks, int64_t begin, int64_t end)
      : blocks_(blocks), end_(end), lines_end_(blocks.bytes + bytes_into_line(blocks.base)) {
    for (int64_t i = begin; i < begin + kPagesAhead; ++i) prefetch(i, 0, kCacheLine);
    for (int64_t i = begin; i < begin + kBlocksAhead; ++i) prefetch(i, kCacheLine, lines_end_);
  }

  //! The sum of block i, which follows the one before.
  ENGRAM_HOST_DEVICE uint64_t read(int64_t i) const {
    prefetch(i + kPagesAhead, 0, kCacheLine);
    prefetch(i + kBlocksAhead, kCacheLine, lines_end_);
    const uint8_t* const block = blocks_.at(i);
    uint64_t sum = 0;
    int32_t at = 0;
    for (; at + 8 <= blocks_.bytes; at += 8) {
      uint64_t word;
      memcpy(&word, block + at, sizeof(word));
      sum += word;
    }
    for (; at < blocks_.bytes; ++at) sum += block[at];
    return sum;
  }

 private:
  ENGRAM_HOST_DEVICE void prefetch(int64_t i, int32_t from, int32_t to) const {
    if (i >= end_) return;
    const uint8_t* const block = blocks_.at(i);
    for (int32_t at = from; at < to; at += kCacheLine) __builtin_prefetch(block + at, 0, 2);
  }

  const Blocks blocks_;
  int64_t end_;
  int32_t lines_end_;  // of a block
};

//! Fills whole lines [from, to) with a word, past the caches.
using FillLines = void (*)(uint8_t* from, const uint8_t* to, uint64_t word);

#if defined(__x86_64__)
void fill_lines(uint8_t* from, const uint8_t* to, uint64_t word) {
  const __m128i words = _mm_set1_epi64x(static_cast<int64_t>(word));
  for (; from < to; from += sizeof(words)) {
    _mm_stream_si128(reinterpret_cast<__m128i*>(from), words);
  }
}

ENGRAM_TARGET_AVX512 void fill_lines_avx512(uint8_t* from, const uint8_t* to, uint64_t word) {
  const __m512i words = _mm512_set1_epi64(static_cast<int64_t>(word));
  for (; from < to; from += sizeof(words)) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(from), words);
  }
}

FillLines fastest_fill_lines() { return has_avx512() ? fill_lines_avx512 : fill_lines; }
#else
void fill_lines(uint8_t* from, const uint8_t* to, uint64_t word) {
  for (; from < to; from += sizeof(word)) memcpy(from, &word, sizeof(word));
}

FillLines fastest_fill_lines() { return fill_lines; }
#endif

//! Where lines are filled while blocks are read, so many bytes for each.
struct Lines {
  uint8_t* out;
  int32_t bytes_per_block;
  FillLines fill;

  ENGRAM_HOST_DEVICE uint8_t* end_of_blocks(int64_t num_blocks) const {
    const int64_t bytes = row_offset(num_blocks, bytes_per_block);
    return out + bytes / kCacheLine * kCacheLine;
  }
};

struct ReadRange {
  static ENGRAM_HOST_DEVICE void run(const Blocks& blocks, const Lines& lines, int64_t begin,
                                     int64_t end, uint64_t* sum) {
    constexpr int32_t kUsualBytes = 256;  // known to the compiler, they take a seventh less time
    *sum = blocks.bytes == kUsualBytes
               ? read({blocks.base, blocks.ids, kUsualBytes}, lines, begin, end)
               : read(blocks, lines, begin, end);
  }

 private:
  static ENGRAM_HOST_DEVICE uint64_t read(const Blocks& blocks, const Lines& lines, int64_t begin,
                                          int64_t end) {
    const BlockReader reader(blocks, begin, end);
    uint64_t sum = 0;
    uint8_t* filled = lines.end_of_blocks(begin);
    for (int64_t i = begin; i < end; ++i) {
      sum += reader.read(i);
      uint8_t* const there = lines.end_of_blocks(i + 1);
      if (filled < there) lines.fill(filled, there, sum);
      filled = there;
    }
    return sum;
  }
};

}  // namespace

uint64_t read_blocks_cpu(const uint8_t* base, const int64_t* block_ids, int64_t num_blocks,
                         int32_t block_bytes, uint8_t* out, int32_t out_bytes_per_block,
                         int32_t num_threads) {
  const Blocks blocks{base, block_ids, block_bytes};
  const Lines lines{out, out_bytes_per_block, fastest_fill_lines()};
  std::atomic<uint64_t> checksum{0};
  parallel_for(num_blocks, kBlocksPerRange, num_threads, [&](int64_t begin, int64_t end) {
    uint64_t sum = 0;
    run_widest<ReadRange>(blocks, lines, begin, end, &sum);
    checksum += sum;
#if defined(__x86_64__)
    _mm_sfence();  // lines are seen before the thread says it is done
#endif
  });
  return checksum;
}

}  // namespace engram
