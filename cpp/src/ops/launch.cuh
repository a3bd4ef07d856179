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

//! Clusters of neighbouring blocks; dynamic shared memory.
template <typename... Parameters, typename... Arguments>
cudaError_t launch_clusters(void (*kernel)(Parameters...), dim3 grid, dim3 block,
                            int cluster_blocks, int shared_bytes, cudaStream_t stream,
                            Arguments&&... arguments) {
  cudaLaunchAttribute cluster = {};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {static_cast<unsigned>(cluster_blocks), 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.stream = stream;
  config.attrs = &cluster;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...);
}

//! Whether a vector access of `bytes` may start at each of these addresses.
template <typename... Pointers>
bool is_aligned(uintptr_t bytes, Pointers... pointers) {
  return ((reinterpret_cast<uintptr_t>(pointers) % bytes == 0) && ...);
}

}  // namespace engram
