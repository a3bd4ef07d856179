// SPDX-License-Identifier: Apache-2.0
//! \file project_kernels.h
//! The kernels of engram_project. Each takes any number of tokens but 0; what else they need:
//! project.cu. num_blocks: how many run at once.
#pragma once

#include <cuda_runtime_api.h>

#include "engram/engram.h"

namespace engram {

cudaError_t project_generic(const engram_project_args& args, int num_blocks, cudaStream_t stream);

//! Whether this build has the code of these for this device: it needs architecture 90a, not 90.
bool project_sm90_is_built();

//! Warpgroup products of compute capability 9.0, named by the tokens of a tile; the wide ones have
//! 192 outputs a block, and do apart what whole rounds of that leave over.
cudaError_t project_sm90_16(const engram_project_args& args, int num_blocks, cudaStream_t stream);
cudaError_t project_sm90_32(const engram_project_args& args, int num_blocks, cudaStream_t stream);
cudaError_t project_sm90_64(const engram_project_args& args, int num_blocks, cudaStream_t stream);
cudaError_t project_sm90_128(const engram_project_args& args, int num_blocks, cudaStream_t stream);
cudaError_t project_sm90_256(const engram_project_args& args, int num_blocks, cudaStream_t stream);
cudaError_t project_sm90_wide_192(const engram_project_args& args, int num_blocks,
                                  cudaStream_t stream);
cudaError_t project_sm90_wide_256(const engram_project_args& args, int num_blocks,
                                  cudaStream_t stream);

}  // namespace engram
