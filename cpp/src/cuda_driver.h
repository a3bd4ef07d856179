// SPDX-License-Identifier: Apache-2.0
//! \file cuda_driver.h
//! The driver's functions for contexts, for waiting, and for memory that is created, shared and
//! mapped in steps.
//! The library links no libcuda: it must load where there is no driver.
#pragma once

#if ENGRAM_CUDA
#include <cudaTypedefs.h>

#include <string>

namespace engram {

struct CudaDriver {
  PFN_cuGetErrorName_v6000 get_error_name;
  PFN_cuGetErrorString_v6000 get_error_string;
  PFN_cuCtxGetCurrent_v4000 ctx_get_current;
  PFN_cuCtxSetCurrent_v4000 ctx_set_current;
  PFN_cuDeviceGetAttribute_v2000 device_get_attribute;
  PFN_cuStreamWaitValue32_v11070 stream_wait_value32;
  PFN_cuMemAddressReserve_v10020 mem_address_reserve;
  PFN_cuMemAddressFree_v10020 mem_address_free;
  PFN_cuMemCreate_v10020 mem_create;
  PFN_cuMemRelease_v10020 mem_release;
  PFN_cuMemMap_v10020 mem_map;
  PFN_cuMemUnmap_v10020 mem_unmap;
  PFN_cuMemSetAccess_v10020 mem_set_access;
  PFN_cuMemExportToShareableHandle_v10020 mem_export;
  PFN_cuMemImportFromShareableHandle_v10020 mem_import;
  PFN_cuMemGetAllocationGranularity_v10020 mem_get_granularity;
};

//! Of the driver of this process. Throws Error (ENGRAM_CUDA_UNAVAILABLE): no driver, or one without
//! these functions. Thread-safe.
const CudaDriver& cuda_driver();

//! Throws Error (ENGRAM_CUDA_ERROR, or ENGRAM_OUT_OF_MEMORY) "<what>: <the driver's text>" unless
//! the code is CUDA_SUCCESS.
void check_driver(CUresult code, const std::string& what);

}  // namespace engram
#endif
