// SPDX-License-Identifier: Apache-2.0
// Streams whose work is not done at once, graphs, host nodes, and the kernel that reads rows.
#include "fake_work.h"

#include <atomic>
#include <cstring>
#include <deque>
#include <list>
#include <mutex>
#include <thread>
#include <utility>

#include "engram/ops.h"
#include "fake_gpus.h"

using Work = std::function<void()>;

struct CUuserObject_st {
  void* kept;
  cudaHostFn_t leave;
};
struct CUgraph_st {
  std::vector<Work> work;
  std::vector<cudaUserObject_t> kept;
};

namespace engram::fake {
namespace {

std::mutex mutex;
std::map<cudaStream_t, std::deque<Work>> held;
std::map<cudaEvent_t, cudaStream_t> awaited;
cudaStream_t capturing_stream = nullptr;
cudaGraph_t capturing_graph = nullptr;
std::atomic<int64_t> forbidden{0};
thread_local bool may_call = true;

//! Work in which nothing of CUDA may be called.
void run_apart(cudaHostFn_t function, void* data) {
  may_call = false;
  function(data);
  may_call = true;
}

bool is_held(cudaStream_t stream) {
  const std::lock_guard lock(mutex);
  return held.count(stream) != 0;
}

void do_next(cudaStream_t stream) {
  Work work;
  {
    const std::lock_guard lock(mutex);
    std::deque<Work>& queue = held.at(stream);
    work = std::move(queue.front());
    queue.pop_front();
  }
  work();
}

bool has_work(cudaStream_t stream) {
  const std::lock_guard lock(mutex);
  const auto found = held.find(stream);
  return found != held.end() && !found->second.empty();
}

}  // namespace

int64_t num_forbidden() { return forbidden; }

void note_call() { forbidden += !may_call; }

cudaError_t enqueue(cudaStream_t stream, Work work) {
  const cudaError_t code = answer();
  if (code != cudaSuccess) return code;
  {
    const std::lock_guard lock(mutex);
    const auto found = held.find(stream);
    if (capturing_graph != nullptr && stream == capturing_stream) {
      capturing_graph->work.push_back(std::move(work));
      return cudaSuccess;
    }
    if (found != held.end()) {
      found->second.push_back(std::move(work));
      return cudaSuccess;
    }
  }
  work();
  return cudaSuccess;
}

void hold(cudaStream_t stream) {
  const std::lock_guard lock(mutex);
  held.try_emplace(stream);
}

void release(cudaStream_t stream) {
  while (has_work(stream)) do_next(stream);
  const std::lock_guard lock(mutex);
  held.erase(stream);
}

cudaGraph_t begin_capture(cudaStream_t stream) {
  capturing_stream = stream;
  return capturing_graph = new CUgraph_st();
}

void end_capture() { capturing_graph = nullptr; }

void replay(cudaGraph_t graph) {
  for (const Work& work : graph->work) work();
}

void end(cudaGraph_t graph) {
  std::thread([graph] {
    for (const cudaUserObject_t object : graph->kept) cudaUserObjectRelease(object, 1);
  }).join();
  delete graph;
}

}  // namespace engram::fake

using namespace engram::fake;

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  if (is_held(stream)) {
    const std::lock_guard lock(mutex);
    awaited[event] = stream;
  }
  return enqueue(stream, [event] {
    const std::lock_guard lock(mutex);
    awaited.erase(event);
  });
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  const cudaError_t code = answer();
  const std::lock_guard lock(mutex);
  return code == cudaSuccess && awaited.count(event) != 0 ? cudaErrorNotReady : code;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  for (;;) {
    cudaStream_t stream = nullptr;
    {
      const std::lock_guard lock(mutex);
      const auto found = awaited.find(event);
      if (found == awaited.end()) return answer();
      stream = found->second;
    }
    do_next(stream);
  }
}

cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch,
                              size_t width, size_t height, cudaMemcpyKind, cudaStream_t stream) {
  return enqueue(stream, [=] {
    for (size_t i = 0; i < height; ++i) {
      std::memcpy(static_cast<char*>(to) + i * to_pitch,
                  static_cast<const char*>(from) + i * from_pitch, width);
    }
  });
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
  return enqueue(stream, [=] { run_apart(function, data); });
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status,
                                     unsigned long long*, cudaGraph_t* graph,
                                     const cudaGraphNode_t**,
#if CUDART_VERSION >= 13000
                                     const cudaGraphEdgeData**,
#endif
                                     size_t*) {
  const bool captures = capturing_graph != nullptr && stream == capturing_stream;
  *status = captures ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  if (captures) *graph = capturing_graph;
  return answer();
}

cudaError_t cudaUserObjectCreate(cudaUserObject_t* object, void* kept, cudaHostFn_t leave,
                                 unsigned int, unsigned int) {
  const cudaError_t code = answer();
  if (code == cudaSuccess) *object = new CUuserObject_st{kept, leave};
  return code;
}

cudaError_t cudaUserObjectRelease(cudaUserObject_t object, unsigned int) {
  run_apart(object->leave, object->kept);
  delete object;
  return answer();
}

cudaError_t cudaGraphRetainUserObject(cudaGraph_t graph, cudaUserObject_t object, unsigned int,
                                      unsigned int) {
  const cudaError_t code = answer();
  if (code == cudaSuccess) graph->kept.push_back(object);
  return code;
}

namespace engram {

cudaError_t lookup_cuda(const engram_lookup_args& args, cudaStream_t stream) {
  return enqueue(stream, [args] { lookup_cpu(args, 1); });
}

}  // namespace engram
