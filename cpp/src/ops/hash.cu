// SPDX-License-Identifier: Apache-2.0
#include "engram/layout.h"
#include "engram/ops.h"
#include "fault.h"
#include "launch.cuh"
#include "ptx.cuh"

namespace engram {
namespace {

constexpr int kWarpSize = 32;
constexpr int kIdThreads = 192;     //!< of a block: compute ids, each the same one of many tokens
constexpr int kSourceThreads = 64;  //!< the rest: find the sources of the block's tokens
constexpr int kThreads = kIdThreads + kSourceThreads;
constexpr unsigned kAllLanes = 0xFFFFFFFFu;

//! Sizes known when compiled, or 0 for any: loops unroll and divisions become products.
template <int kNgramSize, int kNumHeads>
struct Sizes {
  static constexpr int kMaxSources = kNgramSize == 0 ? kMaxNgramSize : kNgramSize;
  static constexpr int kTokenLanes = kMaxSources <= 4 ? 4 : 8;  //!< find one token's sources
  static constexpr int kTokensPerBlock = kSourceThreads / kTokenLanes;
  static_assert(kMaxSources <= kTokenLanes, "a lane finds one source");

  static __device__ int ngram_size(const engram_hash_args& args) {
    return kNgramSize == 0 ? args.max_ngram_size : kNgramSize;
  }
  static __device__ int num_heads(const engram_hash_args& args) {
    return kNumHeads == 0 ? args.num_heads : kNumHeads;
  }
};

//! Votes of the kTokenLanes lanes of this lane's token, the first one's in bit 0. All lanes vote.
template <int kTokenLanes>
__device__ unsigned token_ballot(bool vote) {
  const unsigned shift = threadIdx.x % kWarpSize / kTokenLanes * kTokenLanes;
  return (__ballot_sync(kAllLanes, vote) >> shift) & ((1u << kTokenLanes) - 1);
}

//! Request whose boundaries hold a token, by its lanes: the one of its own number (a decode step),
//! else each round splits the candidates into kTokenLanes. num_requests at or past the last
//! boundary. Any contents end in [0, num_requests].
template <int kTokenLanes>
__device__ int32_t find_request(const engram_hash_args& args, int64_t token, int lane) {
  if (args.cu_seqlens == nullptr) {
    return static_cast<int32_t>(min(token, static_cast<int64_t>(args.num_requests)));
  }
  int32_t low = 0;
  int32_t high = args.num_requests;
  if (token < high) {
    const int64_t begin = args.cu_seqlens[token];
    const int64_t end = args.cu_seqlens[token + 1];
    if (begin <= token && token < end) low = high = static_cast<int32_t>(token);
  }
  while (__any_sync(kAllLanes, low < high)) {
    const int32_t step = (high - low + kTokenLanes - 1) / kTokenLanes;
    const int64_t probe = low + static_cast<int64_t>(lane + 1) * step;
    const bool starts_later = probe > high || args.cu_seqlens[probe] > token;
    const int num_passed = __popc(token_ballot<kTokenLanes>(!starts_later));
    if (low >= high) continue;
    low += num_passed * step;
    high = min(high, low + step - 1);
  }
  return low;
}

//! Whether a request's boundaries are such that its tokens can be read.
__device__ bool has_sound_boundaries(const engram_hash_args& args, int32_t request) {
  if (args.cu_seqlens == nullptr) return request < args.num_tokens;
  const int32_t begin = args.cu_seqlens[request];
  const int32_t end = args.cu_seqlens[request + 1];
  return begin >= 0 && begin <= end && end <= args.num_tokens;
}

//! The raw id behind hash_source's kBadSource, reported. Where the map itself is wrong there may be
//! no raw id: an unknown position counts as the pad id.
__device__ void report_bad_id(const engram_hash_args& args, uint64_t* fault, int64_t token,
                              int32_t request, int64_t chunk_position, int shift) {
  const int64_t position = position_at(args, token) - shift;
  if (pad_id(args) < 0) {
    store_fault(fault, FaultCode::kTokenMap, args.pad_token_id, pad_id(args));
  } else if (position >= chunk_position) {
    store_fault(fault, FaultCode::kTokenId, token - shift, args.token_ids[token - shift]);
  } else {
    const int64_t slot =
        row_offset(request, args.max_ngram_size - 1) + chunk_position - 1 - position;
    store_fault(fault, FaultCode::kLookbackId, request, args.lookback_ids[slot]);
  }
}

//! Starts the reads that most tokens need, before it is known which request holds this one: its
//! sources in this call, or in the window of the request of its own number (a decode step).
__device__ void prefetch_sources(const engram_hash_args& args, int64_t token, int lane) {
  const int window = args.max_ngram_size - 1;
  int32_t raw_id = kUnknownId;
  int32_t lookback_id = kUnknownId;
  if (lane < args.max_ngram_size && lane <= token) raw_id = args.token_ids[token - lane];
  if (args.lookback_ids != nullptr && lane < window && token < args.num_requests) {
    lookback_id = args.lookback_ids[row_offset(token, window) + lane];
  }
  const int position_bytes = args.positions_dtype == ENGRAM_INT64 ? 8 : 4;
  if (lane == 0) prefetch(static_cast<const char*>(args.positions) + token * position_bytes);
  if (lane == 1) prefetch(args.token_map + args.pad_token_id);
  if (raw_id >= 0 && raw_id < args.vocab_size) prefetch(args.token_map + raw_id);
  if (lookback_id >= 0 && lookback_id < args.vocab_size) prefetch(args.token_map + lookback_id);
}

//! hash_sources (layout.h), one source a lane. Returns kBadSource in every lane for a padding token
//! and for one with a bad boundary or raw id, else kLostSource where one is lost. All lanes of the
//! warp take part.
template <int kTokenLanes>
__device__ int32_t find_source(const engram_hash_args& args, uint64_t* fault, int64_t token,
                               int lane) {
  const int32_t request = find_request<kTokenLanes>(args, token, lane);
  // NOTE: only boundaries that hold the token keep hash_source's reads inside the arrays.
  const bool sound = request < args.num_requests && token < args.num_tokens &&
                     has_sound_boundaries(args, request) && token >= first_token(args, request);
  int32_t source = kDeadSource;
  int64_t chunk_position = 0;
  if (sound) {
    const int64_t first = first_token(args, request);
    chunk_position = position_at(args, first);
    if (lane < args.max_ngram_size) {
      source = hash_source(args, token, request, first, chunk_position, lane);
    }
  }
  const unsigned dead = token_ballot<kTokenLanes>(source == kDeadSource);
  const bool blocked = (dead & ((2u << lane) - 1)) != 0;  // a dead source here or at a lower shift
  const bool bad = !blocked && source == kBadSource;
  if (bad) report_bad_id(args, fault, token, request, chunk_position, lane);
  const bool any_bad = token_ballot<kTokenLanes>(bad) != 0;
  const bool any_lost = token_ballot<kTokenLanes>(!blocked && source == kLostSource) != 0;
  if (any_bad || !sound) return kBadSource;
  if (any_lost) return kLostSource;
  return blocked ? pad_id(args) : source;
}

//! Reports a boundary that does not rise, and writes the window that the request's next call takes.
__device__ void finish_request(const engram_hash_args& args, uint64_t* fault, int32_t request) {
  const bool sound = has_sound_boundaries(args, request);
  if (args.cu_seqlens != nullptr) {
    if (request == 0 && args.cu_seqlens[0] != 0) {
      store_fault(fault, FaultCode::kBoundary, 0, args.cu_seqlens[0]);
    } else if (!sound) {
      store_fault(fault, FaultCode::kBoundary, request + 1, args.cu_seqlens[request + 1]);
    }
  }
  if (args.next_lookback_ids == nullptr) return;
  const int window = args.max_ngram_size - 1;
  int32_t* const next = args.next_lookback_ids + row_offset(request, window);
  for (int column = 0; column < window; ++column) {
    next[column] = sound ? next_lookback_id(args, request, column) : kUnknownId;
  }
}

//! What one id of every token is computed with.
template <int kMaxSources>
struct IdConstants {
  int64_t multipliers[kMaxSources];  //!< 0 for shifts that the id does not reach
  int64_t prime;
  int64_t offset;
};

template <int kNgramSize, int kNumHeads>
__device__ auto load_constants(const engram_hash_args& args, int i) {
  using Size = Sizes<kNgramSize, kNumHeads>;
  const int ngram_size = Size::ngram_size(args);
  const int num_columns = (ngram_size - 1) * Size::num_heads(args);
  const int layer = i / num_columns;
  const int last_shift = i % num_columns / Size::num_heads(args) + 1;
  IdConstants<Size::kMaxSources> constants;
  constants.prime = __ldg(args.primes + i);
  constants.offset = __ldg(args.offsets + i);
#pragma unroll
  for (int shift = 0; shift < Size::kMaxSources; ++shift) {
    const int64_t* const multiplier = args.multipliers + layer * ngram_size + shift;
    constants.multipliers[shift] = shift > last_shift ? 0 : __ldg(multiplier);
  }
  return constants;
}

//! FastMod's own constructor divides in integers, five times as many instructions. Here the
//! reciprocal comes from FP64 and is off by at most 2^12 / prime; what is missing to 2^64 - 1
//! corrects it to the exact one or one less, and for values below 2^63 both give the quotient or
//! one less.
__device__ FastMod fast_mod(int64_t prime) {
  const double inverse = __drcp_rn(static_cast<double>(prime));
  FastMod remainder;
  remainder.divisor = static_cast<uint64_t>(prime);
  remainder.reciprocal = __double2ull_rz(inverse * 0x1p64);
  const auto missing = static_cast<int64_t>(~(remainder.reciprocal * remainder.divisor));
  remainder.reciprocal +=
      static_cast<uint64_t>(__double2ll_rd(static_cast<double>(missing) * inverse));
  return remainder;
}

template <int kMaxSources>
__device__ int32_t hash_id(const IdConstants<kMaxSources>& constants, const FastMod& remainder,
                           const int32_t* sources) {
  uint64_t rolling = 0;
#pragma unroll
  for (int shift = 0; shift < kMaxSources; ++shift) {
    rolling = hash_step(rolling, sources[shift], constants.multipliers[shift]);
  }
  return static_cast<int32_t>(remainder(rolling) + static_cast<uint64_t>(constants.offset));
}

//! The first num_token_blocks blocks: kSourceThreads find their tokens' sources while the others
//! fetch what their ids are computed with. The blocks after them take a request a thread.
template <int kNgramSize, int kNumHeads>
__global__ void __launch_bounds__(kThreads)
    hash_kernel(const __grid_constant__ engram_hash_args args, uint64_t* fault,
                unsigned num_token_blocks) {
  using Size = Sizes<kNgramSize, kNumHeads>;
  __shared__ int32_t sources[Size::kTokensPerBlock][Size::kTokenLanes];
  const int thread = threadIdx.x;
  if (blockIdx.x >= num_token_blocks) {
    const int64_t request = row_offset(blockIdx.x - num_token_blocks, kThreads) + thread;
    if (request < args.num_requests) finish_request(args, fault, static_cast<int32_t>(request));
    return;
  }
  const int64_t first = row_offset(blockIdx.x, Size::kTokensPerBlock);

  const int num_ids = args.num_layers * (Size::ngram_size(args) - 1) * Size::num_heads(args);
  const int num_id_threads = min(num_ids, kIdThreads);
  const int num_groups = kIdThreads / num_id_threads;  // tokens at a time
  const int group = thread / num_id_threads;
  int i = thread - group * num_id_threads;
  IdConstants<Size::kMaxSources> constants;
  FastMod remainder;

  // Sources, and constants
  if (thread >= kIdThreads) {
    const int lane = thread % Size::kTokenLanes;
    const int slot = (thread - kIdThreads) / Size::kTokenLanes;
    prefetch_sources(args, min(first + slot, args.num_tokens - 1), lane);
    sources[slot][lane] = find_source<Size::kTokenLanes>(args, fault, first + slot, lane);
  } else {
    constants = load_constants<kNgramSize, kNumHeads>(args, i);
    remainder = fast_mod(constants.prime);
  }
  __syncthreads();
  if (thread >= kIdThreads || group >= num_groups) return;

  // Ids
  const int num_tokens =
      static_cast<int>(min(args.num_tokens - first, static_cast<int64_t>(Size::kTokensPerBlock)));
  while (true) {
    int32_t* const ids = args.hash_ids + row_offset(first, num_ids) + i;
#pragma unroll 4
    for (int token = group; token < num_tokens; token += num_groups) {
      const int32_t* const own = sources[token];
      ids[token * num_ids] =
          own[0] < kDeadSource ? missing_row(own[0]) : hash_id(constants, remainder, own);
    }
    i += num_id_threads;
    if (i >= num_ids) return;
    constants = load_constants<kNgramSize, kNumHeads>(args, i);
    remainder = fast_mod(constants.prime);
  }
}

template <int kNgramSize, int kNumHeads>
cudaError_t launch_hash(const engram_hash_args& args, uint64_t* fault, cudaStream_t stream) {
  constexpr int kTokensPerBlock = Sizes<kNgramSize, kNumHeads>::kTokensPerBlock;
  const auto num_token_blocks = static_cast<unsigned>(ceil_div(args.num_tokens, kTokensPerBlock));
  const int32_t num_requests = args.num_tokens == 0 ? num_windows(args) : args.num_requests;
  const auto num_request_blocks = static_cast<unsigned>(ceil_div(num_requests, kThreads));
  if (num_token_blocks + num_request_blocks == 0) return cudaSuccess;
  return launch(hash_kernel<kNgramSize, kNumHeads>, dim3(num_token_blocks + num_request_blocks),
                dim3(kThreads), stream, args, fault, num_token_blocks);
}

}  // namespace

cudaError_t hash_cuda(const engram_hash_args& args, uint64_t* fault, cudaStream_t stream) {
  const bool is_v41 = args.max_ngram_size == 4 && args.num_heads == 8;
  return is_v41 ? launch_hash<4, 8>(args, fault, stream) : launch_hash<0, 0>(args, fault, stream);
}

}  // namespace engram
