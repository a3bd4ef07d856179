// SPDX-License-Identifier: Apache-2.0
#include "table/cumem.h"

#include <algorithm>
#include <utility>

#include "cuda_driver.h"
#include "cuda_support.h"
#include "engram/error.h"

#if ENGRAM_CUDA
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <fstream>

#include "parallel.h"
#include "table/pages.h"
#endif

namespace engram {
#if ENGRAM_CUDA
namespace {

constexpr CUmemAllocationHandleType kDescriptor = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

//! What a driver's error is about.
std::string at(const std::string& label, const std::string& what) {
  return label + ": memory \"cumem\": " + what;
}

bool can_share_as(CUdevice_attribute kind, int device) {
  int value = 0;
  return cuda_driver().device_get_attribute(&value, kind, device) == CUDA_SUCCESS && value != 0;
}

//! Drivers before 595 (CUDA 13.2) end the process in cuMemCreate where some node has no memory of
//! its own (NCCL issue 2106). Such nodes are rare: DIMMs that are not there.
void check_nodes() {
  int version = 0;
  check_cuda(cudaDriverGetVersion(&version), "driver version");
  if (version >= 13020) return;
  std::string text;
  std::getline(std::ifstream("/sys/devices/system/node/has_cpu"), text);
  const std::vector<int> memory = memory_nodes();
  for (const int node : parse_id_list(text)) {
    if (std::find(memory.begin(), memory.end(), node) != memory.end()) continue;
    throw Error(
        ENGRAM_CUDA_ERROR,
        concat("memory \"cumem\": expected memory on every NUMA node with CPUs, or a driver "
               "for CUDA 13.2 (595), found none on node ",
               node, " and a driver for CUDA ", version / 1000, ".", version % 1000 / 10));
  }
}

int nearest_node(int device) {
  const int node = gpu_node(device);
  return node >= 0 ? node : current_node();
}

CUmemAllocationProp properties(int node, bool fabric) {
  CUmemAllocationProp wanted{};
  wanted.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  wanted.requestedHandleTypes = fabric ? CU_MEM_HANDLE_TYPE_FABRIC : kDescriptor;
  wanted.location.type = CU_MEM_LOCATION_TYPE_HOST_NUMA;
  wanted.location.id = node;
  return wanted;
}

//! A context of the device on this thread, which the calls below want.
void use_device(int device) {
  check_cuda(cudaSetDevice(device), "CUDA device");
  check_cuda(cudaFree(nullptr), "CUDA context");
}

FileDescriptor file_of(const CUmemFabricHandle& handle, const std::string& label) {
  FileDescriptor file(memfd_create("trtllm-engram:fabric", MFD_CLOEXEC));
  if (!file || pwrite(file.get(), &handle, sizeof(handle), 0) != sizeof(handle)) {
    throw Error(ENGRAM_INTERNAL_ERROR,
                concat(label, ": a fabric handle's file: ", std::strerror(errno)));
  }
  return file;
}

}  // namespace

std::vector<int> cumem_nodes(const NumaPolicy& numa, int device) {
  if (numa.kind == NumaPolicy::kNode) return {numa.node};
  if (numa.kind == NumaPolicy::kInterleave) return allowed_nodes();
  return {nearest_node(device)};
}

CumemMemory::CumemMemory(int device, int64_t num_bytes, std::string label)
    : device_(device), label_(std::move(label)), owner_(getpid()) {
  require_cuda(device);
  check_nodes();
  use_device(device);
  fabric_ = !can_share_as(CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, device);
  if (fabric_ && !can_share_as(CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED, device)) {
    throw Error(ENGRAM_CUDA_ERROR, concat(label_, ": CUDA device ", device,
                                          ": expected memory that is shared by descriptors or "
                                          "fabric handles, found neither"));
  }
  const CUmemAllocationProp wanted = properties(nearest_node(device), fabric_);
  size_t granule = 0;
  check_driver(
      cuda_driver().mem_get_granularity(&granule, &wanted, CU_MEM_ALLOC_GRANULARITY_MINIMUM),
      at(label_, "granularity"));
  const auto whole = [&](int64_t bytes) {
    const auto unit = static_cast<int64_t>(granule);
    return (bytes + unit - 1) / unit * unit;
  };
  mapped_bytes_ = whole(num_bytes);
  const int64_t part_bytes = whole(std::max(kPartBytes, (num_bytes + kMaxParts - 1) / kMaxParts));
  for (int64_t begin = 0; begin < mapped_bytes_; begin += part_bytes) {
    parts_.push_back({.begin = begin, .num_bytes = std::min(part_bytes, mapped_bytes_ - begin)});
  }
}

CumemMemory CumemMemory::create(int device, const NumaPolicy& numa, int64_t num_bytes,
                                const std::string& label) {
  check_numa_policy(numa);
  require_cuda(device);
  const DeviceGuard guard(device);
  const RelaxedCapture relaxed;
  CumemMemory memory(device, num_bytes, label);
  const std::vector<int> nodes = cumem_nodes(numa, device);
  const auto num_parts = static_cast<int64_t>(memory.parts_.size());
  parallel_for(num_parts, 1, std::min(8, usable_threads()), [&](int64_t i, int64_t) {
    use_device(device);
    Part& part = memory.parts_[static_cast<size_t>(i)];
    const int node = nodes[static_cast<size_t>(i) % nodes.size()];
    const CUmemAllocationProp wanted = properties(node, memory.fabric_);
    const std::string what = concat("expected ", part.num_bytes, " bytes on NUMA node ", node);
    check_driver(
        cuda_driver().mem_create(&part.handle, static_cast<size_t>(part.num_bytes), &wanted, 0),
        at(label, what));
  });
  memory.map();
  return memory;
}

CumemMemory CumemMemory::attach(int device, const std::vector<FileDescriptor>& descriptors,
                                int64_t num_bytes, const std::string& label) {
  require_cuda(device);
  const DeviceGuard guard(device);
  const RelaxedCapture relaxed;
  CumemMemory memory(device, num_bytes, label);
  ENGRAM_CHECK(descriptors.size() == memory.parts_.size(), label, ": expected ",
               memory.parts_.size(), " descriptors of memory \"cumem\", found ",
               descriptors.size());
  for (size_t i = 0; i < descriptors.size(); ++i) {
    const int file = descriptors[i].get();
    Part& part = memory.parts_[i];
    if (memory.fabric_) {
      CUmemFabricHandle handle{};
      ENGRAM_CHECK(pread(file, &handle, sizeof(handle), 0) == sizeof(handle), label,
                   ": expected a file of ", sizeof(handle), " bytes with a fabric handle");
      check_driver(cuda_driver().mem_import(&part.handle, &handle, CU_MEM_HANDLE_TYPE_FABRIC),
                   at(label, "import of a fabric handle"));
    } else {
      check_driver(
          cuda_driver().mem_import(
              &part.handle, reinterpret_cast<void*>(static_cast<uintptr_t>(file)), kDescriptor),
          at(label, "import of a descriptor"));
    }
  }
  memory.map();
  return memory;
}

void CumemMemory::map() {
  CUdeviceptr address = 0;
  const auto total = static_cast<size_t>(mapped_bytes_);
  check_driver(cuda_driver().mem_address_reserve(&address, total, kHugePageBytes, 0, 0),
               at(label_, "range of addresses"));
  address_ = address;
  for (Part& part : parts_) {
    check_driver(cuda_driver().mem_map(address_ + static_cast<uint64_t>(part.begin),
                                       static_cast<size_t>(part.num_bytes), 0, part.handle, 0),
                 at(label_, "mapping"));
    part.mapped = true;
  }
  std::array<CUmemAccessDesc, 2> access{};
  for (CUmemAccessDesc& entry : access) entry.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  access[0].location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  access[0].location.id = device_;
  access[1].location.type = CU_MEM_LOCATION_TYPE_HOST_NUMA;  // any CPU: the node is ignored
  access[1].location.id = nearest_node(device_);
  check_driver(cuda_driver().mem_set_access(address_, total, access.data(), access.size()),
               at(label_, "access for the CPU and the GPU"));
}

std::vector<FileDescriptor> CumemMemory::export_descriptors() const {
  std::vector<FileDescriptor> descriptors;
  for (const Part& part : parts_) {
    if (fabric_) {
      CUmemFabricHandle handle{};
      check_driver(cuda_driver().mem_export(&handle, part.handle, CU_MEM_HANDLE_TYPE_FABRIC, 0),
                   at(label_, "export as a fabric handle (it takes rights to an IMEX channel)"));
      descriptors.push_back(file_of(handle, label_));
    } else {
      int file = -1;
      check_driver(cuda_driver().mem_export(&file, part.handle, kDescriptor, 0),
                   at(label_, "export as a descriptor"));
      descriptors.emplace_back(file);
      fcntl(file, F_SETFD, FD_CLOEXEC);
    }
  }
  return descriptors;
}

void CumemMemory::release() noexcept {
  if (parts_.empty() || getpid() != owner_) return;
  // Errors have nobody to go to: at the process's end CUDA is gone already, and with it all this.
  try {
    const DeviceGuard guard(device_);
    const RelaxedCapture relaxed;
    cudaDeviceSynchronize();  // an unmapping does not wait for kernels that still read
    cudaGetLastError();
    for (const Part& part : parts_) {
      if (part.mapped) {
        cuda_driver().mem_unmap(address_ + static_cast<uint64_t>(part.begin),
                                static_cast<size_t>(part.num_bytes));
      }
      if (part.handle != 0) cuda_driver().mem_release(part.handle);
    }
    if (address_ != 0) cuda_driver().mem_address_free(address_, static_cast<size_t>(mapped_bytes_));
  } catch (const Error&) {
    return;
  }
}

#else

CumemMemory::CumemMemory(int device, int64_t /*num_bytes*/, std::string label)
    : device_(device), label_(std::move(label)), owner_(0) {
  require_cuda(device);
}

CumemMemory CumemMemory::create(int device, const NumaPolicy& /*numa*/, int64_t num_bytes,
                                const std::string& label) {
  return CumemMemory(device, num_bytes, label);
}

CumemMemory CumemMemory::attach(int device, const std::vector<FileDescriptor>& /*descriptors*/,
                                int64_t num_bytes, const std::string& label) {
  return CumemMemory(device, num_bytes, label);
}

std::vector<FileDescriptor> CumemMemory::export_descriptors() const { return {}; }

void CumemMemory::release() noexcept {}

#endif

CumemMemory::CumemMemory(CumemMemory&& other) noexcept
    : device_(other.device_),
      label_(std::move(other.label_)),
      fabric_(other.fabric_),
      owner_(other.owner_),
      address_(std::exchange(other.address_, 0)),
      mapped_bytes_(other.mapped_bytes_),
      parts_(std::move(other.parts_)) {
  other.parts_.clear();
}

CumemMemory::~CumemMemory() { release(); }

}  // namespace engram
