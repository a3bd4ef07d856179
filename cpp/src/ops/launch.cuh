// SPDX-License-Identifier: Apache-2.0
//! \file launch.cuh
//! Kernel launches that return their own code: <<<>>> with cudaGetLastError would also take, and
//! clear, what other code of the process left behind.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <utility>

namespace engram {

template <typename... Parameters, typename... Arguments>
cudaError_t launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, cudaStream_t stream,
                   Arguments&&... arguments) {
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = block;
  config.stream = stream;
  return cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...);
}

//! Whether a vector access of `bytes` may start at each of these addresses.
template <typename... Pointers>
bool is_aligned(uintptr_t bytes, Pointers... pointers) {
  return ((reinterpret_cast<uintptr_t>(pointers) % bytes == 0) && ...);
}

}  // namespace engram
