// SPDX-License-Identifier: Apache-2.0
//! \file worker_pool.h
//! Threads that sleep until there is work, and share it out unit by unit. Work that came first is
//! done first.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <thread>

#include "engram/table_options.h"

namespace engram {

class WorkerPool {
 public:
  //! Work of numbered units, begun any number of times, once at a time.
  class Job {
   public:
    Job() = default;
    Job(const Job&) = delete;
    Job& operator=(const Job&) = delete;

   protected:
    ~Job() = default;
    virtual void do_unit(int64_t unit) noexcept = 0;
    //! Until all that was begun is done and no thread has to do with this. For the ends of derived
    //! classes, and whoever begins the job again.
    void wait() const;

   private:
    friend class WorkerPool;

    int64_t num_units_ = 0;
    std::atomic<int64_t> next_{0};
    std::atomic<int64_t> num_left_{0};
    std::atomic<int> num_inside_{0};
  };

  //! Throws Error where no thread can be had; fewer than num_threads are enough.
  explicit WorkerPool(int num_threads);
  //! Once no job is under way.
  ~WorkerPool();
  WorkerPool(const WorkerPool&) = delete;
  WorkerPool& operator=(const WorkerPool&) = delete;

  //! Units 0 to num_units - 1, in any order and at the same time. Returns at once, unless the job's
  //! last time is not over.
  void start(Job* job, int64_t num_units) noexcept;

 private:
  void work();

  std::mutex mutex_;
  std::condition_variable has_jobs_;
  std::deque<Job*> jobs_;
  bool ends_ = false;
  std::deque<std::thread> threads_;
};

//! CPU threads that gather a table's rows for a process's GPUs where num_ranks processes of the
//! machine do: those of the options or, where they say none, the process's share of the CPUs less
//! one for who calls, if that is at least kFewestGatherThreads. 0: GPUs read all rows themselves.
int num_gather_threads(const TableOptions& options, int num_ranks);
constexpr int kFewestGatherThreads = 6;

//! The process's pool, of as many threads as its first call says. Never destroyed: the process ends
//! while they sleep. Throws Error.
WorkerPool& gather_pool(int num_threads);

}  // namespace engram
