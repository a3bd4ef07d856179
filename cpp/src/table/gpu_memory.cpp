// SPDX-License-Identifier: Apache-2.0
#include "table/gpu_memory.h"

#if ENGRAM_CUDA
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <utility>

#include "cuda_handles.h"
#include "engram/error.h"
#include "table/parts.h"

namespace engram {
namespace {

CUmemAllocationProp memory_of(int device) {
  CUmemAllocationProp memory{};
  memory.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  memory.requestedHandleTypes = kDescriptor;
  memory.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  memory.location.id = device;
  return memory;
}

void check_attribute(int device, CUdevice_attribute attribute, const char* what) {
  int has = 0;
  check_driver(cuda_driver().device_get_attribute(&has, attribute, device),
               concat("CUDA device ", device, ": ", what));
  if (has == 0) {
    throw Error(ENGRAM_CUDA_UNAVAILABLE,
                concat("GPU ", pci_bus_id(device), ": expected ", what, ", found none"));
  }
}

}  // namespace

OnGpu::OnGpu(int device, std::nothrow_t) noexcept {
  try {
    guard_.emplace(device);
  } catch (const std::exception&) {
    return;
  }
}

std::string pci_bus_id(int device) {
  std::array<char, 32> text{};
  check_cuda(cudaDeviceGetPCIBusId(text.data(), static_cast<int>(text.size()), device),
             concat("CUDA device ", device, ": PCI bus id").c_str());
  return text.data();
}

void check_can_share(int device) {
  require_cuda(device);
  check_attribute(device, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
                  "memory that is mapped in steps (cuMemMap)");
  check_attribute(device, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
                  "memory that is shared by file descriptors");
  size_t granule = 0;
  const CUmemAllocationProp memory = memory_of(device);
  check_driver(
      cuda_driver().mem_get_granularity(&granule, &memory, CU_MEM_ALLOC_GRANULARITY_MINIMUM),
      concat("CUDA device ", device, ": granularity of memory"));
  ENGRAM_CHECK(granule > 0 && kGranuleBytes % static_cast<int64_t>(granule) == 0, "GPU ",
               pci_bus_id(device), ": expected memory in granules that divide ", kGranuleBytes,
               " bytes, found ", granule);
}

GpuMemory::GpuMemory(CUmemGenericAllocationHandle handle) : handle_(handle), owner_(getpid()) {}

GpuMemory::GpuMemory(GpuMemory&& other) noexcept
    : handle_(std::exchange(other.handle_, 0)), owner_(other.owner_) {}

GpuMemory::~GpuMemory() {
  if (handle_ != 0 && owner_ == getpid()) cuda_driver().mem_release(handle_);
}

GpuMemory GpuMemory::create(int device, int64_t num_bytes, const std::string& label) {
  CUmemGenericAllocationHandle handle = 0;
  const CUmemAllocationProp memory = memory_of(device);
  check_driver(
      cuda_driver().mem_create(&handle, static_cast<size_t>(num_bytes), &memory, 0),
      concat(label, ": expected ", num_bytes, " bytes of memory on GPU ", pci_bus_id(device)));
  return GpuMemory(handle);
}

GpuMemory GpuMemory::import(const FileDescriptor& descriptor, const std::string& label) {
  CUmemGenericAllocationHandle handle = 0;
  auto* const shared = reinterpret_cast<void*>(static_cast<uintptr_t>(descriptor.get()));
  check_driver(cuda_driver().mem_import(&handle, shared, kDescriptor),
               label + ": import of another process's memory");
  return GpuMemory(handle);
}

FileDescriptor GpuMemory::export_descriptor(const std::string& label) const {
  int descriptor = -1;
  check_driver(cuda_driver().mem_export(&descriptor, handle_, kDescriptor, 0),
               label + ": descriptor for its memory");
  fcntl(descriptor, F_SETFD, FD_CLOEXEC);
  return FileDescriptor(descriptor);
}

GpuAddresses::GpuAddresses(int64_t num_bytes, std::string label)
    : label_(std::move(label)), num_bytes_(num_bytes), owner_(getpid()) {
  check_driver(cuda_driver().mem_address_reserve(&address_, static_cast<size_t>(num_bytes),
                                                 static_cast<size_t>(kGranuleBytes), 0, 0),
               concat(label_, ": a range of ", num_bytes, " bytes of addresses"));
}

// Errors are passed over: the process may be ending, and the driver with it.
GpuAddresses::~GpuAddresses() {
  if (owner_ != getpid()) return;
  for (const int device : devices_) {
    const OnGpu gpu(device, std::nothrow);
    // NOTE: unlike cudaFree, an unmapping does not wait for what still reads.
    forget_error(cudaDeviceSynchronize());
  }
  const RelaxedCapture relaxed;
  for (const Piece& piece : pieces_) {
    cuda_driver().mem_unmap(address_ + static_cast<CUdeviceptr>(piece.begin),
                            static_cast<size_t>(piece.num_bytes));
  }
  cuda_driver().mem_address_free(address_, static_cast<size_t>(num_bytes_));
}

void GpuAddresses::map(int64_t begin, int64_t num_bytes, const GpuMemory& memory) {
  pieces_.reserve(pieces_.size() + 1);
  // Offset 0, as the driver demands: each piece of a range is memory of its own.
  check_driver(cuda_driver().mem_map(address_ + static_cast<CUdeviceptr>(begin),
                                     static_cast<size_t>(num_bytes), 0, memory.handle(), 0),
               concat(label_, ": mapping of ", num_bytes, " bytes at ", begin));
  pieces_.push_back({begin, num_bytes});
}

void GpuAddresses::allow(int device, std::optional<int> node) {
  if (std::find(devices_.begin(), devices_.end(), device) != devices_.end()) return;
  devices_.reserve(devices_.size() + 1);
  std::array<CUmemAccessDesc, 2> access{};
  for (CUmemAccessDesc& each : access) each.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  access[0].location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  access[0].location.id = device;
  access[1].location.type = CU_MEM_LOCATION_TYPE_HOST_NUMA;  // any CPU: the node is ignored
  access[1].location.id = node.value_or(0);
  check_driver(cuda_driver().mem_set_access(address_, static_cast<size_t>(num_bytes_),
                                            access.data(), node ? 2 : 1),
               concat(label_, ": access for GPU ", pci_bus_id(device)));
  devices_.push_back(device);
}

}  // namespace engram
#endif
