// SPDX-License-Identifier: Apache-2.0
//! \file parallel.h
//! A loop over threads. Nothing is kept between calls, so a process may fork at any time between
//! them.
#pragma once

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

namespace engram {

//! CPUs that this thread may run on.
inline int usable_threads() {
  cpu_set_t cpus;
  CPU_ZERO(&cpus);
  if (sched_getaffinity(0, sizeof(cpus), &cpus) == 0) return std::max(1, CPU_COUNT(&cpus));
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

//! Calls fn(begin, end) for ranges of `grain` (the last may be shorter) that cover [0, count), each
//! once, on up to num_threads threads (0: usable_threads()). A grain should hold more work than a
//! thread costs, about 20 us. The first exception is thrown again here; ranges not begun by then
//! are dropped.
template <typename Fn>
void parallel_for(int64_t count, int64_t grain, int num_threads, const Fn& fn) {
  const int64_t num_ranges = (count + grain - 1) / grain;
  const int64_t wanted = num_threads > 0 ? num_threads : usable_threads();
  std::atomic<int64_t> next_range{0};
  std::exception_ptr failure;
  std::mutex failure_mutex;
  const auto work = [&]() noexcept {
    try {
      for (int64_t range; (range = next_range.fetch_add(1)) < num_ranges;) {
        fn(range * grain, std::min(count, (range + 1) * grain));
      }
    } catch (...) {
      next_range.store(num_ranges);
      const std::lock_guard<std::mutex> lock(failure_mutex);
      if (!failure) failure = std::current_exception();
    }
  };
  std::vector<std::thread> helpers;
  try {
    helpers.reserve(static_cast<size_t>(std::max<int64_t>(0, std::min(wanted, num_ranges) - 1)));
    while (helpers.size() < helpers.capacity()) helpers.emplace_back(work);
  } catch (const std::exception&) {
    // No more threads or memory to be had: those that run take over the ranges.
  }
  work();
  for (std::thread& helper : helpers) helper.join();
  if (failure) std::rethrow_exception(failure);
}

}  // namespace engram
