// SPDX-License-Identifier: Apache-2.0
#include "table/upload.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <memory>
#include <mutex>

#include "cuda_support.h"
#include "engram/error.h"
#include "table/block_sums.h"

#if ENGRAM_CUDA
#include "cuda_handles.h"
#include "parallel.h"
#include "table/formula_cuda.h"
#include "table/gpu_memory.h"
#endif

namespace engram {
namespace {

#if ENGRAM_CUDA
constexpr int64_t kPieceBytes = StoreFile::kPieceBytes;
constexpr int64_t kFormulaBytes = int64_t{1} << 30;  // made between two looks at `cancelled`

//! Two pinned buffers in turn: one is filled from the file while the other travels to the GPU.
class Lane {
 public:
  //! `what` is being done, for errors; it outlives this.
  explicit Lane(const std::string& what) : what_(what), stream_(make_stream(what.c_str())) {
    for (Buffer& buffer : buffers_) {
      buffer.bytes = make_pinned(kPieceBytes, what_.c_str());
      buffer.sent = make_event(what_.c_str());
    }
  }
  ~Lane() {
    // After an error, too, before the buffers go.
    forget_error(cudaStreamSynchronize(stream_.get()));
  }
  Lane(const Lane&) = delete;
  Lane& operator=(const Lane&) = delete;

  //! A buffer that nothing travels from; valid until the next call but one.
  uint8_t* next() {
    turn_ = 1 - turn_;
    check(cudaEventSynchronize(buffers_[turn_].sent.get()));
    return buffers_[turn_].bytes.get();
  }

  void send(const uint8_t* from, uint8_t* to, int64_t num_bytes) {
    check(cudaMemcpyAsync(to, from, static_cast<size_t>(num_bytes), cudaMemcpyHostToDevice,
                          stream_.get()));
  }

  //! What was sent since next() is in the buffer that next() gave.
  void end_buffer() { check(cudaEventRecord(buffers_[turn_].sent.get(), stream_.get())); }

  void finish() { check(cudaStreamSynchronize(stream_.get())); }

 private:
  struct Buffer {
    PinnedBytes bytes;
    Event sent;
  };

  void check(cudaError_t code) const { check_cuda(code, what_.c_str()); }

  const std::string& what_;
  std::array<Buffer, 2> buffers_;
  size_t turn_ = 0;
  Stream stream_;
};

//! As many lanes as threads use at a time.
class Lanes {
 public:
  //! `what`: the lane's.
  std::unique_ptr<Lane> take(const std::string& what) {
    const std::lock_guard lock(mutex_);
    if (free_.empty()) return std::make_unique<Lane>(what);
    std::unique_ptr<Lane> lane = std::move(free_.back());
    free_.pop_back();
    return lane;
  }
  void put(std::unique_ptr<Lane> lane) {
    const std::lock_guard lock(mutex_);
    free_.push_back(std::move(lane));
  }
  void finish() {
    for (const std::unique_ptr<Lane>& lane : free_) lane->finish();
  }

 private:
  std::mutex mutex_;
  std::vector<std::unique_ptr<Lane>> free_;
};

//! One upload() from a file.
class FileUpload {
 public:
  FileUpload(const SourceReader& reader, const std::vector<UploadRange>& ranges,
             const UploadOptions& options)
      : reader_(reader),
        ranges_(ranges),
        options_(options),
        what_(concat(reader.source().name, ": copy to GPU ", pci_bus_id(options.device))) {}

  void run() {
    const std::vector<UploadUnit> units =
        upload_units(ranges_, reader_.source().file.num_bytes, options_.verify);
    const int num_threads = options_.num_threads > 0 ? options_.num_threads : loader_threads(1);
    parallel_for(static_cast<int64_t>(units.size()), 1, num_threads, [&](int64_t unit, int64_t) {
      try {
        const OnGpu gpu(options_.device);
        std::unique_ptr<Lane> lane = lanes_.take(what_);
        run_unit(units[static_cast<size_t>(unit)], *lane);
        lanes_.put(std::move(lane));
      } catch (...) {
        stop_ = true;  // the other threads leave at their next piece
        throw;
      }
    });
    if (stop_) throw_loading_cancelled();
    lanes_.finish();
  }

