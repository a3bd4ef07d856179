// SPDX-License-Identifier: Apache-2.0
// Groups whose ranks are threads of one process, for ThreadSanitizer.
#include "table/group.h"

#include <unistd.h>

#include <chrono>
#include <thread>

#include "doctest/doctest.h"

namespace engram {
namespace {

constexpr int32_t kSize = 4;

Group::Part endless(Group::Work& work) {
  while (!work.cancelled()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  throw Error(ENGRAM_INTERNAL_ERROR, "stopped");
}

//! Four threads add 1000 bytes.
Group::Part add_by_threads(Group::Work& work) {
  std::vector<std::thread> helpers;
  for (int i = 0; i < 4; ++i) {
    helpers.emplace_back([&work] {
      for (int step = 0; step < 250; ++step) work.add_bytes(1);
    });
  }
  for (std::thread& helper : helpers) helper.join();
  return {{{"done", true}}, {}};
}

//! What each rank's `body` throws, by rank.
template <typename Body>
std::vector<std::string> run_ranks(const std::string& name, const std::atomic<bool>& cancelled,
                                   std::vector<Progress>& progress, const Body& body) {
  std::vector<std::string> texts(kSize);
  std::vector<std::thread> threads;
  for (int32_t rank = 0; rank < kSize; ++rank) {
    threads.emplace_back([&, rank] {
      const auto idx = static_cast<size_t>(rank);
      try {
        const GroupOptions options{.name = concat("thread/", getpid(), "/", name),
                                   .rank = rank,
                                   .size = kSize,
                                   .timeout_s = 60};
        Group group(options, cancelled, &progress[idx]);
        body(group);
      } catch (const Error& error) {
        texts[idx] = error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return texts;
}

TEST_CASE("ranks exchange, report progress and fail together") {
  const std::atomic<bool> cancelled{false};
  std::vector<Progress> progress(kSize);
  std::atomic<bool> end{false};
  std::thread reader([&] {
    for (int64_t last = 0; !end;) {
      const int64_t now = progress[1].done;
      CHECK(now >= last);
      last = now;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  });
  const auto texts = run_ranks("fail", cancelled, progress, [](Group& group) {
    group.set_total_bytes(3000 * kSize);
    for (int round = 0; round < 3; ++round) {
      if (group.exchange("load", add_by_threads).size() != kSize) throw Error(ENGRAM_OK, "parts");
    }
    group.exchange("fail", [&](Group::Work& work) {
      if (group.rank() == 2) throw Error(ENGRAM_OUT_OF_MEMORY, "no room");
      return endless(work);
    });
  });
  end = true;
  reader.join();
  for (const std::string& text : texts) CHECK(text == "rank 2: no room");
  for (const Progress& each : progress) {
    CHECK(each.done == 3000 * kSize);
    CHECK(each.total == 3000 * kSize);
  }
}

TEST_CASE("an interrupt from another thread ends all ranks") {
  std::atomic<bool> cancelled{false};
  std::vector<Progress> progress(kSize);
  std::thread user([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    cancelled = true;
  });
  const auto texts = run_ranks("interrupt", cancelled, progress,
                               [](Group& group) { group.exchange("load", endless); });
  user.join();
  for (const std::string& text : texts) CHECK(text.find(": cancelled") != text.npos);
}

}  // namespace
}  // namespace engram
