// SPDX-License-Identifier: Apache-2.0
//! \file cuda_support.h
//! Whether CUDA can be used here, and CUDA's codes as errors.
#pragma once

#if ENGRAM_CUDA
#include <cuda.h>
#include <cuda_runtime_api.h>
#endif

namespace engram {

//! Throws Error (ENGRAM_CUDA_UNAVAILABLE), in one line what is needed and what was found: a
//! CPU-only build, no driver, a driver too old, no such device.
void require_cuda(int device);

#if ENGRAM_CUDA
//! Throws Error (ENGRAM_CUDA_ERROR, or ENGRAM_OUT_OF_MEMORY) "<what>: <CUDA's text>" unless the
//! code is cudaSuccess.
void check_cuda(cudaError_t code, const char* what);

//! A scope on a device, with its context. Afterwards the thread has the context that it had, which
//! may be none: to set a device back would make a context, memory of that GPU, where there was
//! none. Throws Error.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  CUcontext previous_ = nullptr;
  bool changed_ = false;
};

//! Lets this thread allocate and free in a scope while any thread captures a graph in global mode.
//! Nothing in the scope may touch a stream that captures. For destructors too: where CUDA cannot
//! change the mode, the calls in the scope fail and say so.
class RelaxedCapture {
 public:
  RelaxedCapture() noexcept;
  ~RelaxedCapture();
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};
#endif

}  // namespace engram
