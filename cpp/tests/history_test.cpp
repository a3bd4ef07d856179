// SPDX-License-Identifier: Apache-2.0
// history_cpu: where slots lie, and what is refused. tests/test_history.py runs it in a whole
// cache.
#include "engram/history.h"

#include <string>
#include <vector>

#include "doctest/doctest.h"
#include "engram/error.h"
#include "engram/ops.h"
#include "texts.h"

namespace engram {
namespace {

constexpr int kBlocks = 8, kPerBlock = 4, kSlotBytes = 16, kMaxBlocks = 3, kOrder = 4;
constexpr int32_t kSecondary = INT32_MIN;
constexpr int32_t kNoBlock = INT32_MAX;

//! A chunk of a prompt and two generation steps, of one token each unless `drafts` more.
struct HistoryCase {
  std::vector<uint8_t> primary = std::vector<uint8_t>(kBlocks * kPerBlock * kSlotBytes, 0xAB);
  std::vector<uint8_t> secondary = primary;
  std::vector<int32_t> offsets, sequence_lengths, context_lengths, token_ids, positions, cu_seqlens,
      lookback;
  int num_contexts = 1, num_context_tokens = 5;

  //! Block offsets of each request, and its tokens' number before and in the call.
  void add(const std::vector<int32_t>& blocks, int before, const std::vector<int32_t>& tokens,
           int context_length) {
    for (int field = 0; field < 2; ++field) {
      for (int i = 0; i < kMaxBlocks; ++i) {
        const auto index = static_cast<size_t>(i);
        const int32_t block = index < blocks.size() ? blocks[index] : kNoBlock;
        offsets.push_back(block == kNoBlock ? kNoBlock : block + field);
      }
    }
    sequence_lengths.push_back(before + static_cast<int>(tokens.size()));
    context_lengths.push_back(context_length);
    token_ids.insert(token_ids.end(), tokens.begin(), tokens.end());
    positions.assign(token_ids.size(), -9);
    cu_seqlens.assign(sequence_lengths.size() + 1, -9);
    lookback.assign(sequence_lengths.size() * (kOrder - 1), -9);
  }

  engram_history_args args() {
    return {.primary_pool = primary.data(),
            .secondary_pool = secondary.data(),
            .block_offsets = offsets.data(),
            .sequence_lengths = sequence_lengths.data(),
            .context_lengths = context_lengths.data(),
            .cache_indirection = nullptr,
            .token_ids = token_ids.data(),
            .positions = positions.data(),
            .cu_seqlens = cu_seqlens.data(),
            .lookback_ids = lookback.data(),
            .num_tokens = static_cast<int64_t>(token_ids.size()),
            .num_requests = static_cast<int32_t>(sequence_lengths.size()),
            .num_contexts = num_contexts,
            .num_context_tokens = num_context_tokens,
            .max_blocks = kMaxBlocks,
            .tokens_per_block = kPerBlock,
            .slot_bytes = kSlotBytes,
            .beam_width = 1,
            .max_sequence = 0,
            .max_ngram_size = kOrder};
  }

  void run() {
    const engram_history_args made = args();
    check_history(made);
    history_cpu(made, 1);
  }

  //! The same requests one call later, each with these tokens.
  HistoryCase next(const std::vector<std::vector<int32_t>>& tokens) const {
    HistoryCase later;
    later.primary = primary;
    later.secondary = secondary;
    later.num_contexts = later.num_context_tokens = 0;
    for (size_t i = 0; i < tokens.size(); ++i) {
      const size_t row = i * 2 * kMaxBlocks;
      later.add({offsets[row], offsets[row + 1], offsets[row + 2]}, sequence_lengths[i], tokens[i],
                context_lengths[i]);
    }
    return later;
  }
};

HistoryCase prompt() {
  HistoryCase made;
  made.add({2, 4 | kSecondary}, 0, {11, 12, 13, 14, 15}, 5);
  return made;
}

std::string refusal(const engram_history_args& args) {
  return message_of([&] { check_history(args); });
}

}  // namespace

TEST_CASE("a prompt's tokens lie in its blocks, and the next step finds them") {
  HistoryCase first = prompt();
  first.run();
  CHECK(first.positions == std::vector{0, 1, 2, 3, 4});
  CHECK(first.cu_seqlens == std::vector{0, 5});
  CHECK(first.lookback == std::vector{-1, -1, -1});
  const auto id_at = [](const std::vector<uint8_t>& pool, int block, int slot) {
    return reinterpret_cast<const HistorySlot*>(pool.data() +
                                                (block * kPerBlock + slot) * kSlotBytes)
        ->id;
  };
  CHECK(id_at(first.primary, 2, 0) == 11);
  CHECK(id_at(first.primary, 2, 3) == 14);
  CHECK(id_at(first.secondary, 4, 0) == 15);
  HistoryCase later = first.next({{16}});
  later.run();
  CHECK(later.positions == std::vector{5});
  CHECK(later.lookback == std::vector{15, 14, 13});
}

TEST_CASE("draft tokens that were taken back are overwritten") {
  HistoryCase first = prompt();
  first.run();
  HistoryCase drafts = first.next({{16, 90, 91}});
  drafts.run();
  CHECK(drafts.positions == std::vector{5, 6, 7});
  drafts.sequence_lengths[0] = 7;  // one of the two was right
  HistoryCase later = drafts.next({{17}});
  later.run();
  CHECK(later.lookback == std::vector{90, 16, 15});
}

TEST_CASE("a slot that does not hold is found before anything is written") {
  HistoryCase first = prompt();
  first.run();
  for (const int position : {2, 4}) {
    HistoryCase later = first.next({{16}});
    std::vector<uint8_t>& pool = position < 4 ? later.primary : later.secondary;
    pool[static_cast<size_t>(((position < 4 ? 2 : 4) * kPerBlock + position % 4) * kSlotBytes)] ^=
        1;
    const auto before = pool;
    CHECK(has(message_of([&] { later.run(); }), "a block was not copied"));
    CHECK(pool == before);
  }
}

TEST_CASE("history: what cannot be is refused") {
  HistoryCase made = prompt();
  engram_history_args args = made.args();
  args.slot_bytes = 4;
  CHECK(has(refusal(args), "slot_bytes: expected 8 or more, got 4"));
  args = made.args();
  args.num_context_tokens = 4;
  CHECK(has(refusal(args), "the same number for each of 0 generation steps"));
  args = made.args();
  args.beam_width = 2;
  args.num_contexts = args.num_context_tokens = 0;
  args.num_requests = args.num_tokens = 2;
  CHECK(has(refusal(args), "cache_indirection: expected an array for beams"));
  made.sequence_lengths[0] = 13;  // of 12 that its blocks hold
  CHECK(has(message_of([&] { made.run(); }), "at positions from 0 to 11"));
  HistoryCase lone = prompt();
  engram_history_args no_secondary = lone.args();
  no_secondary.secondary_pool = nullptr;
  CHECK(has(message_of([&] { history_cpu(no_secondary, 1); }), "which is NULL"));
}

}  // namespace engram
