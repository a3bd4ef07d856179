// SPDX-License-Identifier: Apache-2.0
#include "cuda_support.h"
#include "engram/error.h"
#include "table/cumem.h"

#if ENGRAM_CUDA
#include <array>
#include <cstring>

#include "cuda_handles.h"
#include "table/gpu_memory.h"
#endif

namespace engram {
#if ENGRAM_CUDA
namespace {

//! Does a GPU's copy of what is at `data` hold these bytes?
bool device_reads(const uint8_t* data, const std::array<uint8_t, 64>& expected) {
  void* memory = nullptr;
  check_cuda(cudaMalloc(&memory, expected.size()), "GPU memory");
  std::array<uint8_t, 64> found{};
  cudaError_t code = cudaMemcpy(memory, data, expected.size(), cudaMemcpyDefault);
  if (code == cudaSuccess) {
    code = cudaMemcpy(found.data(), memory, found.size(), cudaMemcpyDeviceToHost);
  }
  forget_error(cudaFree(memory));
  check_cuda(code, "copy from memory \"cumem\"");
  return found == expected;
}

}  // namespace
#endif

std::string cumem_problem(int device, [[maybe_unused]] const NumaPolicy& numa) {
  try {
    require_cuda(device);
#if ENGRAM_CUDA
    const OnGpu gpu(device);
    for (const int node : cumem_nodes(numa, device)) {
      const std::string label = concat("a granule on NUMA node ", node);
      const CumemMemory made = CumemMemory::create(device, {NumaPolicy::kNode, node}, 1, label);
      std::array<uint8_t, 64> bytes{};
      for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<uint8_t>(37 * i + 11);
      std::memcpy(made.data(), bytes.data(), bytes.size());
      const CumemMemory shared = CumemMemory::attach(device, made.export_descriptors(), 1, label);
      if (std::memcmp(shared.data(), bytes.data(), bytes.size()) != 0 ||
          !device_reads(shared.data(), bytes)) {
        return concat(label, ": expected the bytes that were written there, found others");
      }
    }
#endif
    return "";
  } catch (const Error& error) {
    return error.what();
  }
}

}  // namespace engram
