// SPDX-License-Identifier: Apache-2.0
#include "engram/history.h"
#include "engram/ops.h"
#include "fault.h"
#include "launch.cuh"

namespace engram {
namespace {

constexpr int kThreads = 128;

//! First token of a context chunk: the lengths of those before it.
__device__ int64_t chunk_begin(const engram_history_args& args, int32_t request) {
  __shared__ unsigned long long total;
  if (threadIdx.x == 0) total = 0;
  __syncthreads();
  unsigned long long part = 0;
  const int32_t end = min(request, args.num_contexts);
  for (int32_t i = static_cast<int32_t>(threadIdx.x); i < end; i += kThreads) {
    part += static_cast<unsigned long long>(max(args.context_lengths[i], 0));
  }
  if (part != 0) atomicAdd(&total, part);
  __syncthreads();
  return static_cast<int64_t>(total);
}

//! A block is one request. Slots that are read lie before the request's first position, and those
//! that are written from there on; a request writes to its own blocks alone.
__global__ void history_kernel(const engram_history_args args, uint64_t* fault) {
  const auto request = static_cast<int32_t>(blockIdx.x);
  const auto thread = static_cast<int32_t>(threadIdx.x);
  const int window = args.max_ngram_size - 1;
  const HistorySpan span = history_span(args, request, chunk_begin(args, request));
  const bool sound = is_sound(args, span);

  // Check the past.
  bool lost = !sound;
  if (sound) {
    for (int32_t p = first_checked(args, span.position) + thread; p < span.position;
         p += kThreads) {
      if (holds(args, request, p)) continue;
      store_fault(fault, FaultCode::kHistory, request, p);
      lost = true;
    }
  } else if (thread == 0) {
    store_fault(fault, FaultCode::kHistory, request, span.position);
  }
  lost = __syncthreads_or(lost) != 0;

  // Hand it on.
  if (thread == 0) {
    args.cu_seqlens[request] =
        static_cast<int32_t>(min(max(span.begin, int64_t{0}), args.num_tokens));
    if (request == args.num_requests - 1) {
      args.cu_seqlens[args.num_requests] = static_cast<int32_t>(args.num_tokens);
    }
  }
  for (int column = thread; column < window; column += kThreads) {
    args.lookback_ids[row_offset(request, window) + column] =
        lost ? kLostId : past_id(args, request, span.position - 1 - column);
  }

  // Positions of a request that is not sound only have to lie past the window.
  const int64_t end = min(span.begin + span.count, args.num_tokens);
  const int32_t position = sound ? span.position : window;
  for (int64_t token = max(span.begin, int64_t{0}) + thread; token < end; token += kThreads) {
    args.positions[token] = position + static_cast<int32_t>(token - span.begin);
  }
  if (!sound) return;
  for (int32_t index = thread; index < span.count; index += kThreads) {
    HistorySlot* const slot = slot_at(args, request, span.position + index);
    if (slot == nullptr) {
      store_fault(fault, FaultCode::kHistory, request, span.position + index);
    } else {
      *slot = new_slot(args, request, span, index);
    }
  }
}

}  // namespace

cudaError_t history_cuda(const engram_history_args& args, uint64_t* fault, cudaStream_t stream) {
  const auto grid = static_cast<unsigned>(args.num_requests);
  return launch(history_kernel, dim3(grid), dim3(kThreads), stream, args, fault);
}

}  // namespace engram
