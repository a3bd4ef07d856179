// SPDX-License-Identifier: Apache-2.0
#include "cuda_driver.h"

#if ENGRAM_CUDA
#include "cuda_support.h"
#include "engram/error.h"

namespace engram {
namespace {

// The oldest that answer for these functions in the forms that are called.
constexpr unsigned kVirtualMemory = 11030;
constexpr unsigned kWaitValue = 11070;

template <typename Function>
void find(const char* name, Function* function, unsigned version = kVirtualMemory) {
  void* address = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  const cudaError_t code =
      cudaGetDriverEntryPointByVersion(name, &address, version, cudaEnableDefault, &found);
  if (code != cudaSuccess || found != cudaDriverEntryPointSuccess || address == nullptr) {
    cudaGetLastError();  // reported here, so no later call must see it
    throw Error(ENGRAM_CUDA_UNAVAILABLE,
                concat("CUDA: expected a driver with the function ", name, ", found none"));
  }
  *function = reinterpret_cast<Function>(address);
}

CudaDriver find_all() {
  require_cuda(0);
  CudaDriver driver{};
  find("cuGetErrorName", &driver.get_error_name);
  find("cuGetErrorString", &driver.get_error_string);
  find("cuCtxGetCurrent", &driver.ctx_get_current);
  find("cuCtxSetCurrent", &driver.ctx_set_current);
  find("cuDeviceGetAttribute", &driver.device_get_attribute);
  find("cuStreamWaitValue32", &driver.stream_wait_value32, kWaitValue);
  find("cuMemAddressReserve", &driver.mem_address_reserve);
  find("cuMemAddressFree", &driver.mem_address_free);
  find("cuMemCreate", &driver.mem_create);
  find("cuMemRelease", &driver.mem_release);
  find("cuMemMap", &driver.mem_map);
  find("cuMemUnmap", &driver.mem_unmap);
  find("cuMemSetAccess", &driver.mem_set_access);
  find("cuMemExportToShareableHandle", &driver.mem_export);
  find("cuMemImportFromShareableHandle", &driver.mem_import);
  find("cuMemGetAllocationGranularity", &driver.mem_get_granularity);
  return driver;
}

}  // namespace

const CudaDriver& cuda_driver() {
  static const CudaDriver driver = find_all();  // tried again at the next call where it throws
  return driver;
}

void check_driver(CUresult code, const std::string& what) {
  if (code == CUDA_SUCCESS) return;
  const char* name = nullptr;
  const char* text = nullptr;
  cuda_driver().get_error_name(code, &name);
  cuda_driver().get_error_string(code, &text);
  throw Error(code == CUDA_ERROR_OUT_OF_MEMORY ? ENGRAM_OUT_OF_MEMORY : ENGRAM_CUDA_ERROR,
              concat(what, ": ", text == nullptr ? "unknown error" : text, " (",
                     name == nullptr ? std::to_string(code) : name, ")"));
}

}  // namespace engram
#endif
