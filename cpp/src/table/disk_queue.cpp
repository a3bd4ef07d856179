// SPDX-License-Identifier: Apache-2.0
#include "table/disk_queue.h"

#include <liburing.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <new>
#include <utility>

#include "engram/error.h"
#include "engram/row.h"
#include "parallel.h"
#include "table/log.h"

namespace engram {
namespace {

struct FreePages {
  void operator()(uint8_t* bytes) const {
    operator delete[](bytes, std::align_val_t{DiskQueue::kPageBytes});
  }
};
using Pages = std::unique_ptr<uint8_t[], FreePages>;

Pages make_pages(int64_t num_bytes) {
  return Pages(new (std::align_val_t{DiskQueue::kPageBytes}) uint8_t[num_bytes]);
}

class RingQueue final : public DiskQueue {
 public:
  //! Throws Error where there can be no ring.
  RingQueue() : memory_(make_pages(row_offset(kDepth, kMostBytes))) {
    io_uring_params params{};
    const int code = io_uring_queue_init_params(kDepth, &ring_, &params);
    if (code < 0) throw Error(ENGRAM_INTERNAL_ERROR, std::strerror(-code));
    if ((params.features & IORING_FEAT_RW_CUR_POS) != 0) return;
    io_uring_queue_exit(&ring_);
    throw Error(ENGRAM_INTERNAL_ERROR, "the kernel is older than 5.6");
  }
  ~RingQueue() override { io_uring_queue_exit(&ring_); }

  void run(const std::vector<DiskRead>& reads, const TakeRead& take) override {
    std::vector<int> free(kDepth);
    for (int slot = 0; slot < kDepth; ++slot) free[static_cast<size_t>(slot)] = slot;
    size_t queued = 0, submitted = 0, taken = 0;
    while (taken < reads.size()) {
      for (; whole_ && queued < reads.size() && !free.empty(); ++queued) {
        add(reads[queued], queued, free.back());
        free.pop_back();
      }
      // A thread that must wait anyway collects what has come meanwhile, in one call.
      const int code = whole_ ? io_uring_submit_and_wait(&ring_, 1) : wait();
      if (code >= 0) {
        submitted += whole_ ? static_cast<size_t>(code) : 0;
      } else if (code != -EINTR && code != -EAGAIN && code != -EBUSY) {
        // What has been submitted still writes to our memory: it is waited for.
        whole_ = false;
        for (; submitted < reads.size(); ++submitted, ++taken) take(submitted, nullptr, code);
      }
      taken += take_completed(take, &free);
    }
  }

  bool is_whole() const override { return whole_; }

 private:
  //! A read's place among the reads and its slot of memory, as one word.
  static constexpr int kSlotBits = 16;
  static_assert(kDepth <= 1 << kSlotBits);

  uint8_t* slot_bytes(int slot) const { return memory_.get() + row_offset(slot, kMostBytes); }

  int wait() {
    io_uring_cqe* entry = nullptr;
    return io_uring_wait_cqe(&ring_, &entry);
  }

  void add(const DiskRead& read, size_t index, int slot) {
    io_uring_sqe* const entry = io_uring_get_sqe(&ring_);  // there are as many as slots
    io_uring_prep_read(entry, read.file, slot_bytes(slot), static_cast<unsigned>(read.num_bytes),
                       static_cast<uint64_t>(read.offset));
    io_uring_sqe_set_data64(entry, index << kSlotBits | static_cast<uint64_t>(slot));
  }

  size_t take_completed(const TakeRead& take, std::vector<int>* free) {
    unsigned count = 0, head = 0;
    io_uring_cqe* entry = nullptr;
    io_uring_for_each_cqe(&ring_, head, entry) {
      const uint64_t word = io_uring_cqe_get_data64(entry);
      const auto slot = static_cast<int>(word & ((1 << kSlotBits) - 1));
      take(word >> kSlotBits, slot_bytes(slot), entry->res);
      free->push_back(slot);
      ++count;
    }
    io_uring_cq_advance(&ring_, count);
    return count;
  }

  Pages memory_;
  io_uring ring_{};
  bool whole_ = true;
};

class ThreadQueue final : public DiskQueue {
 public:
  void run(const std::vector<DiskRead>& reads, const TakeRead& take) override {
    const auto count = static_cast<int64_t>(reads.size());
    // Several turns a thread: none waits long for the slowest.
    const int64_t grain = std::max<int64_t>(1, count / (4 * kThreads));
    parallel_for(count, grain, kThreads, [&](int64_t begin, int64_t end) {
      const Pages memory = make_pages(kMostBytes);
      for (auto i = static_cast<size_t>(begin); i < static_cast<size_t>(end); ++i) {
        const DiskRead& read = reads[i];
        ssize_t found = 0;
        do {
          found = pread(read.file, memory.get(), static_cast<size_t>(read.num_bytes), read.offset);
        } while (found < 0 && errno == EINTR);
        take(i, memory.get(), found < 0 ? -errno : found);
      }
    });
  }
};

//! Empty where this process may have a ring, else why not.
std::string ring_problem() {
  try {
    RingQueue{};
    return "";
  } catch (const Error& error) {
    return error.what();
  }
}

}  // namespace

DiskQueues::DiskQueues() : owner_(getpid()) {
  const std::string problem = ring_problem();
  uses_ring_ = problem.empty();
  static std::atomic<bool> told{false};
  if (uses_ring_ || told.exchange(true)) return;
  log(LogLevel::kWarning, concat("tables on disk are read by threads, which is slower: io_uring "
                                 "cannot be had: ",
                                 problem));
}

std::unique_ptr<DiskQueue> DiskQueues::borrow() {
  {
    const std::lock_guard lock(mutex_);
    // NOTE: a ring is one process's: what a child submits to its parent's would be lost there.
    if (owner_ != getpid()) idle_.clear();
    owner_ = getpid();
    if (!idle_.empty()) {
      auto queue = std::move(idle_.back());
      idle_.pop_back();
      return queue;
    }
  }
  if (uses_ring_) {
    try {
      return std::make_unique<RingQueue>();
    } catch (const Error&) {
      // No more of them (descriptors, locked memory): this call does without.
    }
  }
  return std::make_unique<ThreadQueue>();
}

void DiskQueues::run(const std::vector<DiskRead>& reads, const TakeRead& take) {
  auto queue = borrow();
  queue->run(reads, take);
  if (!queue->is_whole()) return;
  const std::lock_guard lock(mutex_);
  idle_.push_back(std::move(queue));
}

}  // namespace engram
