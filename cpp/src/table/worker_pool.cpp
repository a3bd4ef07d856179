// SPDX-License-Identifier: Apache-2.0
#include "table/worker_pool.h"

#include <algorithm>
#include <chrono>
#include <system_error>

#include "engram/error.h"
#include "parallel.h"

namespace engram {

// Most often there is nothing to wait for, or a few instructions of another thread.
void WorkerPool::Job::wait() const {
  while (num_left_.load(std::memory_order_acquire) != 0 ||
         num_inside_.load(std::memory_order_acquire) != 0) {
    std::this_thread::yield();
  }
}

WorkerPool::WorkerPool(int num_threads) {
  try {
    while (static_cast<int>(threads_.size()) < num_threads) {
      threads_.emplace_back([this] { work(); });
    }
  } catch (const std::system_error& error) {
    if (threads_.empty()) {
      throw Error(
          ENGRAM_INTERNAL_ERROR,
          concat("threads that gather rows: expected at least 1, found none: ", error.what()));
    }
  }
}

WorkerPool::~WorkerPool() {
  {
    const std::lock_guard lock(mutex_);
    ends_ = true;
  }
  has_jobs_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void WorkerPool::start(Job* job, int64_t num_units) noexcept {
  if (num_units == 0) return;
  job->wait();
  job->num_units_ = num_units;
  job->num_left_.store(num_units, std::memory_order_relaxed);
  job->next_.store(0, std::memory_order_relaxed);
  {
    const std::lock_guard lock(mutex_);
    jobs_.push_back(job);
  }
  has_jobs_.notify_all();
}

void WorkerPool::work() {
  std::unique_lock lock(mutex_);
  for (;;) {
    while (!ends_ && jobs_.empty()) {
      // NOTE: wait() without a time takes a newer libstdc++ than wheels may ask for.
      has_jobs_.wait_for(lock, std::chrono::hours(1));
    }
    if (ends_) return;
    Job* const job = jobs_.front();
    job->num_inside_.fetch_add(1, std::memory_order_relaxed);
    lock.unlock();
    for (;;) {
      const int64_t unit = job->next_.fetch_add(1, std::memory_order_relaxed);
      if (unit >= job->num_units_) break;
      job->do_unit(unit);
      job->num_left_.fetch_sub(1, std::memory_order_release);
    }
    lock.lock();
    if (!jobs_.empty() && jobs_.front() == job) jobs_.pop_front();
    job->num_inside_.fetch_sub(1, std::memory_order_release);
  }
}

int num_gather_threads(const TableOptions& options, int num_ranks) {
  if (options.placement != Placement::kHost) return 0;
  if (options.gather_threads) return *options.gather_threads;
  const int online = std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
  // Where the launcher has bound a rank to CPUs of its own, these are its share.
  const int num_threads = std::min(usable_threads(), std::max(1, online / num_ranks)) - 1;
  return num_threads < kFewestGatherThreads ? 0 : num_threads;
}

WorkerPool& gather_pool(int num_threads) {
  static auto* const pool = new WorkerPool(num_threads);
  return *pool;
}

}  // namespace engram
