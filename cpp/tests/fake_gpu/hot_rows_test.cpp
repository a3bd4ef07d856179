// SPDX-License-Identifier: Apache-2.0
// Hot rows in the memory of GPUs that are made of host memory.
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>

#include "../random.h"
#include "doctest/doctest.h"
#include "fake_gpus.h"
#include "table/gpu_hot_rows.h"

namespace engram {
namespace {

constexpr int kHeadDim = 64;
constexpr int kNumScales = kHeadDim / kScaleBlock;
constexpr int64_t kNumRows = 300000;
constexpr int kColumns = 3;
constexpr int64_t kAdaptiveBuckets = 100;

struct Rows {
  std::vector<uint8_t> values = std::vector<uint8_t>(kNumRows * kHeadDim);
  std::vector<uint8_t> scales = std::vector<uint8_t>(kNumRows * kNumScales);
  std::vector<int32_t> ids;

  explicit Rows(size_t num_ids) {
    Random random(1);
    for (uint8_t& byte : values) byte = static_cast<uint8_t>(random.integer(0, 255));
    for (uint8_t& byte : scales) byte = static_cast<uint8_t>(random.integer(0, 255));
    ids = random.integers<int32_t>(num_ids, 0, kNumRows - 1);
  }

  HotSource source(bool with_scales) const {
    return {.label = "a",
            .values = values.data(),
            .scales = with_scales ? scales.data() : nullptr,
            .head_dim = kHeadDim,
            .num_columns = kColumns};
  }
};

TEST_CASE("hot rows: each GPU has the rows' bytes where lookups find them") {
  fake::machine().visible = {"0000:1B:00.0", "0000:3B:00.0"};
  const Rows rows(80000);  // more than a piece of the way
  for (const bool with_scales : {true, false}) {
    GpuHotRows hot(rows.source(with_scales), make_hot_buckets(rows.ids, 100000), kAdaptiveBuckets);
    CHECK(hot.num_bytes() == 0);
    CHECK(hot.num_rows() > 50000);
    CHECK(hot.capacity() <= 100000);
    for (const int device : {0, 1}) {
      const engram_hot_rows there = hot.on_device(device);
      CHECK(hot.on_device(device).values == there.values);
      int64_t num_found = 0;
      for (int32_t id = 0; id < kNumRows; ++id) {
        const int64_t slot = find_hot_slot(there, id);
        if (slot == kNoSlot) continue;
        ++num_found;
        REQUIRE(memcmp(there.values + row_offset(slot, kHeadDim),
                       rows.values.data() + row_offset(id, kHeadDim), kHeadDim) == 0);
        if (!with_scales) continue;
        REQUIRE(memcmp(there.scales + row_offset(slot, kNumScales),
                       rows.scales.data() + row_offset(id, kNumScales), kNumScales) == 0);
      }
      CHECK(num_found == hot.num_rows());
      CHECK((there.scales != nullptr) == with_scales);
      const engram_adaptive_rows& adaptive = there.adaptive;
      REQUIRE(adaptive.num_buckets == kAdaptiveBuckets);
      CHECK(hot.adaptive_capacity() == kAdaptiveBuckets * kAdaptiveWays);
      for (int64_t i = 0; i < hot.adaptive_capacity(); ++i) {
        REQUIRE(adaptive.slots[i] == kEmptySlot);
        memset(adaptive.values + row_offset(i, kHeadDim), 1, kHeadDim);
        if (with_scales) memset(adaptive.scales + row_offset(i, kNumScales), 1, kNumScales);
      }
      CHECK((adaptive.scales != nullptr) == with_scales);
      there.counts[3 * device] += 5;
      there.counts[3 * device + 1] += 2;
      there.counts[3 * device + 2] += 1;
      there.counts[3 * 2] += 1;
      const int64_t row_bytes = kHeadDim + (with_scales ? kNumScales : 0);
      const int64_t gpu_bytes = hot.capacity() * (row_bytes + 4) +
                                hot.adaptive_capacity() * (row_bytes + 8) + kColumns * 24;
      CHECK(hot.num_bytes() == (device + 1) * gpu_bytes);
    }
    const std::vector<HotCounts> counts = hot.counts();
    CHECK(counts[0].num_asked == 5);
    CHECK(counts[1].num_found == 2);
    CHECK(counts[1].num_adaptive == 1);
    CHECK(counts[2].num_asked == 2);
    CHECK(counts[2].num_found == 0);
  }
}

TEST_CASE("hot rows: a GPU that cannot be asked has the counts that it last told") {
  fake::machine().visible = {"0000:1B:00.0"};
  const Rows rows(1000);
  GpuHotRows hot(rows.source(true), make_hot_buckets(rows.ids, 1000), 0);
  hot.on_device(0).counts[0] = 5;
  CHECK(hot.counts()[0].num_asked == 5);
  const pid_t child = fork();  // whose parent's CUDA is not its own
  if (child == 0) _exit(hot.counts()[0].num_asked == 5 ? 0 : 1);
  int status = -1;
  REQUIRE(waitpid(child, &status, 0) == child);
  CHECK(status == 0);
}

TEST_CASE("hot rows: an adaptive part alone") {
  fake::machine().visible = {"0000:1B:00.0"};
  const Rows rows(0);
  GpuHotRows hot(rows.source(true), {}, 1);
  const engram_hot_rows there = hot.on_device(0);
  CHECK(there.num_buckets == 0);
  CHECK(there.adaptive.num_buckets == 1);
  CHECK(hot.num_bytes() == kAdaptiveWays * (kHeadDim + kNumScales + 8) + kColumns * 24);
}

TEST_CASE("hot rows: without room for a bucket there are none, and nothing is taken") {
  fake::machine().visible = {"0000:1B:00.0"};
  const Rows rows(100);
  GpuHotRows hot(rows.source(true), make_hot_buckets(rows.ids, 7), 0);
  CHECK(hot.on_device(0).num_buckets == 0);
  CHECK(hot.num_bytes() == 0);
}

}  // namespace
}  // namespace engram
