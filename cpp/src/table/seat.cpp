// SPDX-License-Identifier: Apache-2.0
#include "table/seat.h"

#include "cuda_driver.h"
#include "cuda_support.h"
#include "engram/error.h"
#include "table/gpu_memory.h"
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

int chosen_device() {
#if ENGRAM_CUDA
  try {
    require_cuda(0);
  } catch (const Error&) {
    return -1;
  }
  if (!has_context()) return -1;
  int device = 0;
  check_cuda(cudaGetDevice(&device), "current CUDA device");
  return device;
#else
  return -1;
#endif
}

int choose_device([[maybe_unused]] int rank) {
#if ENGRAM_CUDA
  const int chosen = chosen_device();
  if (chosen >= 0) return chosen;
  int num_devices = 0;
  if (cudaGetDeviceCount(&num_devices) == cudaSuccess && num_devices > 0) return rank % num_devices;
  cudaGetLastError();  // answered here
#endif
  return -1;
}

GpuRoom gpu_room([[maybe_unused]] int device, [[maybe_unused]] int64_t needed_bytes) {
#if ENGRAM_CUDA
  if (device < 0) return {};
  const OnGpu gpu(device);
  const std::string name = pci_bus_id(device);
  size_t free_bytes = 0;
  size_t total_bytes = 0;
  check_cuda(cudaMemGetInfo(&free_bytes, &total_bytes),
             concat("GPU ", name, ": free memory").c_str());
  return {name, static_cast<int64_t>(free_bytes), needed_bytes};
#else
  return {};
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
