// SPDX-License-Identifier: Apache-2.0
// The index of hot rows, held against a map of what is in it.
#include "table/hot_buckets.h"

#include <algorithm>
#include <map>
#include <set>

#include "doctest/doctest.h"
#include "random.h"

namespace engram {
namespace {

engram_hot_rows index_of(const std::vector<HotBucket>& buckets) {
  engram_hot_rows hot{};
  hot.keys = reinterpret_cast<const int32_t*>(buckets.data());
  hot.num_buckets = static_cast<int64_t>(buckets.size());
  return hot;
}

//! Rows that differ, as they come.
std::vector<int32_t> some_ids(uint32_t seed, size_t count, int32_t highest) {
  Random random(seed);
  std::set<int32_t> seen;
  std::vector<int32_t> ids;
  while (ids.size() < count) {
    const auto id = static_cast<int32_t>(random.integer(0, highest));
    if (seen.insert(id).second) ids.push_back(id);
  }
  return ids;
}

//! Slots by id, found by looking at all of them.
std::map<int32_t, int64_t> all_slots(const std::vector<HotBucket>& buckets) {
  std::map<int32_t, int64_t> slots;
  int64_t slot = 0;
  for (const HotBucket& bucket : buckets) {
    for (const int32_t key : bucket.keys) {
      if (key != kNoKey) CHECK(slots.emplace(key, slot).second);
      ++slot;
    }
  }
  return slots;
}

TEST_CASE("hot rows: what is there is found where it is, nothing else is found") {
  for (const int64_t max_slots : {8, 100, 1000, 100000}) {
    for (const int32_t highest : {2000, INT32_MAX}) {
      const std::vector<int32_t> ids = some_ids(1, 900, highest);
      const std::vector<HotBucket> buckets = make_hot_buckets(ids, max_slots);
      CHECK(static_cast<int64_t>(buckets.size()) * kHotWays <= max_slots);
      const engram_hot_rows hot = index_of(buckets);
      const std::map<int32_t, int64_t> slots = all_slots(buckets);
      CHECK(count_hot_rows(buckets) == static_cast<int64_t>(slots.size()));
      for (const int32_t id : ids) {
        const auto found = slots.find(id);
        CHECK(find_hot_slot(hot, id) == (found == slots.end() ? kNoSlot : found->second));
      }
      for (const int32_t id : some_ids(2, 900, highest)) {
        if (slots.count(id) == 0) CHECK(find_hot_slot(hot, id) == kNoSlot);
      }
      for (const auto& [id, slot] : slots) {
        CHECK(std::find(ids.begin(), ids.end(), id) != ids.end());
      }
    }
  }
}

TEST_CASE("hot rows: a place is the first one's that wants it") {
  const std::vector<int32_t> ids = some_ids(3, 4000, 1 << 30);
  const std::vector<HotBucket> buckets = make_hot_buckets(ids, 1000);
  std::map<int64_t, int> taken;
  const std::map<int32_t, int64_t> slots = all_slots(buckets);
  for (const int32_t id : ids) {
    const int64_t bucket = hot_bucket(id, static_cast<int64_t>(buckets.size()));
    CHECK((slots.count(id) == 1) == (taken[bucket]++ < kHotWays));
  }
}

TEST_CASE("hot rows: nearly all of few rows find a place, and of as many as fit most") {
  const std::vector<int32_t> ids = some_ids(4, 20000, 1 << 30);
  CHECK(count_hot_rows(make_hot_buckets(ids, INT32_MAX)) > 20000 * 0.98);
  CHECK(count_hot_rows(make_hot_buckets(ids, 20000)) > 20000 * 0.83);
  std::vector<int32_t> neighbours(20000);
  for (size_t i = 0; i < neighbours.size(); ++i) neighbours[i] = static_cast<int32_t>(i);
  CHECK(count_hot_rows(make_hot_buckets(neighbours, 20000)) > 20000 * 0.83);
}

TEST_CASE("hot rows: no room, no rows") {
  CHECK(make_hot_buckets({1, 2, 3}, 7).empty());
  CHECK(make_hot_buckets({}, 1000).empty());
  CHECK(find_hot_slot({}, 1) == kNoSlot);
}

TEST_CASE("hot rows: repeated ids take one place") {
  const std::vector<HotBucket> buckets = make_hot_buckets({7, 7, 9, 7, 9}, 1000);
  CHECK(count_hot_rows(buckets) == 2);
}

}  // namespace
}  // namespace engram
