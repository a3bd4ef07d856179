// SPDX-License-Identifier: Apache-2.0
// engram_hash on the CPU.
#include <algorithm>
#include <vector>

#include "check.h"
#include "engram/layout.h"
#include "engram/ops.h"
#include "parallel.h"

namespace engram {
namespace {

constexpr int64_t kTokensPerRange = 2048;

struct Column {
  FastMod remainder;
  uint32_t offset;
};

int64_t num_columns(const engram_hash_args& args) {
  return row_offset(args.max_ngram_size - 1, args.num_heads);
}

void check_boundaries(const engram_hash_args& args) {
  const int32_t* const boundaries = args.cu_seqlens;
  if (boundaries == nullptr) return;
  ENGRAM_CHECK(boundaries[0] == 0, "cu_seqlens[0]: expected 0, got ", boundaries[0]);
  for (int32_t i = 1; i <= args.num_requests; ++i) {
    ENGRAM_CHECK(boundaries[i] >= boundaries[i - 1], "cu_seqlens[", i, "]: expected ",
                 boundaries[i - 1], " or more, as the boundary before it, got ", boundaries[i]);
  }
  const int32_t last = boundaries[args.num_requests];
  ENGRAM_CHECK(last == args.num_tokens, "cu_seqlens[", args.num_requests, "]: expected ",
               args.num_tokens, ", the number of tokens, got ", last);
}

//! Ids of dead tokens are not read: those of image spans may lie outside the vocabulary. Where ids
//! may be unknown, they may be lost.
void check_ids(const engram_hash_args& args, const char* name, const int32_t* ids,
               const uint8_t* dead, int64_t count, int32_t lowest) {
  for (int64_t i = 0; i < count; ++i) {
    if (dead != nullptr && dead[i]) continue;
    if (lowest == kUnknownId && ids[i] == kLostId) continue;
    ENGRAM_CHECK(ids[i] >= lowest && ids[i] < args.vocab_size, name, "[", i, "]: expected ", lowest,
                 " to ", args.vocab_size - 1, ", got ", ids[i]);
    if (ids[i] == kUnknownId) continue;
    ENGRAM_CHECK(args.token_map[ids[i]] >= 0, "token_map[", ids[i], "]: expected 0 or more, got ",
                 args.token_map[ids[i]]);
  }
}

std::vector<Column> checked_columns(const engram_hash_args& args) {
  std::vector<Column> columns(static_cast<size_t>(args.num_layers) *
                              static_cast<size_t>(num_columns(args)));
  for (size_t i = 0; i < columns.size(); ++i) {
    const int64_t prime = args.primes[i];
    const int64_t offset = args.offsets[i];
    ENGRAM_CHECK(prime >= 1 && prime <= INT32_MAX, "primes[", i, "]: expected 1 to ", INT32_MAX,
                 ", got ", prime);
    ENGRAM_CHECK(offset >= 0 && offset <= INT32_MAX - prime + 1, "offsets[", i, "]: expected 0 to ",
                 INT32_MAX - prime + 1, ", so that row ids fit int32, got ", offset);
    columns[i] = {FastMod(prime), static_cast<uint32_t>(offset)};
  }
  return columns;
}

//! The request of a token that lies before the last boundary; empty requests own none.
int32_t request_of(const engram_hash_args& args, int64_t token) {
  if (args.cu_seqlens == nullptr) return static_cast<int32_t>(token);
  const int32_t* const end = args.cu_seqlens + args.num_requests + 1;
  return static_cast<int32_t>(std::upper_bound(args.cu_seqlens, end, token) - args.cu_seqlens) - 1;
}

void hash_range(const engram_hash_args& args, const Column* columns, int64_t begin, int64_t end) {
  const int num_shifts =
      args.max_ngram_size;  // copies: a store of an int32 could change what args refers to
  const int num_heads = args.num_heads;
  const int num_layers = args.num_layers;
  int32_t* out = args.hash_ids + row_offset(begin, row_offset(num_layers, num_columns(args)));
  int32_t request = request_of(args, begin);
  for (int64_t token = begin; token < end; ++token) {
    while (token >= first_token(args, request + 1)) ++request;
    int32_t sources[kMaxNgramSize];
    if (const int32_t missing = hash_sources(args, token, request, sources)) {
      out = std::fill_n(out, row_offset(num_layers, num_columns(args)), missing_row(missing));
      continue;
    }
    const Column* column = columns;
    const int64_t* multiplier = args.multipliers;
    for (int layer = 0; layer < num_layers; ++layer) {
      uint64_t rolling = hash_step(0, sources[0], *multiplier++);
      for (int shift = 1; shift < num_shifts; ++shift) {
        rolling = hash_step(rolling, sources[shift], *multiplier++);
        for (int head = 0; head < num_heads; ++head, ++column) {
          *out++ = static_cast<int32_t>(column->remainder(rolling) + column->offset);
        }
      }
    }
  }
}

void hash_tokens(const engram_hash_args& args, int num_threads) {
  check_ids(args, "pad_token_id", &args.pad_token_id, nullptr, 1, 0);
  check_ids(args, "token_ids", args.token_ids, args.dead_mask, args.num_tokens, 0);
  if (args.lookback_ids != nullptr) {
    check_ids(args, "lookback_ids", args.lookback_ids, args.lookback_dead,
              row_offset(args.num_requests, args.max_ngram_size - 1), kUnknownId);
  }
  const std::vector<Column> columns = checked_columns(args);
  parallel_for(args.num_tokens, kTokensPerRange, num_threads,
               [&](int64_t begin, int64_t end) { hash_range(args, columns.data(), begin, end); });
}

//! Requests of a call that has tokens, or none but windows to hand on.
void check_requests(const engram_hash_args& args) {
  if (args.cu_seqlens == nullptr) {
    ENGRAM_CHECK(args.num_requests == args.num_tokens, "num_requests: expected ", args.num_tokens,
                 ", one per token without cu_seqlens, got ", args.num_requests);
  } else {
    check_at_least(args.num_requests, "num_requests", 1);
  }
  ENGRAM_CHECK(args.next_lookback_ids == nullptr || args.next_lookback_ids != args.lookback_ids,
               "next_lookback_ids: expected another array than lookback_ids, got the same");
  check_aligned(args.cu_seqlens, "cu_seqlens", alignof(int32_t));
  check_aligned(args.lookback_ids, "lookback_ids", alignof(int32_t));
  check_aligned(args.next_lookback_ids, "next_lookback_ids", alignof(int32_t));
}

}  // namespace

void check_hash(const engram_hash_args& args) {
  check_range(args.num_tokens, "num_tokens", 0, INT32_MAX);
  check_at_least(args.num_requests, "num_requests", 0);
  check_at_least(args.num_layers, "num_layers", 1);
  check_range(args.max_ngram_size, "max_ngram_size", 2, kMaxNgramSize);
  check_at_least(args.num_heads, "num_heads", 1);
  check_at_least(args.vocab_size, "vocab_size", 1);
  check_range(args.pad_token_id, "pad_token_id", 0, args.vocab_size - 1);
  ENGRAM_CHECK(args.positions_dtype == ENGRAM_INT32 || args.positions_dtype == ENGRAM_INT64,
               "positions_dtype: expected ", ENGRAM_INT32, " (int32) or ", ENGRAM_INT64,
               " (int64), got ", args.positions_dtype);
  check_product({args.max_ngram_size - 1, args.num_heads, args.num_layers}, "row ids of a token",
                INT32_MAX);
  if (args.num_tokens > 0 || num_windows(args) > 0) check_requests(args);
  if (args.num_tokens == 0) return;
  check_elements(args.multipliers, "multipliers");
  check_elements(args.primes, "primes");
  check_elements(args.offsets, "offsets");
  check_elements(args.token_map, "token_map");
  check_elements(args.token_ids, "token_ids");
  check_elements(args.hash_ids, "hash_ids");
  check_array(args.positions, "positions");
  check_aligned(args.positions, "positions",
                args.positions_dtype == ENGRAM_INT64 ? alignof(int64_t) : alignof(int32_t));
  ENGRAM_CHECK(args.lookback_dead == nullptr || args.lookback_ids != nullptr,
               "lookback_dead: expected lookback_ids with it, got NULL");
}

void hash_cpu(const engram_hash_args& args, int num_threads) {
  check_boundaries(args);
  if (args.num_tokens > 0) hash_tokens(args, num_threads);
  const int window = args.max_ngram_size - 1;
  for (int32_t request = 0; request < num_windows(args); ++request) {
    for (int column = 0; column < window; ++column) {
      args.next_lookback_ids[row_offset(request, window) + column] =
          next_lookback_id(args, request, column);
    }
  }
}

}  // namespace engram
