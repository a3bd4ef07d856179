// SPDX-License-Identifier: Apache-2.0
#include "fake_streams.h"

#include <cuda.h>

#include <cstdlib>
#include <cstring>
#include <deque>
#include <set>
#include <vector>

#include "engram/error.h"
#include "engram/ops.h"
#include "guard.h"
#include "table/gpu_memory.h"

namespace {

//! What comes next runs after these gathers, in this capture (0: none).
struct Point {
  std::set<int> gathers;
  int capture = 0;
};

int num_captures = 0;
int capture_now = 0;
cudaStreamCaptureMode capture_mode = cudaStreamCaptureModeGlobal;  // of the one thread
std::set<int> ended;                                               // the host has waited for these
engram::fake::Gather last{};

}  // namespace

struct CUuserObject_st {
  void* kept;
  cudaHostFn_t leave;
};
struct CUgraph_st {
  std::vector<cudaUserObject_t> kept;
};
struct CUstream_st {
  Point point;
};
struct CUevent_st {
  Point point;
};

namespace {

CUgraph_st graph;  // that is captured

bool is_capturing(cudaStream_t stream) {
  cudaStreamCaptureStatus status{};
  cudaStreamIsCapturing(stream, &status);
  return status != cudaStreamCaptureStatusNone;
}

}  // namespace

namespace engram::fake {

Gather last_gather() { return last; }

bool runs_after(cudaStream_t stream, const Gather& gather) {
  return stream->point.gathers.count(gather.number) + ended.count(gather.number) != 0;
}

void begin_capture(cudaStream_t stream) { stream->point.capture = capture_now = ++num_captures; }

void end_capture() {
  capture_now = 0;
  for (const cudaUserObject_t object : graph.kept) cudaUserObjectRelease(object, 1);
  graph.kept.clear();
}

}  // namespace engram::fake

// Streams and events.

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  *stream = new CUstream_st();
  return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  delete stream;
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = new CUevent_st();
  return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event;
  return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  if (event->point.capture != 0) return cudaErrorCapturedEvent;
  if (capture_now != 0 && capture_mode != cudaStreamCaptureModeRelaxed)
    return cudaErrorStreamCaptureUnsupported;
  ended.insert(event->point.gathers.begin(), event->point.gathers.end());
  return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  if (stream->point.capture != capture_now) stream->point.capture = 0;  // it has ended
  *status =
      stream->point.capture == 0 ? cudaStreamCaptureStatusNone : cudaStreamCaptureStatusActive;
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  cudaStreamCaptureStatus status{};
  cudaStreamIsCapturing(stream, &status);
  event->point = stream->point;
  return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  cudaStreamCaptureStatus status{};
  cudaStreamIsCapturing(stream, &status);
  const int of_event = event->point.capture;
  if (of_event != 0 && of_event != capture_now) return cudaErrorCapturedEvent;
  if (of_event == 0 && status != cudaStreamCaptureStatusNone)
    return cudaErrorStreamCaptureIsolation;
  stream->point.capture = of_event;
  stream->point.gathers.insert(event->point.gathers.begin(), event->point.gathers.end());
  return cudaSuccess;
}

// Host nodes, and what graphs keep.

cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch,
                              size_t width, size_t height, cudaMemcpyKind, cudaStream_t stream) {
  if (is_capturing(stream)) return cudaSuccess;
  for (size_t i = 0; i < height; ++i) {
    std::memcpy(static_cast<char*>(to) + i * to_pitch,
                static_cast<const char*>(from) + i * from_pitch, width);
  }
  return cudaSuccess;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
  if (!is_capturing(stream)) function(data);
  return cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status,
                                     unsigned long long*, cudaGraph_t* found,
                                     const cudaGraphNode_t**,
#if CUDART_VERSION >= 13000
                                     const cudaGraphEdgeData**,
#endif
                                     size_t*) {
  *found = &graph;
  return cudaStreamIsCapturing(stream, status);
}

cudaError_t cudaUserObjectCreate(cudaUserObject_t* object, void* kept, cudaHostFn_t leave, unsigned,
                                 unsigned) {
  *object = new CUuserObject_st{kept, leave};
  return cudaSuccess;
}

cudaError_t cudaUserObjectRelease(cudaUserObject_t object, unsigned) {
  object->leave(object->kept);
  delete object;
  return cudaSuccess;
}

cudaError_t cudaGraphRetainUserObject(cudaGraph_t keeper, cudaUserObject_t object, unsigned,
                                      unsigned) {
  keeper->kept.push_back(object);
  return cudaSuccess;
}

// Everything else that plugins call, of one device.

cudaError_t cudaMallocHost(void** memory, size_t num_bytes) {
  *memory = std::aligned_alloc(64, (num_bytes + 63) / 64 * 64);
  return cudaSuccess;
}
cudaError_t cudaFreeHost(void* memory) {
  std::free(memory);
  return cudaSuccess;
}

cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int) { return cudaSuccess; }
// Of the driver: a thread always has that device's context.
cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** function, unsigned int,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  constexpr auto kGetContext = +[](CUcontext* context) {
    *context = reinterpret_cast<CUcontext>(intptr_t{1});
    return CUDA_SUCCESS;
  };
  *function = reinterpret_cast<void*>(kGetContext);  // the one that is called
  *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaGetLastError() { return cudaSuccess; }
const char* cudaGetErrorString(cudaError_t) { return "refused by the fake run time"; }
const char* cudaGetErrorName(cudaError_t code) {
  return code == cudaErrorCapturedEvent ? "cudaErrorCapturedEvent" : "another";
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(capture_mode, *mode);
  return cudaSuccess;
}
cudaError_t cudaHostAlloc(void** memory, size_t num_bytes, unsigned) {
  static std::deque<std::vector<char>> pinned;  // until the process ends
  *memory = pinned.emplace_back(num_bytes).data();
  return cudaSuccess;
}
cudaError_t cudaHostGetDevicePointer(void** pointer, void* memory, unsigned) {
  *pointer = memory;
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void*, const void*, size_t, cudaMemcpyKind, cudaStream_t) {
  return cudaSuccess;
}
cudaError_t cudaMalloc(void**, size_t) { return cudaErrorNotSupported; }
cudaError_t cudaFree(void*) { return cudaSuccess; }
cudaError_t cudaMemGetInfo(size_t*, size_t*) { return cudaErrorNotSupported; }
cudaError_t cudaMemsetAsync(void* memory, int byte, size_t num_bytes, cudaStream_t stream) {
  if (!is_capturing(stream)) std::memset(memory, byte, num_bytes);
  return cudaSuccess;
}

// Launchers of kernels.

namespace engram {

OnGpu::OnGpu(int, std::nothrow_t) noexcept {}
std::string pci_bus_id(int) { return "no bus"; }

cudaError_t lookup_cuda(const engram_lookup_args& args, cudaStream_t stream) {
  last = {last.number + 1, args.values};
  stream->point.gathers.insert(last.number);
  return cudaSuccess;
}
cudaError_t hash_cuda(const engram_hash_args&, uint64_t*, cudaStream_t) {
  return cudaErrorNotSupported;
}
cudaError_t history_cuda(const engram_history_args&, uint64_t*, cudaStream_t) {
  return cudaErrorNotSupported;
}
cudaError_t project_cuda(const engram_project_args&, cudaStream_t) { return cudaErrorNotSupported; }
cudaError_t gate_cuda(const engram_gate_args&, cudaStream_t) { return cudaErrorNotSupported; }

engram_status fail(engram_status status, const char*) noexcept { return status; }

}  // namespace engram
