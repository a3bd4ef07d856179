// SPDX-License-Identifier: Apache-2.0
// The run time: everything is done when a call returns, but for what fake_work.cpp holds back.
#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <mutex>
#include <utility>
#include <vector>

#include "fake_gpus.h"
#include "fake_work.h"
#include "table/formula_cuda.h"

namespace engram::fake {

thread_local CUcontext current_context = nullptr;

namespace {

thread_local cudaError_t last_error = cudaSuccess;
std::atomic<int64_t> made{0};
std::mutex registered_mutex;

cudaError_t refuse() {
  last_error = cudaErrorMemoryAllocation;
  return last_error;
}

//! Devices are counted from 0, and a null context is none.
int current_device() {
  const auto context = reinterpret_cast<intptr_t>(current_context);
  return context == 0 ? 0 : static_cast<int>(context - 1);
}

}  // namespace

cudaError_t answer() {
  note_call();
  return refuses() ? refuse() : cudaSuccess;
}

namespace {

//! New memory that stands for anything.
cudaError_t make(void** memory, size_t num_bytes) {
  const cudaError_t code = answer();
  if (code != cudaSuccess) return code;
  *memory = std::malloc(num_bytes);
  ++made;
  return cudaSuccess;
}

cudaError_t end(void* memory) {
  made -= memory != nullptr;
  std::free(memory);
  return answer();
}

}  // namespace

int64_t num_made() { return made; }

bool has_pending_error() { return last_error != cudaSuccess; }

}  // namespace engram::fake

using namespace engram::fake;

cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned int,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  *function = driver_function(name);
  *result = *function == nullptr ? cudaDriverEntryPointSymbolNotFound : cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceCount(int* count) {
  *count = static_cast<int>(machine().visible.size());
  return cudaSuccess;
}
cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }
const char* cudaGetErrorString(cudaError_t) { return "an error"; }
const char* cudaGetErrorName(cudaError_t) { return "cudaErrorUnknown"; }
//! As every call of the run time may, it begins with the first GPU where the thread has none.
cudaError_t cudaGetDevice(int* device) {
  *device = current_device();
  if (current_context == nullptr) current_context = reinterpret_cast<CUcontext>(intptr_t{1});
  return answer();
}
cudaError_t cudaSetDevice(int device) {
  const cudaError_t code = answer();
  if (code == cudaSuccess) current_context = reinterpret_cast<CUcontext>(intptr_t{1} + device);
  return code;
}
cudaError_t cudaDeviceSynchronize() { return answer(); }
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }
cudaError_t cudaDeviceGetPCIBusId(char* text, int size, int device) {
  snprintf(text, static_cast<size_t>(size), "%s",
           machine().visible.at(static_cast<size_t>(device)).c_str());
  return answer();
}
cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total_bytes) {
  const std::string& gpu = machine().visible.at(static_cast<size_t>(current_device()));
  const auto found = machine().free_bytes.find(gpu);
  *total_bytes = size_t{1} << 40;
  *free_bytes =
      found == machine().free_bytes.end() ? *total_bytes : static_cast<size_t>(found->second);
  return answer();
}

cudaError_t cudaMalloc(void** memory, size_t num_bytes) { return make(memory, num_bytes); }
cudaError_t cudaFree(void* memory) { return end(memory); }
cudaError_t cudaMallocHost(void** memory, size_t num_bytes) { return make(memory, num_bytes); }
cudaError_t cudaFreeHost(void* memory) { return end(memory); }
cudaError_t cudaMemcpy(void* to, const void* from, size_t num_bytes, cudaMemcpyKind) {
  std::memcpy(to, from, num_bytes);
  return answer();
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t num_bytes, cudaMemcpyKind,
                            cudaStream_t stream) {
  return enqueue(stream, [=] { std::memcpy(to, from, num_bytes); });
}
cudaError_t cudaHostAlloc(void** memory, size_t num_bytes, unsigned int) {
  static std::deque<std::vector<char>> kept;  // until the process ends
  *memory = kept.emplace_back(num_bytes).data();
  return answer();
}
cudaError_t cudaHostGetDevicePointer(void** pointer, void* memory, unsigned int) {
  *pointer = memory;
  return answer();
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr name, int) {
  *value = name != cudaDevAttrHostRegisterReadOnlySupported;
  return answer();
}
cudaError_t cudaHostRegister(void* begin, size_t num_bytes, unsigned int) {
  if (!machine().registers) return refuse();
  const std::lock_guard lock(registered_mutex);
  machine().registered[begin] = static_cast<int64_t>(num_bytes);
  return answer();
}
cudaError_t cudaHostUnregister(void* begin) {
  const std::lock_guard lock(registered_mutex);
  machine().registered.erase(begin);
  return answer();
}
cudaError_t cudaMemsetAsync(void* to, int value, size_t num_bytes, cudaStream_t) {
  std::memset(to, value, num_bytes);
  return answer();
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned int) {
  return make(reinterpret_cast<void**>(stream), 1);
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) { return end(stream); }
cudaError_t cudaStreamSynchronize(cudaStream_t) { return answer(); }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned int) {
  return make(reinterpret_cast<void**>(event), 1);
}
cudaError_t cudaEventDestroy(cudaEvent_t event) { return end(event); }

namespace engram {

cudaError_t fill_formula_cuda(const FormulaKey& key, int64_t begin, int64_t num_bytes, uint8_t* to,
                              cudaStream_t) {
  fill_formula(key, begin, num_bytes, to);
  return answer();
}

cudaError_t check_formula_cuda(const FormulaKey& key, int64_t begin, int64_t num_bytes,
                               const uint8_t* from, unsigned long long* num_wrong, cudaStream_t) {
  std::vector<uint8_t> right(static_cast<size_t>(num_bytes));
  fill_formula(key, begin, num_bytes, right.data());
  for (size_t i = 0; i < right.size(); ++i) *num_wrong += from[i] != right[i];
  return answer();
}

}  // namespace engram
