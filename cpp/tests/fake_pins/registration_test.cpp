// SPDX-License-Identifier: Apache-2.0
// Registration on GPUs that are not there: what it registers, and what is left where the driver
// refuses. The CUDA run time that it calls is below.
#include "table/registration.h"

#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>
#include <sys/mman.h>

#include <atomic>
#include <map>
#include <mutex>
#include <set>
#include <string_view>

#include "../ranks.h"
#include "../texts.h"
#include "doctest/doctest.h"
#include "engram/error.h"

namespace engram {
namespace {

constexpr int64_t kPiece = Registration::kPieceBytes;

struct Driver {
  std::mutex mutex;
  std::map<const uint8_t*, int64_t> pieces;  // that are registered
  std::map<const uint8_t*, unsigned> flags;  // of all that ever were
  std::set<int> used;                        // devices that a thread was set to
  std::set<int> current;                     // while something was registered or unregistered
  int refuse_at = -1;                        // this call of cudaHostRegister fails
  int calls = 0;
  std::map<cudaDeviceAttr, int> attributes;
  int64_t gap_at = -1;  // addresses of the device jump here
  const uint8_t* begin = nullptr;
  std::atomic<int> pending{0};  // errors that no cudaGetLastError has taken

  int64_t bytes() {
    int64_t sum = 0;
    for (const auto& [begins, size] : pieces) sum += size;
    return sum;
  }
};
Driver* driver = nullptr;
thread_local int current_device = 0;  // of a new thread
thread_local cudaError_t last_error = cudaSuccess;

cudaError_t fail_with(cudaError_t code) {
  if (last_error == cudaSuccess) ++driver->pending;
  last_error = code;
  return code;
}

//! A driver of its own for each test.
struct Fixture {
  Driver mine;
  Fixture() {
    driver = &mine;
    current_device = 1;
    mine.attributes = {{cudaDevAttrHostRegisterSupported, 1},
                       {cudaDevAttrCanUseHostPointerForRegisteredMem, 1},
                       {cudaDevAttrHostRegisterReadOnlySupported, 0}};
  }
  ~Fixture() {
    CHECK(mine.pieces.empty());
    CHECK(mine.pending == 0);
    CHECK(mine.current == std::set<int>{1});
    CHECK(mine.used.count(0) == 0);  // no context on a GPU that is another rank's
    driver = nullptr;
  }
};

//! Whether a forked child has the memory.
bool is_inherited(const HostMemory& memory) {
  Process child([&] {
    unsigned char page = 0;
    return std::string(mincore(memory.data(), 1, &page) == 0 ? "yes" : "no");
  });
  return child.result() == "yes";
}

TEST_CASE_FIXTURE(Fixture, "all bytes are registered in pieces, and none at the end") {
  for (const int64_t num_bytes : {int64_t{1}, kPiece, 3 * kPiece + 4097}) {
    HostMemory memory = HostMemory::create({}, num_bytes, "table");
    mine.begin = memory.data();
    {
      Registration first(memory, 1, {});
      CHECK(mine.bytes() == memory.mapped_bytes());
      CHECK(mine.pieces.size() ==
            static_cast<size_t>((memory.mapped_bytes() + kPiece - 1) / kPiece));
      for (const auto& [begin, size] : mine.pieces) {
        CHECK(size <= kPiece);
        CHECK((begin - memory.data()) % kPiece == 0);
        CHECK(mine.flags[begin] == (cudaHostRegisterPortable | cudaHostRegisterMapped));
      }
      CHECK(first.on_device(1) == memory.data());
      Registration second(std::move(first));
      CHECK(mine.bytes() == memory.mapped_bytes());
      const HostMemory moved = std::move(memory);  // stays where it is
      Process child([&] {
        {
          const Registration ends(std::move(second));
        }
        return std::to_string(mine.bytes());
      });
      CHECK(child.result() == std::to_string(moved.mapped_bytes()));
      {
        const Registration ends(std::move(second));
      }
      CHECK(mine.pieces.empty());
    }
  }
}

TEST_CASE_FIXTURE(Fixture, "one piece refused, and none stays registered") {
  HostMemory memory = HostMemory::create({.kind = MemoryKind::kPrivate}, 5 * kPiece, "engram.1");
  for (int refused = 0; refused < 5; ++refused) {
    mine.refuse_at = refused;
    mine.calls = 0;
    const std::string text = message_of([&] { const Registration pins(memory, 1, {}); });
    CHECK(has(text, "engram.1: registration of bytes "));
    CHECK(has(text, " of 5368709120 with CUDA device 1: out of memory"));
    CHECK(mine.pieces.empty());
    CHECK(mine.pending == 0);
    CHECK(is_inherited(memory));
  }
  mine.refuse_at = -1;
  const Registration pins(memory, 1, {});
  CHECK(mine.bytes() == 5 * kPiece);
  CHECK(!is_inherited(memory));
}

TEST_CASE_FIXTURE(Fixture, "a thread without a context has none afterwards, on no GPU") {
  HostMemory memory = HostMemory::create({}, 3 * kPiece, "table");
  current_device = 0;
  {
    const Registration pins(memory, 1, {});
    CHECK(mine.bytes() == 3 * kPiece);
    CHECK(current_device == 0);
    CHECK(pins.on_device(1) != nullptr);
    CHECK(current_device == 0);
  }
  CHECK(current_device == 0);
}

TEST_CASE_FIXTURE(Fixture, "a registration that is cancelled leaves nothing") {
  HostMemory memory = HostMemory::create({}, 8 * kPiece, "table");
  std::atomic<int> asked{0};
  CHECK(has(message_of([&] { const Registration pins(memory, 1, [&] { return ++asked > 3; }); }),
            "table: registration cancelled"));
  CHECK(mine.pieces.empty());
}

TEST_CASE_FIXTURE(Fixture, "mappings that a device cannot register are refused before any is") {
  HostMemory memory = HostMemory::create({}, kPiece, "table");
  memory.protect();
  CHECK(has(message_of([&] { const Registration pins(memory, 1, {}); }), "a mapping for writing"));
  mine.attributes[cudaDevAttrHostRegisterReadOnlySupported] = 1;
  {
    const Registration pins(memory, 1, {});
    CHECK((mine.flags[memory.data()] & cudaHostRegisterReadOnly) != 0);
  }
  mine.attributes[cudaDevAttrHostRegisterSupported] = 0;
  CHECK(has(message_of([&] { const Registration pins(memory, 1, {}); }), "registered host memory"));
  CHECK(has(message_of([&] { const Registration pins(memory, 2, {}); }), "device 2"));
}

TEST_CASE_FIXTURE(Fixture, "a device with addresses of its own gets one piece, without a gap") {
  mine.attributes[cudaDevAttrCanUseHostPointerForRegisteredMem] = 0;
  HostMemory memory = HostMemory::create({}, 3 * kPiece, "table");
  {
    const Registration pins(memory, 1, {});
    CHECK(mine.pieces.size() == 1);
  }
  mine.attributes[cudaDevAttrCanUseHostPointerForRegisteredMem] = 1;
  mine.begin = memory.data();
  mine.gap_at = 2 * kPiece;
  CHECK(has(message_of([&] { const Registration pins(memory, 1, {}); }),
            "found a gap at byte 2147483648"));
}

}  // namespace
}  // namespace engram

