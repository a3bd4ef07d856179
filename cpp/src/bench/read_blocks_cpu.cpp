// SPDX-License-Identifier: Apache-2.0
// The ceiling that lookups are measured against: every byte of random blocks read once, and nothing
// else.
#include <algorithm>
#include <atomic>
#include <cstring>

#include "bench/read_blocks.h"
#include "engram/row.h"
#include "multiversion.h"
#include "parallel.h"

namespace engram {
namespace {

constexpr int64_t kBlocksPerRange = 4096;
constexpr int64_t kBlocksAhead = 32;
constexpr int kCacheLine = 64;

struct Blocks {
  const uint8_t* base;
  const int64_t* ids;
  int32_t bytes;

  ENGRAM_HOST_DEVICE const uint8_t* at(int64_t i) const { return base + row_offset(ids[i], bytes); }
};

ENGRAM_HOST_DEVICE void prefetch_block(const uint8_t* block, int32_t bytes) {
  for (int32_t i = 0; i < bytes; i += kCacheLine) __builtin_prefetch(block + i, 0, 2);
}

struct ReadRange {
  static ENGRAM_HOST_DEVICE void run(const Blocks& blocks, int64_t begin, int64_t end,
                                     uint64_t* sum) {
    const int64_t warm = std::min(begin + kBlocksAhead, end);
    for (int64_t i = begin; i < warm; ++i) prefetch_block(blocks.at(i), blocks.bytes);
    uint64_t range_sum = 0;
    for (int64_t i = begin; i < end; ++i) {
      if (i + kBlocksAhead < end) prefetch_block(blocks.at(i + kBlocksAhead), blocks.bytes);
      const uint8_t* const block = blocks.at(i);
      int32_t at = 0;
      for (; at + 8 <= blocks.bytes; at += 8) {
        uint64_t word;
        memcpy(&word, block + at, sizeof(word));
        range_sum += word;
      }
      for (; at < blocks.bytes; ++at) range_sum += block[at];
    }
    *sum = range_sum;
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
