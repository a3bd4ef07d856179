// SPDX-License-Identifier: Apache-2.0
#include <thread>
#include <vector>

#include "doctest/doctest.h"
#include "table/worker_pool.h"

namespace engram {
namespace {

//! Counts how often each unit is done.
class Counting final : public WorkerPool::Job {
 public:
  explicit Counting(int64_t num_units) : done_(static_cast<size_t>(num_units)) {}
  ~Counting() { wait(); }

  void run(WorkerPool* pool) {
    pool->start(this, static_cast<int64_t>(done_.size()));
    ++num_runs_;
  }
  bool is_right() const {
    wait();
    for (const int64_t count : done_) {
      if (count != num_runs_) return false;
    }
    return true;
  }

 private:
  void do_unit(int64_t unit) noexcept override {
    ++done_[static_cast<size_t>(unit)];  // no other thread has this unit
  }

  std::vector<int64_t> done_;
  int64_t num_runs_ = 0;
};

}  // namespace

TEST_CASE("jobs of several threads are done once each time, whoever does them") {
  for (const int num_threads : {1, 3}) {
    WorkerPool pool(num_threads);
    std::vector<std::thread> callers;
    for (int i = 0; i < 4; ++i) {
      callers.emplace_back([&pool, i] {
        for (int turn = 0; turn < 5; ++turn) {
          Counting job(i * 50);
          for (int run = 0; run < 20; ++run) job.run(&pool);
          CHECK(job.is_right());
        }
      });
    }
    for (std::thread& caller : callers) caller.join();
  }
}

TEST_CASE("a pool that nobody uses ends") { const WorkerPool pool(2); }

}  // namespace engram
