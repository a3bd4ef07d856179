// SPDX-License-Identifier: Apache-2.0
#include "table/arrays.h"

#include <sys/mman.h>

#include <algorithm>
#include <array>

#include "cuda_support.h"
#include "engram/error.h"
#include "parallel.h"
#include "table/files.h"

#if ENGRAM_CUDA
#include "cuda_handles.h"
#endif

namespace engram {
namespace {

constexpr int64_t kReadBytes = 8 << 20;  // what one thread reads at a time

void read_parallel(const File& file, uint8_t* to, int64_t num_bytes, int64_t offset) {
  parallel_for(num_bytes, kReadBytes, 0, [&](int64_t begin, int64_t end) {
    file.read(to + begin, end - begin, offset + begin);
  });
}

struct Unmap {
  size_t num_bytes = 0;
  void operator()(uint8_t* bytes) const { munmap(bytes, num_bytes); }
};

//! Anonymous memory, pinned for all GPUs once the first of them asks.
class HostArray final : public TableArray {
 public:
  explicit HostArray(const FileRange& range) : num_bytes_(static_cast<size_t>(range.num_bytes)) {
    const File file(range.file);
    void* const memory = mmap(nullptr, num_bytes_, PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) {
      throw Error(ENGRAM_OUT_OF_MEMORY,
                  concat(range.file, ": expected ", num_bytes_, " bytes of host memory"));
    }
    bytes_.reset(static_cast<uint8_t*>(memory));
    bytes_.get_deleter().num_bytes = num_bytes_;
    madvise(memory, num_bytes_,
            MADV_HUGEPAGE);  // fewer address translations; a kernel without them says no
    read_parallel(file, bytes_.get(), range.num_bytes, range.offset);
  }

  ~HostArray() override {
#if ENGRAM_CUDA
    if (!pinned_) return;  // and CUDA perhaps never asked
    const RelaxedCapture relaxed;
    cudaHostUnregister(bytes_.get());
#endif
  }

  const uint8_t* on_device([[maybe_unused]] int device) override {
    require_cuda(device);
#if ENGRAM_CUDA
    const DeviceGuard guard(device);
    const RelaxedCapture relaxed;
    const std::lock_guard lock(mutex_);
    if (!pinned_) {
      check_cuda(cudaHostRegister(bytes_.get(), num_bytes_,
                                  cudaHostRegisterPortable | cudaHostRegisterMapped),
                 "pin a table in host memory");
      pinned_ = true;
    }
    void* mapped = nullptr;
    check_cuda(cudaHostGetDevicePointer(&mapped, bytes_.get(), 0), "map a table in host memory");
    return static_cast<const uint8_t*>(mapped);
#else
    return nullptr;
#endif
  }

  const uint8_t* on_host() override { return bytes_.get(); }

 private:
  size_t num_bytes_;
  std::unique_ptr<uint8_t, Unmap> bytes_;
#if ENGRAM_CUDA
  std::mutex mutex_;
  bool pinned_ = false;
#endif
};

#if ENGRAM_CUDA
struct FreeDevice {
  void operator()(uint8_t* bytes) const {
    const RelaxedCapture relaxed;
    cudaFree(bytes);  // whichever device is current
  }
};
struct FreePinned {
  void operator()(uint8_t* bytes) const {
    const RelaxedCapture relaxed;
    cudaFreeHost(bytes);
  }
};
using DeviceBytes = std::unique_ptr<uint8_t, FreeDevice>;

//! Two pinned buffers in turn: one is filled from the file while the other travels to the GPU.
class Upload {
 public:
  Upload() : stream_(make_stream()) {
    for (Buffer& buffer : buffers_) {
      void* bytes = nullptr;
      check_cuda(cudaMallocHost(&bytes, kBufferBytes), "buffer for loading a table");
      buffer.bytes.reset(static_cast<uint8_t*>(bytes));
      buffer.sent = make_event();
    }
  }
  ~Upload() { cudaStreamSynchronize(stream_.get()); }  // after an error, too, before the buffers go
  Upload(const Upload&) = delete;
  Upload& operator=(const Upload&) = delete;

  void run(const FileRange& range, uint8_t* to) {
    const File file(range.file);
    for (int64_t begin = 0, turn = 0; begin < range.num_bytes; begin += kBufferBytes, ++turn) {
      const Buffer& buffer = buffers_[static_cast<size_t>(turn % 2)];
      const int64_t count = std::min(kBufferBytes, range.num_bytes - begin);
      check_cuda(cudaEventSynchronize(buffer.sent.get()), "load a table");
      read_parallel(file, buffer.bytes.get(), count, range.offset + begin);
      check_cuda(cudaMemcpyAsync(to + begin, buffer.bytes.get(), static_cast<size_t>(count),
                                 cudaMemcpyHostToDevice, stream_.get()),
                 "load a table");
      check_cuda(cudaEventRecord(buffer.sent.get(), stream_.get()), "load a table");
    }
    check_cuda(cudaStreamSynchronize(stream_.get()), "load a table");
  }

 private:
  static constexpr int64_t kBufferBytes = 64 << 20;

  struct Buffer {
    std::unique_ptr<uint8_t, FreePinned> bytes;
    Event sent;
  };

  std::array<Buffer, 2> buffers_;
  Stream stream_;
};

//! One copy on each GPU that asks.
class DeviceArray final : public TableArray {
 public:
  explicit DeviceArray(const FileRange& range) : range_(range) {
    require_cuda(0);
    File{range.file};  // refuse now what cannot be read then
  }

  const uint8_t* on_device(int device) override {
    require_cuda(device);
    const DeviceGuard guard(device);
    const RelaxedCapture relaxed;
    const std::lock_guard lock(mutex_);
    DeviceBytes& copy = copies_[device];
    if (copy == nullptr) {
      void* memory = nullptr;
      check_cuda(cudaMalloc(&memory, static_cast<size_t>(range_.num_bytes)),
                 "GPU memory for a table");
      DeviceBytes loading(static_cast<uint8_t*>(memory));
      Upload().run(range_, loading.get());
      copy = std::move(loading);
    }
    return copy.get();
  }

  const uint8_t* on_host() override { return nullptr; }

 private:
  FileRange range_;
  std::mutex mutex_;
  std::map<int, DeviceBytes> copies_;
};
#endif

}  // namespace

std::unique_ptr<TableArray> load_array(const FileRange& range, Placement placement) {
  if (placement == Placement::kHost) return std::make_unique<HostArray>(range);
#if ENGRAM_CUDA
  return std::make_unique<DeviceArray>(range);
#else
  require_cuda(0);
  return nullptr;
#endif
}

}  // namespace engram
