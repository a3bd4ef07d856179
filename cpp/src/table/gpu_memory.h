// SPDX-License-Identifier: Apache-2.0
//! \file gpu_memory.h
//! Memory of the driver, mostly of one GPU, that several processes map, each at addresses of its
//! own.
#pragma once

#if ENGRAM_CUDA
#include <sys/types.h>

#include <cstdint>
#include <new>
#include <optional>
#include <string>
#include <vector>

#include "cuda_driver.h"
#include "cuda_support.h"
#include "table/descriptor.h"

namespace engram {

//! "0000:1B:00.0": how the machine's processes all name a GPU. Throws Error.
std::string pci_bus_id(int device);

//! A DeviceGuard in which graphs that other threads capture are left alone. Throws Error.
class OnGpu {
 public:
  explicit OnGpu(int device) : guard_(std::in_place, device) {}
  //! For ends, which go on where the device cannot be had: most likely the process ends as well.
  OnGpu(int device, std::nothrow_t) noexcept;

 private:
  std::optional<DeviceGuard> guard_;
  RelaxedCapture relaxed_;
};

//! Throws Error unless memory of the device can be created here and shared by descriptors, in
//! granules of kGranuleBytes.
void check_can_share(int device);

//! How the memory is shared with other processes.
constexpr CUmemAllocationHandleType kDescriptor = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

//! A handle of the driver's memory. The memory is freed once no process has a handle, a descriptor
//! or a mapping of it, so the handle may go as soon as the memory is mapped. `label` names the
//! memory in errors.
class GpuMemory {
 public:
  //! Takes over a handle.
  explicit GpuMemory(CUmemGenericAllocationHandle handle);
  //! Of a GPU. num_bytes: whole granules. Throws Error (ENGRAM_OUT_OF_MEMORY with the numbers).
  static GpuMemory create(int device, int64_t num_bytes, const std::string& label);
  //! What another process exported; its GPU need not be visible here. Throws Error.
  static GpuMemory import(const FileDescriptor& descriptor, const std::string& label);
  GpuMemory(GpuMemory&& other) noexcept;
  GpuMemory& operator=(GpuMemory&&) = delete;
  ~GpuMemory();

  FileDescriptor export_descriptor(const std::string& label) const;
  CUmemGenericAllocationHandle handle() const { return handle_; }

 private:
  CUmemGenericAllocationHandle handle_;
  pid_t owner_;
};

//! Addresses that memory is mapped at, piece by piece. At its end all kernels of the devices that
//! may read it are waited for, then everything is unmapped; a forked child's copy does nothing.
class GpuAddresses {
 public:
  GpuAddresses(int64_t num_bytes, std::string label);
  ~GpuAddresses();
  GpuAddresses(const GpuAddresses&) = delete;
  GpuAddresses& operator=(const GpuAddresses&) = delete;

  uint8_t* data() const { return reinterpret_cast<uint8_t*>(address_); }
  //! Maps all of `memory`, which is num_bytes long, at offset `begin`. Throws Error.
  void map(int64_t begin, int64_t num_bytes, const GpuMemory& memory);
  //! Once everything is mapped: lets a device read and write, if it was not let before, and where
  //! the memory is a NUMA node's the CPUs too. Throws Error where the device cannot reach all of
  //! it.
  void allow(int device, std::optional<int> node = std::nullopt);

 private:
  struct Piece {
    int64_t begin;
    int64_t num_bytes;
  };

  std::string label_;
  int64_t num_bytes_;
  CUdeviceptr address_ = 0;
  std::vector<Piece> pieces_;
  std::vector<int> devices_;
  pid_t owner_;
};

}  // namespace engram
#endif
