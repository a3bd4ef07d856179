// SPDX-License-Identifier: Apache-2.0
#include "table/device_table.h"

#include <map>
#include <mutex>
#include <utility>

#include "cuda_support.h"
#include "table/device_bytes.h"
#include "table/gpu_memory.h"
#include "table/upload.h"

namespace engram {
#if ENGRAM_CUDA
namespace {

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
