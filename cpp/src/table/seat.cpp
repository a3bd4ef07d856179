// SPDX-License-Identifier: Apache-2.0
#include "table/seat.h"

#include "cuda_driver.h"
#include "cuda_support.h"
#include "engram/error.h"
#include "table/launcher.h"

namespace engram {
#if ENGRAM_CUDA
namespace {

//! Whether the calling thread has a CUDA context, which is how threads have chosen a GPU.
bool has_context() {
  CUcontext context = nullptr;
  return cuda_driver().ctx_get_current(&context) == CUDA_SUCCESS && context != nullptr;
}

}  // namespace
#endif

int choose_device([[maybe_unused]] int rank) {
#if ENGRAM_CUDA
  try {
    require_cuda(0);
  } catch (const Error&) {
    return -1;
  }
  int device = 0;
  check_cuda(cudaGetDevice(&device), "current CUDA device");
  if (device != 0 || has_context()) return device;
  int num_devices = 1;
  check_cuda(cudaGetDeviceCount(&num_devices), "CUDA devices");
  return rank % num_devices;
#else
  return -1;
#endif
}

GroupOptions group_options(const GroupSettings& settings) {
  // With rank and size given, what a launcher says is not this group's business.
  GroupOptions options = settings.size ? GroupOptions{} : launcher_group();
  if (settings.size) {
    options.rank = *settings.rank;
    options.size = *settings.size;
  }
  if (!settings.name.empty()) options.name = settings.name;
  options.socket = settings.socket;
  if (settings.timeout_s) options.timeout_s = *settings.timeout_s;
  return options;
}

}  // namespace engram
