// SPDX-License-Identifier: Apache-2.0
#include "table/cumem.h"

#include <utility>

#include "cuda_support.h"
#include "engram/error.h"

#if ENGRAM_CUDA
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <optional>

#include "engram/row.h"
#include "parallel.h"
#include "table/gpu_memory.h"
#include "table/sealed_file.h"
#endif

namespace engram {
#if ENGRAM_CUDA
namespace {

bool can_share_as(CUdevice_attribute kind, int device) {
  int value = 0;
  check_driver(cuda_driver().device_get_attribute(&value, kind, device),
               concat("CUDA device ", device, ": how it shares memory"));
  return value != 0;
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

FileDescriptor file_of(const CUmemFabricHandle& handle, const std::string& label) {
  return make_sealed_file("trtllm-engram:fabric",
                          {reinterpret_cast<const char*>(&handle), sizeof(handle)},
                          label + ": a fabric handle's file");
}

GpuMemory import_fabric(const FileDescriptor& file, const std::string& label) {
  CUmemFabricHandle shared{};
  ENGRAM_CHECK(pread(file.get(), &shared, sizeof(shared), 0) == sizeof(shared), label,
               ": expected a file of ", sizeof(shared), " bytes with a fabric handle");
  CUmemGenericAllocationHandle handle = 0;
  check_driver(cuda_driver().mem_import(&handle, &shared, CU_MEM_HANDLE_TYPE_FABRIC),
               label + ": import of a fabric handle");
  return GpuMemory(handle);
}

FileDescriptor export_fabric(const GpuMemory& memory, const std::string& label) {
  CUmemFabricHandle handle{};
  check_driver(cuda_driver().mem_export(&handle, memory.handle(), CU_MEM_HANDLE_TYPE_FABRIC, 0),
               label + ": export as a fabric handle (it takes rights to an IMEX channel)");
  return file_of(handle, label);
}

}  // namespace

std::vector<int> cumem_nodes(const NumaPolicy& numa, int device) {
  if (numa.kind == NumaPolicy::kNode) return {numa.node};
  if (numa.kind == NumaPolicy::kInterleave) return allowed_nodes();
  return {nearest_node(device)};
}

class CumemMemory::Parts {
 public:
  //! How num_bytes are cut; nothing is allocated.
  Parts(int device, int64_t num_bytes, const std::string& label)
      : device_(device), label_(label + ": memory \"cumem\"") {
    check_nodes();
    fabric_ =
        !can_share_as(CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, device);
    if (fabric_ && !can_share_as(CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED, device)) {
      throw Error(ENGRAM_CUDA_ERROR, concat(label_, ": CUDA device ", device,
                                            ": expected memory that is shared by descriptors or "
                                            "fabric handles, found neither"));
    }
    const CUmemAllocationProp wanted = properties(nearest_node(device), fabric_);
    size_t granule = 0;
    check_driver(
        cuda_driver().mem_get_granularity(&granule, &wanted, CU_MEM_ALLOC_GRANULARITY_MINIMUM),
        label_ + ": granularity");
    const auto whole = [&](int64_t bytes) {
      return row_offset(ceil_div(bytes, static_cast<int64_t>(granule)),
                        static_cast<int64_t>(granule));
    };
    mapped_bytes_ = whole(num_bytes);
    part_bytes_ = whole(std::max(kPartBytes, ceil_div(num_bytes, kMaxParts)));
    parts_.resize(static_cast<size_t>(ceil_div(mapped_bytes_, part_bytes_)));
  }

  void create(const NumaPolicy& numa) {
    const std::vector<int> nodes = cumem_nodes(numa, device_);
    const auto num_parts = static_cast<int64_t>(parts_.size());
    parallel_for(num_parts, 1, std::min(8, usable_threads()), [&](int64_t part, int64_t) {
      const OnGpu gpu(device_);
      const auto i = static_cast<size_t>(part);
      const int node = nodes[i % nodes.size()];
      const CUmemAllocationProp wanted = properties(node, fabric_);
      CUmemGenericAllocationHandle handle = 0;
      check_driver(cuda_driver().mem_create(&handle, static_cast<size_t>(size_of(i)), &wanted, 0),
                   concat(label_, ": expected ", size_of(i), " bytes on NUMA node ", node));
      parts_[i].emplace(handle);
    });
    map();
  }

