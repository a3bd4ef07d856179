// SPDX-License-Identifier: Apache-2.0
#include <cudaTypedefs.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <map>
#include <mutex>
#include <thread>

#include "fake_gpus.h"
#include "table/parts.h"

namespace engram::fake {
namespace {

constexpr const char* kNamePrefix = "fake-gpu-";
std::mutex mutex;

//! A handle is a descriptor of the memory, plus one; whose GPU it is stands in the memory's name.
int descriptor_of(CUmemGenericAllocationHandle handle) { return static_cast<int>(handle) - 1; }

std::string owner_of(int descriptor) {
  const auto link = std::filesystem::read_symlink("/proc/self/fd/" + std::to_string(descriptor));
  const std::string name = link.string();
  const size_t begin = name.find(kNamePrefix);
  if (begin == std::string::npos) return "";
  return name.substr(begin + strlen(kNamePrefix), strlen("0000:00:00.0"));
}

struct Mapped {
  size_t num_bytes;
  std::string owner;
};
std::map<CUdeviceptr, Mapped> mapped;
std::map<CUdeviceptr, size_t> reserved;

constexpr CUresult kRefused = CUDA_ERROR_OUT_OF_MEMORY;

void* pointer(CUdeviceptr address) { return reinterpret_cast<void*>(address); }

CUresult ctx_get_current(CUcontext* context) {
  *context = current_context;
  return refuses() ? kRefused : CUDA_SUCCESS;
}

CUresult ctx_set_current(CUcontext context) {
  current_context = context;
  return CUDA_SUCCESS;
}

CUresult device_get_attribute(int* value, CUdevice_attribute, CUdevice) {
  if (refuses()) return kRefused;
  *value = machine().shares ? 1 : 0;
  return CUDA_SUCCESS;
}

CUresult stream_wait_value32(CUstream stream, CUdeviceptr address, cuuint32_t value, unsigned) {
  const auto* const flag = reinterpret_cast<const uint32_t*>(address);
  const cudaError_t code = enqueue(stream, [=] {
    while (__atomic_load_n(flag, __ATOMIC_ACQUIRE) != value) std::this_thread::yield();
  });
  return code == cudaSuccess ? CUDA_SUCCESS : CUDA_ERROR_UNKNOWN;
}

CUresult get_error_name(CUresult code, const char** text) {
  *text = code == CUDA_ERROR_INVALID_DEVICE  ? "CUDA_ERROR_INVALID_DEVICE"
          : code == CUDA_ERROR_OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY"
                                             : "CUDA_ERROR_INVALID_VALUE";
  return CUDA_SUCCESS;
}

CUresult get_error_string(CUresult code, const char** text) {
  *text = code == CUDA_ERROR_INVALID_DEVICE  ? "invalid device ordinal"
          : code == CUDA_ERROR_OUT_OF_MEMORY ? "out of memory"
                                             : "invalid argument";
  return CUDA_SUCCESS;
}

CUresult mem_get_granularity(size_t* bytes, const CUmemAllocationProp*,
                             CUmemAllocationGranularity_flags) {
  if (refuses()) return kRefused;
  *bytes = static_cast<size_t>(kGranuleBytes);
  return CUDA_SUCCESS;
}

CUresult mem_address_reserve(CUdeviceptr* address, size_t num_bytes, size_t alignment, CUdeviceptr,
                             unsigned long long) {
  if (refuses()) return kRefused;
  if (num_bytes % kGranuleBytes != 0) return CUDA_ERROR_INVALID_VALUE;
  void* const memory = mmap(nullptr, num_bytes + alignment, PROT_NONE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  const auto begin = reinterpret_cast<CUdeviceptr>(memory);
  const CUdeviceptr aligned = (begin + alignment - 1) / alignment * alignment;
  if (aligned > begin) munmap(memory, aligned - begin);
  munmap(pointer(aligned + num_bytes), begin + alignment - aligned);
  const std::lock_guard lock(mutex);
  reserved[aligned] = num_bytes;
  ++machine().num_reserved;
  *address = aligned;
  return CUDA_SUCCESS;
}

CUresult mem_address_free(CUdeviceptr address, size_t num_bytes) {
  const bool says_no = refuses();
  const std::lock_guard lock(mutex);
  const auto found = reserved.find(address);
  if (found == reserved.end() || found->second != num_bytes) return CUDA_ERROR_INVALID_VALUE;
  const auto inside = mapped.lower_bound(address);
  if (inside != mapped.end() && inside->first < address + num_bytes)
    return CUDA_ERROR_INVALID_VALUE;
  munmap(pointer(address), num_bytes);
  reserved.erase(found);
  --machine().num_reserved;
  return says_no ? kRefused : CUDA_SUCCESS;
}

CUresult mem_create(CUmemGenericAllocationHandle* handle, size_t num_bytes,
                    const CUmemAllocationProp* memory, unsigned long long) {
  if (refuses()) return kRefused;
  const std::string owner = machine().visible.at(static_cast<size_t>(memory->location.id));
  if (num_bytes % kGranuleBytes != 0 || num_bytes == 0) return CUDA_ERROR_INVALID_VALUE;
  const int descriptor = memfd_create((kNamePrefix + owner).c_str(), MFD_CLOEXEC);
  if (descriptor < 0 || ftruncate(descriptor, static_cast<off_t>(num_bytes)) != 0) std::abort();
  const std::lock_guard lock(mutex);
  ++machine().num_handles;
  machine().created_bytes += static_cast<int64_t>(num_bytes);
  *handle = static_cast<CUmemGenericAllocationHandle>(descriptor) + 1;
  return CUDA_SUCCESS;
}

CUresult mem_release(CUmemGenericAllocationHandle handle) {
  const bool says_no = refuses();
  const std::lock_guard lock(mutex);
  --machine().num_handles;
  if (close(descriptor_of(handle)) != 0) return CUDA_ERROR_INVALID_VALUE;
  return says_no ? kRefused : CUDA_SUCCESS;
}

CUresult mem_export(void* to, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType,
                    unsigned long long) {
  if (refuses()) return kRefused;
  *static_cast<int*>(to) = dup(descriptor_of(handle));
  return CUDA_SUCCESS;
}

CUresult mem_import(CUmemGenericAllocationHandle* handle, void* from, CUmemAllocationHandleType) {
  if (refuses()) return kRefused;
  const int descriptor = static_cast<int>(reinterpret_cast<uintptr_t>(from));
  if (owner_of(descriptor).empty()) return CUDA_ERROR_INVALID_VALUE;
  const std::lock_guard lock(mutex);
  ++machine().num_handles;
  *handle = static_cast<CUmemGenericAllocationHandle>(dup(descriptor)) + 1;
  return CUDA_SUCCESS;
}

//! Whole memory alone, in reserved addresses that nothing has: as the driver wants it.
CUresult mem_map(CUdeviceptr address, size_t num_bytes, size_t offset,
                 CUmemGenericAllocationHandle handle, unsigned long long) {
  if (refuses()) return kRefused;
  const int descriptor = descriptor_of(handle);
  const auto size = lseek(descriptor, 0, SEEK_END);
  const std::lock_guard lock(mutex);
  auto range = reserved.upper_bound(address);
  if (range == reserved.begin()) return CUDA_ERROR_INVALID_VALUE;
  --range;
  auto next = mapped.lower_bound(address);
  const bool overlaps = (next != mapped.end() && next->first < address + num_bytes) ||
                        (next != mapped.begin() &&
                         std::prev(next)->first + std::prev(next)->second.num_bytes > address);
  if (offset != 0 || size != static_cast<off_t>(num_bytes) || address % kGranuleBytes != 0 ||
      address + num_bytes > range->first + range->second || overlaps) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (mmap(pointer(address), num_bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, descriptor, 0) ==
      MAP_FAILED) {
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  mapped[address] = {num_bytes, owner_of(descriptor)};
  ++machine().num_mapped;
  return CUDA_SUCCESS;
}

CUresult mem_unmap(CUdeviceptr address, size_t num_bytes) {
  const bool says_no = refuses();
  const std::lock_guard lock(mutex);
  const auto found = mapped.find(address);
  if (found == mapped.end() || found->second.num_bytes != num_bytes) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  mmap(pointer(address), num_bytes, PROT_NONE,
       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  mapped.erase(found);
  --machine().num_mapped;
  return says_no ? kRefused : CUDA_SUCCESS;
}

CUresult mem_set_access(CUdeviceptr address, size_t num_bytes, const CUmemAccessDesc* access,
                        size_t) {
  if (refuses()) return kRefused;
  const std::string reader = machine().visible.at(static_cast<size_t>(access->location.id));
  const std::lock_guard lock(mutex);
  CUdeviceptr place = address;
  while (place < address + num_bytes) {
    const auto piece = mapped.find(place);
    if (piece == mapped.end()) return CUDA_ERROR_INVALID_VALUE;  // not all is mapped
    const auto& [piece_bytes, owner] = piece->second;
    if (machine().refused.count({reader, owner}) != 0) return CUDA_ERROR_INVALID_DEVICE;
    if (machine().garbled.count({reader, owner}) != 0) {
      mmap(pointer(place), piece_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    }
    mprotect(pointer(place), piece_bytes, PROT_READ | PROT_WRITE);
    place += piece_bytes;
  }
  return place == address + num_bytes ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

template <typename Function>
void* address_of(Function function) {
  return reinterpret_cast<void*>(function);
}

}  // namespace

Machine& machine() {
  static Machine machine;
  return machine;
}

bool refuses() {
  const std::lock_guard lock(mutex);
  const int64_t call = machine().num_calls++;
  if (call == machine().die_at) raise(SIGKILL);
  return call == machine().refuse_at;
}

void* driver_function(const std::string& name) {
  static const std::map<std::string, void*> functions{
      {"cuGetErrorName", address_of(get_error_name)},
      {"cuGetErrorString", address_of(get_error_string)},
      {"cuCtxGetCurrent", address_of(ctx_get_current)},
      {"cuCtxSetCurrent", address_of(ctx_set_current)},
      {"cuDeviceGetAttribute", address_of(device_get_attribute)},
      {"cuStreamWaitValue32", address_of(stream_wait_value32)},
      {"cuMemAddressReserve", address_of(mem_address_reserve)},
      {"cuMemAddressFree", address_of(mem_address_free)},
      {"cuMemCreate", address_of(mem_create)},
      {"cuMemRelease", address_of(mem_release)},
      {"cuMemMap", address_of(mem_map)},
      {"cuMemUnmap", address_of(mem_unmap)},
      {"cuMemSetAccess", address_of(mem_set_access)},
      {"cuMemExportToShareableHandle", address_of(mem_export)},
      {"cuMemImportFromShareableHandle", address_of(mem_import)},
      {"cuMemGetAllocationGranularity", address_of(mem_get_granularity)},
  };
  const auto found = functions.find(name);
  return found == functions.end() ? nullptr : found->second;
}

}  // namespace engram::fake
