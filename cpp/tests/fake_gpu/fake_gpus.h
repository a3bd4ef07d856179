// SPDX-License-Identifier: Apache-2.0
//! \file fake_gpus.h
//! A CUDA run time and driver whose GPU memory is host memory, so that what ranks do with each
//! other's can be tested on any machine, with GPUs that no machine has. Only what tables on
//! GPUs and memory "cumem" call is there.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace engram::fake {

//! What this process sees. Set before the first CUDA call of a rank.
struct Machine {
  std::vector<std::string> visible;  //!< bus ids by ordinal
  //! Pairs (who reads, whose memory) for which access is refused, or granted and reads garbage.
  std::set<std::pair<std::string, std::string>> refused;
  std::set<std::pair<std::string, std::string>> garbled;
  std::map<std::string, int64_t> free_bytes;  //!< by bus id; 1 TiB where there is none
  bool shares = true;                         //!< memory can be shared by descriptors
  //! This call, of all that a driver may answer with an error, does so, having done what ends
  //! something; at that one the process is killed. -1: none.
  int64_t refuse_at = -1;
  int64_t die_at = -1;

  bool registers = true;  //!< host memory for GPUs

  // What is there now.
  std::map<const void*, int64_t> registered;  //!< bytes of host memory, by their first
  int64_t num_handles = 0;
  int64_t num_mapped = 0;
  int64_t num_reserved = 0;
  int64_t created_bytes = 0;  //!< in all
  int64_t num_calls = 0;      //!< that may be refused
};

Machine& machine();

//! Of this thread: a device's number plus 1, or null.
extern thread_local CUcontext current_context;

//! Counts a call; whether it is the one to refuse.
bool refuses();
//! Buffers, streams and events that are there now.
int64_t num_made();
//! Whether this thread has an error of the run time's that nobody has asked for.
bool has_pending_error();
//! Calls from where CUDA allows none: host nodes, and the ends of what graphs keep.
int64_t num_forbidden();

//! Does work, now or, of a stream that is held or captures, later. Returns what the call answers.
cudaError_t enqueue(cudaStream_t stream, std::function<void()> work);
//! Holds back what is enqueued on a stream until release() does it, or who waits for its event.
void hold(cudaStream_t stream);
void release(cudaStream_t stream);
//! One stream at a time.
cudaGraph_t begin_capture(cudaStream_t stream);
void end_capture();
void replay(cudaGraph_t graph);
//! What it keeps ends on another thread.
void end(cudaGraph_t graph);

//! Null for what is not there.
void* driver_function(const std::string& name);

}  // namespace engram::fake