using engram::driver;
using engram::fail_with;

cudaError_t cudaHostRegister(void* begin, size_t num_bytes, unsigned int flags) {
  const std::lock_guard lock(driver->mutex);
  driver->current.insert(engram::current_device);
  if (driver->calls++ == driver->refuse_at) return fail_with(cudaErrorMemoryAllocation);
  const auto* const bytes = static_cast<const uint8_t*>(begin);
  driver->pieces[bytes] = static_cast<int64_t>(num_bytes);
  driver->flags[bytes] = flags;
  return cudaSuccess;
}
cudaError_t cudaHostUnregister(void* begin) {
  const std::lock_guard lock(driver->mutex);
  driver->current.insert(engram::current_device);
  return driver->pieces.erase(static_cast<const uint8_t*>(begin)) == 1
             ? cudaSuccess
             : fail_with(cudaErrorHostMemoryNotRegistered);
}
cudaError_t cudaHostGetDevicePointer(void** mapped, void* begin, unsigned int) {
  auto* const bytes = static_cast<uint8_t*>(begin);
  const bool jumps = driver->gap_at >= 0 && bytes - driver->begin >= driver->gap_at;
  *mapped = bytes + (jumps ? 4096 : 0);
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr name, int) {
  *value = driver->attributes[name];
  return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceCount(int* count) {
  *count = 2;
  return cudaSuccess;
}
cudaError_t cudaGetLastError() {
  if (engram::last_error != cudaSuccess) --driver->pending;
  return std::exchange(engram::last_error, cudaSuccess);
}
const char* cudaGetErrorString(cudaError_t) { return "out of memory"; }
const char* cudaGetErrorName(cudaError_t) { return "cudaErrorMemoryAllocation"; }
cudaError_t cudaGetDevice(int* device) {
  *device = engram::current_device;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  const std::lock_guard lock(driver->mutex);
  driver->used.insert(device);
  engram::current_device = device;
  return cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }

// A context is its device's number: the first one's would be none, but no test makes it.
CUresult get_context(CUcontext* context) {
  *context = reinterpret_cast<CUcontext>(intptr_t{engram::current_device});
  return CUDA_SUCCESS;
}
CUresult set_context(CUcontext context) {
  engram::current_device = static_cast<int>(reinterpret_cast<intptr_t>(context));
  return CUDA_SUCCESS;
}

// Of memory "cumem" and of nodes next to a GPU, which no test here asks for.
cudaError_t cudaDeviceGetPCIBusId(char*, int, int) { return cudaErrorInvalidDevice; }
cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
cudaError_t cudaMalloc(void**, size_t) { return cudaErrorMemoryAllocation; }
cudaError_t cudaFree(void*) { return cudaSuccess; }
cudaError_t cudaMemcpy(void*, const void*, size_t, cudaMemcpyKind) { return cudaErrorUnknown; }
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned int,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  const bool sets = std::string_view(name) == "cuCtxSetCurrent";  // others are not called
  *function = sets ? reinterpret_cast<void*>(set_context) : reinterpret_cast<void*>(get_context);
  *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
