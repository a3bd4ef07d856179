// SPDX-License-Identifier: Apache-2.0
// The ceiling that lookups are measured against: every byte of random blocks read once, and nothing
// else.
#include <atomic>
#include <cstring>

#include "bench/read_blocks.h"
#include "cache_line.h"
#include "engram/row.h"
#include "multiversion.h"
#include "parallel.h"

namespace engram {
namespace {

constexpr int64_t kBlocksPerRange = 4096;
constexpr int64_t kBlocksAhead = 32;
constexpr int64_t kPagesAhead = 64;  // a block's first line waits for its page, the rest no more

struct Blocks {
  const uint8_t* base;
  const int64_t* ids;
  int32_t bytes;

  ENGRAM_HOST_DEVICE const uint8_t* at(int64_t i) const { return base + row_offset(ids[i], bytes); }
};

struct ReadRange {
  static ENGRAM_HOST_DEVICE void run(const Blocks& blocks, int64_t begin, int64_t end,
                                     uint64_t* sum) {
    constexpr int32_t kUsualBytes = 256;  // known to the compiler, they take a seventh less time
    *sum = blocks.bytes == kUsualBytes ? read({blocks.base, blocks.ids, kUsualBytes}, begin, end)
                                       : read(blocks, begin, end);
  }

 private:
  static ENGRAM_HOST_DEVICE uint64_t read(const Blocks& blocks, int64_t begin, int64_t end) {
    const int32_t lines_end = blocks.bytes + bytes_into_line(blocks.base);
    uint64_t sum = 0;
    for (int64_t i = begin - kPagesAhead; i < end; ++i) {
      prefetch(blocks, i + kPagesAhead, end, 0, kCacheLine);
      if (i + kBlocksAhead >= begin) {
        prefetch(blocks, i + kBlocksAhead, end, kCacheLine, lines_end);
      }
      if (i >= begin) sum += sum_block(blocks.at(i), blocks.bytes);
    }
    return sum;
  }

  static ENGRAM_HOST_DEVICE void prefetch(const Blocks& blocks, int64_t i, int64_t end,
                                          int32_t from, int32_t to) {
    if (i >= end) return;
    const uint8_t* const block = blocks.at(i);
    for (int32_t at = from; at < to; at += kCacheLine) {
      __builtin_prefetch(block + at, 0, 2);
    }
  }

  static ENGRAM_HOST_DEVICE uint64_t sum_block(const uint8_t* block, int32_t bytes) {
    uint64_t sum = 0;
    int32_t at = 0;
    for (; at + 8 <= bytes; at += 8) {
      uint64_t word;
      memcpy(&word, block + at, sizeof(word));
      sum += word;
    }
    for (; at < bytes; ++at) sum += block[at];
    return sum;
  }
};

}  // namespace

uint64_t read_blocks_cpu(const uint8_t* base, const int64_t* block_ids, int64_t num_blocks,
                         int32_t block_bytes, int32_t num_threads) {
  const Blocks blocks{base, block_ids, block_bytes};
  std::atomic<uint64_t> checksum{0};
  parallel_for(num_blocks, kBlocksPerRange, num_threads, [&](int64_t begin, int64_t end) {
    uint64_t sum = 0;
    run_widest<ReadRange>(blocks, begin, end, &sum);
    checksum += sum;
  });
  return checksum;
}

}  // namespace engram
