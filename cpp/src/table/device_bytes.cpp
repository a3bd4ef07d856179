// SPDX-License-Identifier: Apache-2.0
#include "table/device_bytes.h"

#if ENGRAM_CUDA
#include <unistd.h>

#include "cuda_handles.h"
#include "engram/error.h"
#include "table/gpu_memory.h"

namespace engram {

DeviceBytes::DeviceBytes(int device, int64_t num_bytes, const std::string& label)
    : device_(device), owner_(getpid()) {
  void* memory = nullptr;
  size_t free_bytes = 0;
  size_t total_bytes = 0;
  check_cuda(cudaMemGetInfo(&free_bytes, &total_bytes), label.c_str());
  const std::string what = concat(label, ": expected ", num_bytes, " bytes of memory on GPU ",
                                  pci_bus_id(device), ", found ", free_bytes);
  check_cuda(cudaMalloc(&memory, static_cast<size_t>(num_bytes)), what.c_str());
  bytes_ = static_cast<uint8_t*>(memory);
}

DeviceBytes& DeviceBytes::operator=(DeviceBytes&& other) noexcept {
  std::swap(bytes_, other.bytes_);
  std::swap(device_, other.device_);
  std::swap(owner_, other.owner_);
  return *this;
}

bool DeviceBytes::is_owned() const { return bytes_ != nullptr && getpid() == owner_; }

DeviceBytes::~DeviceBytes() {
  if (!is_owned()) return;
  const OnGpu gpu(device_, std::nothrow);
  forget_error(cudaFree(bytes_));
}

}  // namespace engram
#endif
