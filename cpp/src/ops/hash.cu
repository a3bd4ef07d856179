// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "engram/layout.h"
#include "engram/ops.h"
#include "fault.h"
#include "launch.cuh"

namespace engram {
namespace {

constexpr int kWarpSize = 32;
constexpr int kWarpsPerBlock = 4;
constexpr int kThreads = kWarpSize * kWarpsPerBlock;
constexpr unsigned kAllLanes = 0xFFFFFFFFu;
static_assert(kMaxNgramSize <= kWarpSize, "a lane finds one source");

//! Request whose boundaries hold a token, by the whole warp: each round splits the candidates into
//! 32. num_requests at or past the last boundary. Any contents end in [0, num_requests].
__device__ int64_t find_request(const engram_hash_args& args, int64_t token, int lane) {
  if (args.cu_seqlens == nullptr) return min(token, static_cast<int64_t>(args.num_requests));
  int64_t low = 0;
  int64_t high = args.num_requests;
  while (low < high) {
    const int64_t step = ceil_div(high - low, kWarpSize);
    const int64_t probe = low + (lane + 1) * step;
    const bool starts_later = probe > high || args.cu_seqlens[probe] > token;
    const int num_passed = __popc(__ballot_sync(kAllLanes, !starts_later));
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

//! hash_sources (layout.h) by a warp, one source a lane. Returns false for a padding token and for
//! one with a bad boundary or raw id.
__device__ bool warp_sources(const engram_hash_args& args, uint64_t* fault, int64_t token, int lane,
                             int32_t (&sources)[kMaxNgramSize]) {
  const int64_t found = find_request(args, token, lane);
  if (found >= args.num_requests) return false;
  const auto request = static_cast<int32_t>(found);
  // NOTE: only boundaries that hold the token keep hash_source's reads inside the arrays.
  const int64_t first = first_token(args, request);
  if (!has_sound_boundaries(args, request) || token < first) return false;

  const int64_t chunk_position = position_at(args, first);
  int32_t source = kDeadSource;
  if (lane < args.max_ngram_size) {
    source = hash_source(args, token, request, first, chunk_position, lane);
  }
  const unsigned dead = __ballot_sync(kAllLanes, source == kDeadSource);
  const bool blocked = (dead & ((2u << lane) - 1)) != 0;  // a dead source here or at a lower shift
  const bool bad = !blocked && source == kBadSource;
  if (bad) report_bad_id(args, fault, token, request, chunk_position, lane);
  if (__any_sync(kAllLanes, bad)) return false;
  if (blocked) source = pad_id(args);
#pragma unroll
  for (int shift = 0; shift < kMaxNgramSize; ++shift) {
    sources[shift] = __shfl_sync(kAllLanes, source, shift);
  }
  return true;
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

//! The ids of a token by a warp, an id a lane.
__device__ void hash_token(const engram_hash_args& args, uint64_t* fault, int64_t token, int lane) {
  int32_t sources[kMaxNgramSize];
  const bool sound = warp_sources(args, fault, token, lane, sources);
  const int num_columns = (args.max_ngram_size - 1) * args.num_heads;
  const int num_ids = args.num_layers * num_columns;
  int32_t* const hash_ids = args.hash_ids + row_offset(token, num_ids);
  for (int i = lane; i < num_ids; i += kWarpSize) {
    if (!sound) {
      hash_ids[i] = kNoRow;
      continue;
    }
    const int layer = i / num_columns;
    const int last_shift = i % num_columns / args.num_heads + 1;
    const int64_t* const multipliers = args.multipliers + layer * args.max_ngram_size;
    uint64_t rolling = 0;
#pragma unroll
    for (int shift = 0; shift < kMaxNgramSize; ++shift) {
      if (shift > last_shift) break;
      rolling = hash_step(rolling, sources[shift], multipliers[shift]);
    }
    hash_ids[i] = static_cast<int32_t>(rolling % static_cast<uint64_t>(args.primes[i]) +
                                       static_cast<uint64_t>(args.offsets[i]));
  }
}

//! A warp for each token, and a thread for each request.
__global__ void __launch_bounds__(kThreads)
    hash_kernel(const __grid_constant__ engram_hash_args args, uint64_t* fault) {
  const int lane = threadIdx.x % kWarpSize;
  const int64_t token = row_offset(blockIdx.x, kWarpsPerBlock) + threadIdx.x / kWarpSize;
  const int64_t request = row_offset(blockIdx.x, kThreads) + threadIdx.x;
  if (token < args.num_tokens) hash_token(args, fault, token, lane);
  if (request < args.num_requests) finish_request(args, fault, static_cast<int32_t>(request));
}

}  // namespace

cudaError_t hash_cuda(const engram_hash_args& args, uint64_t* fault, cudaStream_t stream) {
  // A call with tokens checks the boundaries of all its requests.
  const int64_t num_requests = args.num_tokens > 0 ? args.num_requests : num_windows(args);
  const int64_t num_blocks =
      std::max(ceil_div(args.num_tokens, kWarpsPerBlock), ceil_div(num_requests, kThreads));
  if (num_blocks == 0) return cudaSuccess;
  return launch(hash_kernel, dim3(static_cast<unsigned>(num_blocks)), dim3(kThreads), stream, args,
                fault);
}

}  // namespace engram
