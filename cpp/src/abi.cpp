// SPDX-License-Identifier: Apache-2.0
// The C ABI: catches every exception, keeps its text for the thread, and sends each op to the CPU
// or to a GPU.
#include <cstddef>
#include <cstdio>

#include "bench/read_blocks.h"
#include "bench/read_pages.h"
#include "cache_line.h"
#include "check.h"
#include "cuda_support.h"
#include "engram/layout.h"
#include "engram/ops.h"
#include "fault.h"
#include "guard.h"

namespace engram {
namespace {

constexpr int kMaxThreads = 4096;

thread_local char last_error[2048] = "";  // fixed: keeping a text must not fail

//! The first steps of every call for a GPU.
void prepare_device(int32_t device) {
  require_cuda(device);
#if ENGRAM_CUDA
  throw_pending_fault(device);
#endif
}

#if ENGRAM_CUDA
template <typename Args, typename Launch>
void run_cuda(const Args& args, const engram_exec& exec, const char* name, const Launch& launch) {
  const DeviceGuard device(exec.device);
  check_cuda(launch(args, static_cast<cudaStream_t>(exec.stream)), name);
}
#else
constexpr auto lookup_by_path = nullptr, stage_cuda = nullptr, project_cuda = nullptr,
               gate_cuda = nullptr;
template <typename Args>
void run_cuda(const Args&, const engram_exec&, const char*, std::nullptr_t) {
}  // require_cuda has thrown
#endif

template <typename Args>
bool is_empty(const Args& args) {
  return args.num_tokens == 0;
}
bool is_empty(const engram_hash_args& args) {
  return args.num_tokens == 0 && num_windows(args) == 0;
}

template <typename Args>
void check_on_gpu(const Args&) {}
void check_on_gpu(const engram_lookup_args& args) { check_lookup_on_gpu(args); }
void check_on_gpu(const engram_project_args& args) { check_project_on_gpu(args); }

//! check, then cpu or launch. launch(args, stream) returns the launch's cudaError_t.
template <typename Args, typename Launch>
engram_status run_op(const Args* args, const engram_exec* exec, const char* name,
                     void (*check)(const Args&), void (*cpu)(const Args&, int),
                     const Launch& launch) {
  return guard([&] {
    check_array(args, "args");
    check_array(exec, "exec");
    check_range(exec->device, "device", -1, INT32_MAX);
    check_range(exec->num_threads, "num_threads", 0, kMaxThreads);
    check(*args);
    const bool on_cpu = exec->device < 0;
    if (!on_cpu) {
      check_on_gpu(*args);
      prepare_device(exec->device);
    }
    if (is_empty(*args)) return;
    if (on_cpu) return cpu(*args, exec->num_threads);
    run_cuda(*args, *exec, name, launch);
  });
}

}  // namespace

engram_status fail(engram_status status, const char* text) noexcept {
  snprintf(last_error, sizeof(last_error), "%s", text);
  return status;
}

}  // namespace engram

using namespace engram;

engram_status engram_hash(const engram_hash_args* args, const engram_exec* exec) {
#if ENGRAM_CUDA
  const auto launch = [&](const engram_hash_args& a, cudaStream_t stream) {
    return hash_cuda(a, fault_word(exec->device), stream);
  };
#else
  const auto launch = nullptr;
#endif
  return run_op(args, exec, "hash", check_hash, hash_cpu, launch);
}

engram_status engram_history(const engram_history_args* args, const engram_exec* exec) {
#if ENGRAM_CUDA
  const auto launch = [&](const engram_history_args& a, cudaStream_t stream) {
    return history_cuda(a, fault_word(exec->device), stream);
  };
#else
  const auto launch = nullptr;
#endif
  return run_op(args, exec, "history", check_history, history_cpu, launch);
}

engram_status engram_lookup(const engram_lookup_args* args, const engram_exec* exec) {
  return run_op(args, exec, "lookup", check_lookup, lookup_cpu, lookup_by_path);
}

engram_status engram_lookup_workspace(const engram_lookup_args* args, int64_t* num_bytes) {
  return guard([&] {
    check_array(args, "args");
    check_array(num_bytes, "num_bytes");
    check_lookup_sizes(*args);
    *num_bytes = lookup_workspace_bytes(*args);
  });
}

engram_status engram_stage(const engram_stage_args* args, const engram_exec* exec) {
  return run_op(args, exec, "stage", check_stage, stage_cpu, stage_cuda);
}

engram_status engram_project(const engram_project_args* args, const engram_exec* exec) {
  return run_op(args, exec, "project", check_project, project_cpu, project_cuda);
}

engram_status engram_gate(const engram_gate_args* args, const engram_exec* exec) {
  return run_op(args, exec, "gate", check_gate, gate_cpu, gate_cuda);
}

engram_status engram_device_fault(int32_t device) {
  return guard([&] {
    check_at_least(device, "device", 0);
    prepare_device(device);
  });
}

const char* engram_last_error() { return last_error; }

int32_t engram_abi_version() { return ENGRAM_ABI_VERSION; }

engram_status engram_bench_read_blocks(const uint8_t* base, const int64_t* block_ids,
                                       int64_t num_blocks, int32_t block_bytes, uint8_t* out,
                                       int32_t out_bytes_per_block, int32_t num_threads,
                                       uint64_t* checksum) {
  return guard([&] {
    check_at_least(num_blocks, "num_blocks", 0);
    check_at_least(block_bytes, "block_bytes", 1);
    check_at_least(out_bytes_per_block, "out_bytes_per_block", 0);
    check_range(num_threads, "num_threads", 0, kMaxThreads);
    check_array(checksum, "checksum");
    if (num_blocks > 0) {
      check_array(base, "base");
      check_array(block_ids, "block_ids");
      if (out_bytes_per_block > 0) check_array(out, "out");
    }
    check_aligned(out, "out", kCacheLine);
    *checksum = read_blocks_cpu(base, block_ids, num_blocks, block_bytes, out, out_bytes_per_block,
                                num_threads);
  });
}

engram_status engram_bench_read_pages(const char* path, const int64_t* page_ids, int64_t num_pages,
                                      int32_t num_threads) {
  return guard([&] {
    check_array(path, "path");
    check_at_least(num_pages, "num_pages", 0);
    check_range(num_threads, "num_threads", 0, kMaxThreads);
    if (num_pages > 0) check_elements(page_ids, "page_ids");
    read_pages(path, page_ids, num_pages, num_threads);
  });
}
