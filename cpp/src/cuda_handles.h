// SPDX-License-Identifier: Apache-2.0
//! \file cuda_handles.h
//! Streams and events that destroy themselves, and what other ends have in common with theirs.
#pragma once

#include <cuda_runtime_api.h>

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

}  // namespace engram
