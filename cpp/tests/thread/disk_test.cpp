// SPDX-License-Identifier: Apache-2.0
#include <atomic>
#include <thread>
#include <vector>

#include "../made_disk_table.h"
#include "doctest/doctest.h"

namespace engram {
namespace {

TEST_CASE("threads that read and keep rows of one table, more than it may keep") {
  for (const ScalesIn scales_in : {ScalesIn::kFile, ScalesIn::kRam}) {
    MadeDiskTable table(scales_in, 200000);
    std::atomic<int64_t> wrong{0};
    std::vector<std::thread> threads;
    for (uint64_t thread = 0; thread < 4; ++thread) {
      threads.emplace_back([&, thread] {
        for (uint64_t turn = 0; turn < 20; ++turn) {
          std::vector<int32_t> ids(500);
          uint64_t seed = thread % 2 + turn;  // two ask for the same at once
          for (int32_t& id : ids) {
            seed = formula_mix(seed + kFormulaStep);
            id = static_cast<int32_t>(seed % (turn % 2 == 0 ? 2000 : kDiskRows));
          }
          wrong += table.num_wrong(ids);
          table.reader().take_fault();
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    CHECK(wrong == 0);
    CHECK(table.reader().counts().hot_rows > 0);
  }
}

}  // namespace
}  // namespace engram
