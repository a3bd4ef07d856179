// SPDX-License-Identifier: Apache-2.0
//! \file history.h
//! Where the tokens before a call lie in a paged KV cache, for CPU and GPU alike.
#pragma once

#include <cstdint>

#include "engram/engram.h"
#include "engram/layout.h"
#include "engram/row.h"

namespace engram {

constexpr int kLeastSlotBytes = 8;

//! A token in its slot. The check word covers the position and the window of ids that ends there:
//! a block that was left as another sequence had it fails at its first tokens.
struct HistorySlot {
  int32_t id;
  uint32_t check;
};

//! A request's tokens in this call.
struct HistorySpan {
  int64_t begin;     //!< first token
  int32_t count;     //!< tokens
  int32_t position;  //!< of the first one
};

//! Tokens of each generation step.
ENGRAM_HOST_DEVICE int32_t step_tokens(const engram_history_args& args) {
  const int32_t num_steps = args.num_requests - args.num_contexts;
  return num_steps == 0
             ? 0
             : static_cast<int32_t>((args.num_tokens - args.num_context_tokens) / num_steps);
}

//! begin: first token of a context chunk, of no use to a generation step.
ENGRAM_HOST_DEVICE HistorySpan history_span(const engram_history_args& args, int32_t request,
                                            int64_t begin) {
  const bool is_context = request < args.num_contexts;
  const int32_t count = is_context ? args.context_lengths[request] : step_tokens(args);
  if (!is_context) {
    begin = args.num_context_tokens + row_offset(request - args.num_contexts, count);
  }
  return {begin, count, args.sequence_lengths[request] - count};
}

//! Whether a span lies in the arrays.
ENGRAM_HOST_DEVICE bool is_sound(const engram_history_args& args, const HistorySpan& span) {
  const int64_t capacity = row_offset(args.max_blocks, args.tokens_per_block);
  return span.begin >= 0 && span.count >= 0 && span.position >= 0 &&
         span.begin + span.count <= args.num_tokens &&
         static_cast<int64_t>(span.position) + span.count <= capacity;
}

//! The request whose blocks hold a position of another: prompts lie with the first beam, and
//! each token since with the beam that it was written by. -1: junk in cache_indirection.
ENGRAM_HOST_DEVICE int32_t slot_owner(const engram_history_args& args, int32_t request,
                                      int32_t position) {
  if (args.cache_indirection == nullptr || request < args.num_contexts) return request;
  const int32_t step = request - args.num_contexts;
  const int32_t first_beam = request - step % args.beam_width;
  if (position < args.context_lengths[request]) return first_beam;
  if (position >= args.max_sequence) return -1;
  const int32_t beam = args.cache_indirection[row_offset(step, args.max_sequence) + position];
  return beam >= 0 && beam < args.beam_width ? first_beam + beam : -1;
}

//! The slot of a position among one request's own blocks; positions below max_blocks *
//! tokens_per_block. Null where its block lies in a pool that is not there.
ENGRAM_HOST_DEVICE HistorySlot* slot_at(const engram_history_args& args, int32_t request,
                                        int32_t position) {
  const int64_t row = row_offset(2 * static_cast<int64_t>(request), args.max_blocks);
  const int32_t offset = args.block_offsets[row + position / args.tokens_per_block];
  uint8_t* const pool = offset < 0 ? args.secondary_pool : args.primary_pool;
  if (pool == nullptr) return nullptr;
  const int64_t block = offset & INT32_MAX;
  const int64_t slot = row_offset(block, args.tokens_per_block) + position % args.tokens_per_block;
  return reinterpret_cast<HistorySlot*>(pool + row_offset(slot, args.slot_bytes));
}

//! The slot that a request reads for an earlier position, or null.
ENGRAM_HOST_DEVICE const HistorySlot* past_slot(const engram_history_args& args, int32_t request,
                                                int32_t position) {
  const int32_t owner = slot_owner(args, request, position);
  return owner < 0 ? nullptr : slot_at(args, owner, position);
}

//! Raw id of a position before this call's, kUnknownId before the first, kLostId without a slot.
ENGRAM_HOST_DEVICE int32_t past_id(const engram_history_args& args, int32_t request,
                                   int32_t position) {
  if (position < 0) return kUnknownId;
  const HistorySlot* const slot = past_slot(args, request, position);
  return slot == nullptr ? kLostId : slot->id;
}

//! One step of a check word, over the ids from the position back.
ENGRAM_HOST_DEVICE uint32_t check_step(uint32_t check, int32_t id) {
  check = (check ^ static_cast<uint32_t>(id)) * 0x9E3779B1u;
  return check ^ check >> 15;
}
ENGRAM_HOST_DEVICE uint32_t check_seed(int32_t position) {
  return check_step(0x456E6772u, position);
}

//! Whether the slot of an earlier position is the one that was written there.
ENGRAM_HOST_DEVICE bool holds(const engram_history_args& args, int32_t request, int32_t position) {
  const HistorySlot* const slot = past_slot(args, request, position);
  if (slot == nullptr) return false;
  uint32_t check = check_seed(position);
  for (int shift = 0; shift < args.max_ngram_size - 1; ++shift) {
    check = check_step(check, past_id(args, request, position - shift));
  }
  return check == slot->check;
}

//! The first earlier position that a call looks at: the rest of the window, and with it the whole
//! block that the window ends in, whose first check words reach into the block before.
ENGRAM_HOST_DEVICE int32_t first_checked(const engram_history_args& args, int32_t position) {
  if (position == 0) return 0;
  const int32_t block = (position - 1) / args.tokens_per_block * args.tokens_per_block;
  const int32_t window = position - (args.max_ngram_size - 1);
  return window < block ? (window < 0 ? 0 : window) : block;
}

//! What goes into the slot of a span's token number `index`.
ENGRAM_HOST_DEVICE HistorySlot new_slot(const engram_history_args& args, int32_t request,
                                        const HistorySpan& span, int32_t index) {
  const int32_t position = span.position + index;
  uint32_t check = check_seed(position);
  for (int shift = 0; shift < args.max_ngram_size - 1; ++shift) {
    const int32_t id = shift <= index ? args.token_ids[span.begin + index - shift]
                                      : past_id(args, request, position - shift);
    check = check_step(check, id);
  }
  return {args.token_ids[span.begin + index], check};
}

}  // namespace engram
