// SPDX-License-Identifier: Apache-2.0
#include "cuda_support.h"

#include <string>

#include "cuda_driver.h"
#include "engram/error.h"

namespace engram {

#if ENGRAM_CUDA
namespace {

//! CUDA writes version 13.1 as 13010.
std::string version_text(int version) { return concat(version / 1000, ".", version % 1000 / 10); }

//! First driver branch that runs what this major version of CUDA builds (minor versions are
//! compatible).
constexpr int kMinimumDriver = CUDART_VERSION >= 13000 ? 580 : 525;

std::string needs() {
  return concat("this library needs a driver for CUDA ", CUDART_VERSION / 1000, ".0 or newer (",
                kMinimumDriver, "), found ");
}

int count_devices() {
  int driver = 0;
  const cudaError_t driver_code = cudaDriverGetVersion(&driver);
  if (driver_code != cudaSuccess || driver == 0) {
    throw Error(ENGRAM_CUDA_UNAVAILABLE, concat("CUDA: ", needs(), "no driver"));
  }
  if (driver / 1000 < CUDART_VERSION / 1000) {
    throw Error(ENGRAM_CUDA_UNAVAILABLE,
                concat("CUDA: ", needs(), "one for CUDA ", version_text(driver)));
  }
  int num_devices = 0;
  const cudaError_t count_code = cudaGetDeviceCount(&num_devices);
  if (count_code != cudaSuccess) {
    cudaGetLastError();  // reported here, so no later call must see it
    throw Error(ENGRAM_CUDA_UNAVAILABLE, concat("CUDA: expected a device, found none (",
                                                cudaGetErrorString(count_code), ")"));
  }
  return num_devices;
}

}  // namespace

void require_cuda(int device) {
  static const int num_devices = count_devices();  // tried again at the next call where it throws
  if (device < 0 || device >= num_devices) {
    throw Error(ENGRAM_CUDA_UNAVAILABLE, concat("CUDA device ", device, ": expected one of the ",
                                                num_devices, " visible here, counted from 0"));
  }
}

void check_cuda(cudaError_t code, const char* what) {
  if (code == cudaSuccess) return;
  cudaGetLastError();  // reported here, so no later call must see it
  throw Error(code == cudaErrorMemoryAllocation ? ENGRAM_OUT_OF_MEMORY : ENGRAM_CUDA_ERROR,
              concat(what, ": ", cudaGetErrorString(code), " (", cudaGetErrorName(code), ")"));
}

DeviceGuard::DeviceGuard(int device) {
  const std::string what = concat("CUDA device ", device);
  check_driver(cuda_driver().ctx_get_current(&previous_), what);
  int current = -1;
  if (previous_ != nullptr) check_cuda(cudaGetDevice(&current), what.c_str());
  if (device == current) return;  // in a context of the caller's own, too
  check_cuda(cudaSetDevice(device), what.c_str());
  changed_ = true;
}

DeviceGuard::~DeviceGuard() {
  if (changed_) cuda_driver().ctx_set_current(previous_);
}

RelaxedCapture::RelaxedCapture() noexcept { cudaThreadExchangeStreamCaptureMode(&mode_); }

RelaxedCapture::~RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }

#else

void require_cuda(int device) {
  throw Error(ENGRAM_CUDA_UNAVAILABLE,
              concat("CUDA device ", device,
                     ": expected a library built with CUDA, found a CPU-only build"));
}

#endif

}  // namespace engram
