// SPDX-License-Identifier: Apache-2.0
#include "parallel.h"

#include <stdexcept>

#include "doctest/doctest.h"

namespace engram {
namespace {

TEST_CASE("parallel_for covers each index once") {
  for (const int64_t count : {0, 1, 6, 7, 8, 1000}) {
    for (const int64_t grain : {1, 7, 2000}) {
      for (const int num_threads : {0, 1, 3}) {
        std::vector<std::atomic<int>> visits(static_cast<size_t>(count));
        parallel_for(count, grain, num_threads, [&](int64_t begin, int64_t end) {
          for (int64_t i = begin; i < end; ++i) ++visits[static_cast<size_t>(i)];
        });
        CHECK(std::all_of(visits.begin(), visits.end(), [](const auto& v) { return v == 1; }));
      }
    }
  }
}

TEST_CASE("parallel_for throws a thread's exception again") {
  const auto run = [] {
    parallel_for(100, 1, 3, [](int64_t begin, int64_t) {
      if (begin == 50) throw std::runtime_error("at 50");
    });
  };
  CHECK_THROWS_WITH_AS(run(), "at 50", std::runtime_error);
}

}  // namespace
}  // namespace engram
