// SPDX-License-Identifier: Apache-2.0
// engram_history on the CPU.
#include "check.h"
#include "engram/history.h"
#include "engram/ops.h"

namespace engram {
namespace {

void check_past(const engram_history_args& args, int32_t request, const HistorySpan& span) {
  for (int32_t p = first_checked(args, span.position); p < span.position; ++p) {
    ENGRAM_CHECK(holds(args, request, p), "history of request ", request,
                 ": expected the check word of position ", p,
                 " in its KV cache slot, found another: a block was not copied");
  }
}

void read_request(const engram_history_args& args, int32_t request, const HistorySpan& span) {
  const int window = args.max_ngram_size - 1;
  args.cu_seqlens[request] = static_cast<int32_t>(span.begin);
  for (int column = 0; column < window; ++column) {
    args.lookback_ids[row_offset(request, window) + column] =
        past_id(args, request, span.position - 1 - column);
  }
  for (int32_t index = 0; index < span.count; ++index) {
    args.positions[span.begin + index] = span.position + index;
  }
}

void write_request(const engram_history_args& args, int32_t request, const HistorySpan& span) {
  for (int32_t index = 0; index < span.count; ++index) {
    HistorySlot* const slot = slot_at(args, request, span.position + index);
    ENGRAM_CHECK(slot != nullptr, "block_offsets of request ", request,
                 ": expected blocks of the primary pool, found one of a secondary pool, which is "
                 "NULL");
    *slot = new_slot(args, request, span, index);
  }
}

}  // namespace

void check_history(const engram_history_args& args) {
  check_range(args.num_tokens, "num_tokens", 0, INT32_MAX);
  check_at_least(args.num_requests, "num_requests", 0);
  check_range(args.num_contexts, "num_contexts", 0, args.num_requests);
  check_range(args.num_context_tokens, "num_context_tokens", 0, args.num_tokens);
  check_range(args.max_ngram_size, "max_ngram_size", 2, kMaxNgramSize);
  check_at_least(args.max_blocks, "max_blocks", 1);
  check_at_least(args.tokens_per_block, "tokens_per_block", 1);
  check_product({args.max_blocks, args.tokens_per_block}, "positions of a request", INT32_MAX);
  check_at_least(args.slot_bytes, "slot_bytes", kLeastSlotBytes);
  check_multiple(args.slot_bytes, "slot_bytes", alignof(HistorySlot));
  check_at_least(args.beam_width, "beam_width", 1);
  const int32_t num_steps = args.num_requests - args.num_contexts;
  const int64_t step_tokens = args.num_tokens - args.num_context_tokens;
  ENGRAM_CHECK(num_steps == 0 ? step_tokens == 0 : step_tokens % num_steps == 0,
               "num_tokens: expected ", args.num_context_tokens,
               " and the same number for each of ", num_steps, " generation steps, got ",
               args.num_tokens);
  ENGRAM_CHECK(num_steps % args.beam_width == 0, "num_requests: expected beams of ",
               args.beam_width, " for each prompt, got ", num_steps, " generation steps");
  ENGRAM_CHECK(args.beam_width == 1 || num_steps == 0 || args.cache_indirection != nullptr,
               "cache_indirection: expected an array for beams, got NULL");
  if (args.num_tokens == 0) return;
  check_elements(args.primary_pool, "primary_pool");
  check_aligned(args.primary_pool, "primary_pool", alignof(HistorySlot));
  check_aligned(args.secondary_pool, "secondary_pool", alignof(HistorySlot));
  check_elements(args.block_offsets, "block_offsets");
  check_elements(args.sequence_lengths, "sequence_lengths");
  check_elements(args.context_lengths, "context_lengths");
  check_aligned(args.cache_indirection, "cache_indirection", alignof(int32_t));
  check_elements(args.token_ids, "token_ids");
  check_elements(args.positions, "positions");
  check_elements(args.cu_seqlens, "cu_seqlens");
  check_elements(args.lookback_ids, "lookback_ids");
}

//! Few bytes a request: one thread. Whatever is wrong is found before the first slot is written.
void history_cpu(const engram_history_args& args, int /*num_threads*/) {
  const auto for_each_request = [&](auto&& visit) {
    int64_t begin = 0;
    for (int32_t request = 0; request < args.num_requests; ++request) {
      const HistorySpan span = history_span(args, request, begin);
      begin = span.begin + span.count;
      visit(request, span);
    }
  };
  for_each_request([&](int32_t request, const HistorySpan& span) {
    ENGRAM_CHECK(is_sound(args, span), "request ", request, ": expected tokens within ",
                 args.num_tokens, " at positions from 0 to ",
                 row_offset(args.max_blocks, args.tokens_per_block) - 1, ", got ", span.count,
                 " from token ", span.begin, " and position ", span.position, " on");
    check_past(args, request, span);
    read_request(args, request, span);
  });
  args.cu_seqlens[args.num_requests] = static_cast<int32_t>(args.num_tokens);
  for_each_request(
      [&](int32_t request, const HistorySpan& span) { write_request(args, request, span); });
}

}  // namespace engram
