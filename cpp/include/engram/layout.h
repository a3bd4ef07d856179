// SPDX-License-Identifier: Apache-2.0
//! \file layout.h
//! The n-gram hash of V4.1 for one token and one layer, for CPU and GPU alike.
#pragma once

#include <cstdint>

#include "engram/engram.h"
#include "engram/row.h"

namespace engram {

constexpr int kMaxNgramSize = 8;        //!< highest order the kernels keep in registers
constexpr int32_t kNoRow = -1;          //!< row id that reads as zeros
constexpr int32_t kUnknownId = -1;      //!< lookback id that counts as padding
constexpr int32_t kLostId = INT32_MIN;  //!< lookback id of a KV cache slot that did not hold, and
                                        //!< row id of what needs one: reads as NaN
constexpr int32_t kDeadSource = -1;     //!< source that blocks itself and all older positions
constexpr int32_t kBadSource = -2;      //!< a raw id outside the vocabulary
constexpr int32_t kLostSource = -3;     //!< a lost id

ENGRAM_HOST_DEVICE int64_t position_at(const engram_hash_args& args, int64_t token) {
  return args.positions_dtype == ENGRAM_INT64 ? static_cast<const int64_t*>(args.positions)[token]
                                              : static_cast<const int32_t*>(args.positions)[token];
}

ENGRAM_HOST_DEVICE int32_t first_token(const engram_hash_args& args, int32_t request) {
  return args.cu_seqlens == nullptr ? request : args.cu_seqlens[request];
}

//! Compressed id of a raw id, or kBadSource.
ENGRAM_HOST_DEVICE int32_t compressed_id(const engram_hash_args& args, int32_t raw_id) {
  return raw_id < 0 || raw_id >= args.vocab_size ? kBadSource : args.token_map[raw_id];
}

//! Compressed id that blocked and unknown positions count as.
ENGRAM_HOST_DEVICE int32_t pad_id(const engram_hash_args& args) {
  return args.token_map[args.pad_token_id];
}

//! What the position `shift` tokens before `token` of `request` counts as: a compressed id,
//! kDeadSource, kBadSource or kLostSource. first = first_token(request), chunk_position =
//! position_at(first).
ENGRAM_HOST_DEVICE int32_t hash_source(const engram_hash_args& args, int64_t token, int32_t request,
                                       int64_t first, int64_t chunk_position, int shift) {
  const int64_t position = position_at(args, token) - shift;
  if (position < 0) return kDeadSource;
  if (position >= chunk_position) {
    const int64_t source = token - shift;
    if (source < first) return pad_id(args);  // positions that are not consecutive: unknown
    if (args.dead_mask != nullptr && args.dead_mask[source]) return kDeadSource;
    return compressed_id(args, args.token_ids[source]);
  }
  const int64_t column = chunk_position - 1 - position;
  const int window = args.max_ngram_size - 1;
  if (args.lookback_ids == nullptr || column >= window) return pad_id(args);
  const int64_t slot = row_offset(request, window) + column;
  const int32_t raw_id = args.lookback_ids[slot];
  if (raw_id == kUnknownId) return pad_id(args);
  if (args.lookback_dead != nullptr && args.lookback_dead[slot]) return kDeadSource;
  return raw_id == kLostId ? kLostSource : compressed_id(args, raw_id);
}

//! Row id in place of a token's hash whose sources have kBadSource or kLostSource.
ENGRAM_HOST_DEVICE int32_t missing_row(int32_t source) {
  return source == kLostSource ? kLostId : kNoRow;
}

//! The N sources of a token as the hash reads them: pad_id from the first dead or negative position
//! on. Returns the first kBadSource or kLostSource, with nothing of use in sources, else 0.
ENGRAM_HOST_DEVICE int32_t hash_sources(const engram_hash_args& args, int64_t token,
                                        int32_t request, int32_t* sources) {
  const int64_t first = first_token(args, request);
  const int64_t chunk_position = position_at(args, first);
  bool blocked = false;
  for (int shift = 0; shift < args.max_ngram_size; ++shift) {
    const int32_t source =
        blocked ? kDeadSource : hash_source(args, token, request, first, chunk_position, shift);
    if (source < kDeadSource) return source;
    blocked = source == kDeadSource;
    sources[shift] = blocked ? pad_id(args) : source;
  }
  return 0;
}

//! One step of the rolling hash. Products stay below 2^63 because a multiplier is below 2^63 /
//! compressed vocabulary.
ENGRAM_HOST_DEVICE uint64_t hash_step(uint64_t rolling, int32_t source, int64_t multiplier) {
  return rolling ^ (static_cast<uint64_t>(source) * static_cast<uint64_t>(multiplier));
}

//! Exact remainders by one prime (any divisor from 1 to 2^31) of values below 2^63, without a
//! division. Proof: with d the divisor and r = floor((2^64 - 1) / d) = (2^64 - 1 - e) / d, 0 <= e <
//! d, the exact n * r / 2^64 is n/d - (n/d) * (1 + e) / 2^64, less than 1 below n/d because 1 + e
//! <= d and n < 2^64. So its floor is floor(n/d) or one less, and one subtraction of d corrects the
//! remainder.
struct FastMod {
  uint64_t divisor;
  uint64_t reciprocal;

  FastMod() = default;
  ENGRAM_HOST_DEVICE explicit FastMod(int64_t prime)
      : divisor(static_cast<uint64_t>(prime)),
        reciprocal(UINT64_MAX / static_cast<uint64_t>(prime)) {}

  ENGRAM_HOST_DEVICE uint32_t operator()(uint64_t value) const {
#if defined(__CUDA_ARCH__)
    const uint64_t quotient = __umul64hi(value, reciprocal);
#else
    const uint64_t quotient =
        static_cast<uint64_t>((static_cast<unsigned __int128>(value) * reciprocal) >> 64);
#endif
    const uint32_t rest = static_cast<uint32_t>(value - quotient * divisor);  // below 2 * divisor
    const uint32_t less = rest - static_cast<uint32_t>(divisor);  // wraps where rest is right
    return less < rest ? less : rest;
  }
};

//! Windows for the requests' next call that have to be written, also by a call without tokens.
ENGRAM_HOST_DEVICE int32_t num_windows(const engram_hash_args& args) {
  return args.next_lookback_ids == nullptr ? 0 : args.num_requests;
}

//! Raw id of window column `column` (0 = nearest) that `request` hands to its next call, or
//! kUnknownId.
ENGRAM_HOST_DEVICE int32_t next_lookback_id(const engram_hash_args& args, int32_t request,
                                            int column) {
  const int64_t first = first_token(args, request);
  const int64_t end = args.cu_seqlens == nullptr ? first + 1 : args.cu_seqlens[request + 1];
  const int64_t source = end - 1 - column;
  if (source >= first) return args.token_ids[source];
  const int window = args.max_ngram_size - 1;
  const int64_t old_column = first - 1 - source;
  if (args.lookback_ids == nullptr || old_column >= window) return kUnknownId;
  return args.lookback_ids[row_offset(request, window) + old_column];
}

}  // namespace engram
