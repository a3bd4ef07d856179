// SPDX-License-Identifier: Apache-2.0
//! \file disk_queue.h
//! Many reads of files at once: by io_uring, or by threads where a process may not have that.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace engram {

//! Whole pages of an open file.
struct DiskRead {
  int file = -1;  //!< its descriptor
  int64_t offset = 0;
  int32_t num_bytes = 0;  //!< at most DiskQueue::kMostBytes
};

//! Takes what a read brought: `bytes` is valid until it returns, `count` how many came (fewer at a
//! file's end) or -errno. It runs on any thread, several at once, and must not throw.
using TakeRead = std::function<void(size_t read_idx, const uint8_t* bytes, int64_t count)>;

//! One caller at a time.
class DiskQueue {
 public:
  static constexpr int64_t kPageBytes = 4096;  //!< no disk asks for more
  static constexpr int32_t kMostBytes = 16 << 10;
  static constexpr int kDepth = 256;   //!< reads under way, by io_uring
  static constexpr int kThreads = 32;  //!< reads under way, by threads

  virtual ~DiskQueue() = default;
  //! Returns once all have been taken, each once, in any order.
  virtual void run(const std::vector<DiskRead>& reads, const TakeRead& take) = 0;
  //! False once the kernel has broken it: it is to be thrown away.
  virtual bool is_whole() const { return true; }
};

//! Queues for any number of threads: as many as have ever run at once.
class DiskQueues {
 public:
  //! Looks which kind there can be; says in the log, once a process, why it is not io_uring.
  DiskQueues();

  //! "io_uring" or "pread".
  const char* kind() const { return uses_ring_ ? "io_uring" : "pread"; }
  //! DiskQueue::run, on a queue that is this call's alone. Thread-safe.
  void run(const std::vector<DiskRead>& reads, const TakeRead& take);

 private:
  std::unique_ptr<DiskQueue> borrow();

  bool uses_ring_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<DiskQueue>> idle_;
  pid_t owner_;  // of the idle ones: a forked child has none
};

}  // namespace engram
