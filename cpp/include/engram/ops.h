// SPDX-License-Identifier: Apache-2.0
//! \file ops.h
//! The ops inside the library. <op>_cpu runs threaded and returns when done; <op>_cuda checks
//! nothing, allocates nothing, enqueues on `stream` of the current device and returns the launch's
//! code. Contracts of the arrays: engram.h.
#pragma once

#include "engram/engram.h"

#if ENGRAM_CUDA
#include <cuda_runtime_api.h>
#endif

namespace engram {

//! Throw Error (ENGRAM_INVALID_ARGUMENT) where sizes, dtypes or pointers cannot be right. They read
//! no array.
void check_hash(const engram_hash_args& args);
void check_history(const engram_history_args& args);
void check_lookup(const engram_lookup_args& args);
//! The parts of check_lookup that look at no table, and at no pointer.
void check_lookup_call(const engram_lookup_args& args);
void check_lookup_sizes(const engram_lookup_args& args);
void check_stage(const engram_stage_args& args);
void check_project(const engram_project_args& args);
void check_gate(const engram_gate_args& args);

//! Bytes of a row that a thread of lookup_cuda reads at once.
constexpr int lookup_read_bytes(int32_t form) {
  return form == ENGRAM_ROWS_BF16 || form == ENGRAM_ROWS_PACKED ? 8 : 16;
}

//! What the GPU forms ask for beyond that, where they access several bytes at once: a misaligned
//! access would end the CUDA context. The other ops take any address of their elements.
void check_lookup_on_gpu(const engram_lookup_args& args);
void check_project_on_gpu(const engram_project_args& args);

//! engram_lookup_path of a lookup on a GPU: its own, or for AUTO the fastest that its workspace
//! lets it take.
int32_t lookup_path(const engram_lookup_args& args);
//! Bytes of workspace that a lookup asks for on a GPU, with AUTO those of the fastest path.
int64_t lookup_workspace_bytes(const engram_lookup_args& args);

//! num_threads 0 = all that the process may run on. hash_cpu also refuses bad ids and boundaries.
void hash_cpu(const engram_hash_args& args, int num_threads);
void history_cpu(const engram_history_args& args, int num_threads);
void lookup_cpu(const engram_lookup_args& args, int num_threads);
void stage_cpu(const engram_stage_args& args, int num_threads);
void project_cpu(const engram_project_args& args, int num_threads);
void gate_cpu(const engram_gate_args& args, int num_threads);

#if ENGRAM_CUDA
//! fault: mapped word of the current device (fault.h), or null to report nothing.
cudaError_t hash_cuda(const engram_hash_args& args, uint64_t* fault, cudaStream_t stream);
//! By lookup_path; lookup_cuda is the direct one of tables without hot rows.
cudaError_t lookup_by_path(const engram_lookup_args& args, cudaStream_t stream);
cudaError_t history_cuda(const engram_history_args& args, uint64_t* fault, cudaStream_t stream);
cudaError_t lookup_cuda(const engram_lookup_args& args, cudaStream_t stream);
cudaError_t stage_cuda(const engram_stage_args& args, cudaStream_t stream);
cudaError_t project_cuda(const engram_project_args& args, cudaStream_t stream);
cudaError_t gate_cuda(const engram_gate_args& args, cudaStream_t stream);
#endif

}  // namespace engram