  void import(const std::vector<FileDescriptor>& descriptors) {
    ENGRAM_CHECK(descriptors.size() == parts_.size(), label_, ": expected ", parts_.size(),
                 " descriptors, found ", descriptors.size());
    for (size_t i = 0; i < parts_.size(); ++i) {
      parts_[i].emplace(fabric_ ? import_fabric(descriptors[i], label_)
                                : GpuMemory::import(descriptors[i], label_));
    }
    map();
  }

  std::vector<FileDescriptor> export_descriptors() const {
    std::vector<FileDescriptor> descriptors;
    for (const std::optional<GpuMemory>& part : parts_) {
      descriptors.push_back(fabric_ ? export_fabric(*part, label_)
                                    : part->export_descriptor(label_));
    }
    return descriptors;
  }

  uint8_t* data() const { return addresses_->data(); }
  int64_t mapped_bytes() const { return mapped_bytes_; }

 private:
  int64_t begin_of(size_t part) const {
    return row_offset(static_cast<int64_t>(part), part_bytes_);
  }
  int64_t size_of(size_t part) const {
    return std::min(part_bytes_, mapped_bytes_ - begin_of(part));
  }

  void map() {
    addresses_.emplace(mapped_bytes_, label_);
    for (size_t i = 0; i < parts_.size(); ++i) {
      addresses_->map(begin_of(i), size_of(i), *parts_[i]);
    }
    addresses_->allow(device_, nearest_node(device_));
  }

  int device_;
  std::string label_;
  bool fabric_ = false;
  int64_t mapped_bytes_ = 0;
  int64_t part_bytes_ = 0;
  std::vector<std::optional<GpuMemory>> parts_;
  std::optional<GpuAddresses> addresses_;  // unmapped before the parts' handles go
};

CumemMemory CumemMemory::create(int device, const NumaPolicy& numa, int64_t num_bytes,
                                const std::string& label) {
  check_numa_policy(numa);
  require_cuda(device);
  const OnGpu gpu(device);
  auto parts = std::make_unique<Parts>(device, num_bytes, label);
  parts->create(numa);
  return CumemMemory(std::move(parts));
}

CumemMemory CumemMemory::attach(int device, const std::vector<FileDescriptor>& descriptors,
                                int64_t num_bytes, const std::string& label) {
  require_cuda(device);
  const OnGpu gpu(device);
  auto parts = std::make_unique<Parts>(device, num_bytes, label);
  parts->import(descriptors);
  return CumemMemory(std::move(parts));
}

#else

// NOTE: without CUDA no memory is made.
class CumemMemory::Parts {
 public:
  uint8_t* data() const { return nullptr; }
  int64_t mapped_bytes() const { return 0; }
  std::vector<FileDescriptor> export_descriptors() const { return {}; }
};

CumemMemory CumemMemory::create(int device, const NumaPolicy&, int64_t, const std::string&) {
  require_cuda(device);
  return CumemMemory(nullptr);
}

CumemMemory CumemMemory::attach(int device, const std::vector<FileDescriptor>&, int64_t,
                                const std::string&) {
  require_cuda(device);
  return CumemMemory(nullptr);
}

#endif

CumemMemory::CumemMemory(std::unique_ptr<Parts> parts) : parts_(std::move(parts)) {}

CumemMemory::CumemMemory(CumemMemory&& other) noexcept = default;

CumemMemory::~CumemMemory() = default;

uint8_t* CumemMemory::data() const { return parts_->data(); }

int64_t CumemMemory::mapped_bytes() const { return parts_->mapped_bytes(); }

std::vector<FileDescriptor> CumemMemory::export_descriptors() const {
  return parts_->export_descriptors();
}

}  // namespace engram
