// SPDX-License-Identifier: Apache-2.0
//! \file cuda_handles.h
//! Streams, events and pinned memory that end themselves, and what other ends have in common with
//! theirs.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <type_traits>

#include "cuda_support.h"

namespace engram {

//! For ends, which can tell nobody of an error: no later call is to see it.
inline void forget_error(cudaError_t code) {
  if (code != cudaSuccess) cudaGetLastError();
}

struct DestroyStream {
  void operator()(cudaStream_t stream) const { forget_error(cudaStreamDestroy(stream)); }
};
struct DestroyEvent {
  void operator()(cudaEvent_t event) const { forget_error(cudaEventDestroy(event)); }
};
using Stream = std::unique_ptr<std::remove_pointer_t<cudaStream_t>, DestroyStream>;
using Event = std::unique_ptr<std::remove_pointer_t<cudaEvent_t>, DestroyEvent>;

//! A stream of the current device that the legacy default stream does not wait for. Throws Error,
//! which begins with `what`.
inline Stream make_stream(const char* what = "new stream") {
  cudaStream_t stream = nullptr;
  check_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), what);
  return Stream(stream);
}

//! An event without timing. Throws Error, which begins with `what`.
inline Event make_event(const char* what = "new event") {
  cudaEvent_t event = nullptr;
  check_cuda(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), what);
  return Event(event);
}

struct FreePinned {
  void operator()(uint8_t* bytes) const {
    const RelaxedCapture relaxed;
    forget_error(cudaFreeHost(bytes));
  }
};
using PinnedBytes = std::unique_ptr<uint8_t, FreePinned>;

//! Throws Error, which begins with `what`.
inline PinnedBytes make_pinned(int64_t num_bytes, const char* what) {
  void* bytes = nullptr;
  check_cuda(cudaMallocHost(&bytes, static_cast<size_t>(num_bytes)), what);
  return PinnedBytes(static_cast<uint8_t*>(bytes));
}

}  // namespace engram
