// SPDX-License-Identifier: Apache-2.0
#include "table/device_table.h"

#include <unistd.h>

#include <map>
#include <mutex>
#include <utility>

#include "cuda_support.h"
#include "table/upload.h"

#if ENGRAM_CUDA
#include "cuda_handles.h"
#include "engram/error.h"
#include "table/gpu_memory.h"
#endif

namespace engram {
#if ENGRAM_CUDA
namespace {

//! GPU memory. A forked child's copy frees nothing: CUDA is its parent's.
class DeviceBytes {
 public:
  DeviceBytes() = default;
  DeviceBytes(int device, int64_t num_bytes, const std::string& label)
      : device_(device), owner_(getpid()) {
    void* memory = nullptr;
    const std::string what =
        concat(label, ": expected ", num_bytes, " bytes of memory on GPU ", pci_bus_id(device));
    check_cuda(cudaMalloc(&memory, static_cast<size_t>(num_bytes)), what.c_str());
    bytes_ = static_cast<uint8_t*>(memory);
  }
  DeviceBytes(DeviceBytes&& other) noexcept { *this = std::move(other); }
  DeviceBytes& operator=(DeviceBytes&& other) noexcept {
    std::swap(bytes_, other.bytes_);
    std::swap(device_, other.device_);
    std::swap(owner_, other.owner_);
    return *this;
  }
  ~DeviceBytes() {
    if (bytes_ == nullptr || getpid() != owner_) return;
    const OnGpu gpu(device_, std::nothrow);
    forget_error(cudaFree(bytes_));
  }

  uint8_t* get() const { return bytes_; }

 private:
  uint8_t* bytes_ = nullptr;
  int device_ = 0;
  pid_t owner_ = 0;
};

class Copies final : public DeviceArray {
 public:
  Copies(const Source& source, int64_t begin, int64_t end, bool verify)
      : source_(source), begin_(begin), end_(end), verify_(verify) {
    require_cuda(0);
    SourceReader{source};  // refuse now what cannot be read then
  }

  void load(int device, const std::function<bool()>& cancelled,
            const std::function<void(int64_t)>& add_bytes) override {
    require_cuda(device);
    const std::lock_guard lock(mutex_);
    if (copies_.count(device) != 0) return;
    const OnGpu gpu(device);
    DeviceBytes copy(device, end_ - begin_, source_.name);
    const SourceReader reader(source_);
    upload(reader, {{begin_, end_, copy.get()}},
           {.device = device, .verify = verify_, .cancelled = cancelled, .add_bytes = add_bytes});
    if (const FileStamp* const stamp = reader.stamp()) check_stamp(*stamp);
    copies_[device] = std::move(copy);
  }

  const uint8_t* on_device(int device) override {
    load(device, {}, {});
    const std::lock_guard lock(mutex_);
    return copies_.at(device).get();
  }

  const uint8_t* on_host() override { return nullptr; }

 private:
  Source source_;
  int64_t begin_;
  int64_t end_;
  bool verify_;
  std::mutex mutex_;
  std::map<int, DeviceBytes> copies_;
};

}  // namespace
#endif

std::unique_ptr<DeviceArray> make_device_array([[maybe_unused]] const Source& source,
                                               [[maybe_unused]] int64_t begin,
                                               [[maybe_unused]] int64_t end,
                                               [[maybe_unused]] bool verify) {
#if ENGRAM_CUDA
  return std::make_unique<Copies>(source, begin, end, verify);
#else
  require_cuda(0);
  return nullptr;
#endif
}

}  // namespace engram