 private:
  //! Returns early once stop_ is true: to throw would hide why. Sets it when the caller cancels.
  void run_unit(const UploadUnit& unit, Lane& lane) {
    BlockSum sum;
    size_t range = unit.first_range;
    for (int64_t begin = unit.begin; begin < unit.end; begin += kPieceBytes) {
      if (options_.cancelled && options_.cancelled()) stop_ = true;
      if (stop_) return;
      const int64_t end = std::min(begin + kPieceBytes, unit.end);
      uint8_t* const bytes = lane.next();
      reader_.read(bytes, begin, end - begin);
      if (options_.verify) sum.add(bytes, end - begin);  // while a cache still has it
      range = send(bytes, begin, end, range, lane);
      lane.end_buffer();
    }
    if (options_.verify) check_block(reader_.source(), unit.begin / kBlockBytes, sum.hex());
  }

  //! Sends what ranges want of bytes [begin, end); returns the first range that ends after `end`.
  size_t send(const uint8_t* bytes, int64_t begin, int64_t end, size_t range, Lane& lane) {
    for (; range < ranges_.size() && ranges_[range].begin < end; ++range) {
      const UploadRange& wanted = ranges_[range];
      const int64_t first = std::max(begin, wanted.begin);
      const int64_t last = std::min(end, wanted.end);
      if (first < last) {
        lane.send(bytes + (first - begin), wanted.to + (first - wanted.begin), last - first);
        if (options_.add_bytes) options_.add_bytes(last - first);
      }
      if (wanted.end > end) break;
    }
    return range;
  }

  const SourceReader& reader_;
  const std::vector<UploadRange>& ranges_;
  const UploadOptions& options_;
  const std::string what_;
  std::atomic<bool> stop_{false};
  Lanes lanes_;
};

void fill(const Source& source, const std::vector<UploadRange>& ranges,
          const UploadOptions& options) {
  const std::string what =
      concat(source.name, ": fill by a formula on GPU ", pci_bus_id(options.device));
  const Stream stream = make_stream(what.c_str());
  for (const UploadRange& range : ranges) {
    for (int64_t begin = range.begin; begin < range.end; begin += kFormulaBytes) {
      if (options.cancelled && options.cancelled()) throw_loading_cancelled();
      const int64_t num_bytes = std::min(kFormulaBytes, range.end - begin);
      check_cuda(fill_formula_cuda(*source.formula, begin, num_bytes,
                                   range.to + (begin - range.begin), stream.get()),
                 what.c_str());
      check_cuda(cudaStreamSynchronize(stream.get()), what.c_str());
      if (options.add_bytes) options.add_bytes(num_bytes);
    }
  }
}
#endif

}  // namespace

std::vector<UploadUnit> upload_units(const std::vector<UploadRange>& ranges, int64_t num_bytes,
                                     bool verify) {
  std::vector<UploadUnit> units;
  int64_t done = 0;
  for (size_t range = 0; range < ranges.size(); ++range) {
    int64_t begin = std::max(done, ranges[range].begin);
    if (verify) begin = std::max(done, begin / kBlockBytes * kBlockBytes);
    while (begin < ranges[range].end) {
      const int64_t block_end = std::min((begin / kBlockBytes + 1) * kBlockBytes, num_bytes);
      const int64_t end = verify ? block_end : std::min(block_end, ranges[range].end);
      units.push_back({begin, end, range});
      begin = done = end;
    }
  }
  return units;
}

void upload([[maybe_unused]] const SourceReader& reader,
            [[maybe_unused]] const std::vector<UploadRange>& ranges, const UploadOptions& options) {
  require_cuda(options.device);
#if ENGRAM_CUDA
  const OnGpu gpu(options.device);  // to the end: of the lanes, too
  const Source& source = reader.source();
  if (source.formula) return fill(source, ranges, options);
  if (options.verify) check_sums(source);
  FileUpload(reader, ranges, options).run();
#endif
}

}  // namespace engram
