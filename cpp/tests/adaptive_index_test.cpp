// SPDX-License-Identifier: Apache-2.0
// Lookups that find and keep rows in one bucket at once: in every order of their steps, and as
// threads.
#include "ops/adaptive_index.h"

#include <array>
#include <atomic>
#include <set>
#include <thread>
#include <vector>

#include "doctest/doctest.h"
#include "random.h"

namespace engram {
namespace {

uint64_t word_of(uint32_t turn, int32_t key) {
  return uint64_t{turn} << 32 | static_cast<uint32_t>(key);
}

AdaptiveBucket bucket_of(const std::array<uint64_t, kAdaptiveWays>& words) {
  AdaptiveBucket bucket{};
  std::copy(words.begin(), words.end(), bucket.words);
  return bucket;
}

TEST_CASE("adaptive rows: words") {
  CHECK(slot_key(kEmptySlot) == kNoKey);
  const uint64_t locked = next_word(kEmptySlot, kLockedKey);
  CHECK(slot_key(locked) == kLockedKey);
  CHECK(slot_turn(locked) == 0);
  CHECK(next_word(kEmptySlot, INT32_MAX) == INT32_MAX);
  CHECK(next_word(word_of(UINT32_MAX, 5), 6) == word_of(0, 6));
}

TEST_CASE("adaptive rows: what is there is found, and the one that was written first goes") {
  const AdaptiveBucket bucket =
      bucket_of({word_of(7, 3), word_of(5, 0), word_of(6, INT32_MAX), word_of(5, 9)});
  CHECK(find_way(bucket, 3) == 0);
  CHECK(find_way(bucket, 0) == 1);
  CHECK(find_way(bucket, INT32_MAX) == 2);
  CHECK(find_way(bucket, 8) == kNoWay);
  CHECK(oldest_way(bucket) == 1);
  CHECK(oldest_way(bucket_of({word_of(1, 3), kEmptySlot, word_of(0, 4), kEmptySlot})) == 1);
  // Where turns begin anew
  const uint64_t after = word_of(1, 3);
  CHECK(oldest_way(bucket_of({after, after, word_of(UINT32_MAX, 5), after})) == 2);
  CHECK(oldest_way(bucket_of({after, word_of(9, kLockedKey), kEmptySlot, after})) == kNoWay);
}

//! A bucket and its rows, which are two chunks that have the row's id.
struct World {
  AdaptiveBucket bucket;
  int32_t rows[kAdaptiveWays][2];
};

//! One lookup of one row, step by step.
struct Lookup {
  enum class Step { kFind, kLoad, kLoadMore, kCheck, kLock, kStore, kStoreMore, kPublish, kEnd };

  int32_t id;
  bool checks = true;  //!< false: as nobody should
  Step step = Step::kFind;
  int way = kNoWay;
  uint64_t word = 0;
  int32_t read[2] = {};
  bool is_wrong = false;

  bool is_done() const { return step == Step::kEnd; }

  void advance(World* world) {
    switch (step) {
      case Step::kFind:
        return find(*world);
      case Step::kLoad:
        read[0] = world->rows[way][0];
        step = Step::kLoadMore;
        return;
      case Step::kLoadMore:
        read[1] = world->rows[way][1];
        step = Step::kCheck;
        return;
      case Step::kCheck:
        is_wrong =
            (world->bucket.words[way] == word || !checks) && (read[0] != id || read[1] != id);
        step = Step::kEnd;
        return;
      case Step::kLock:
        step = world->bucket.words[way] == word ? Step::kStore : Step::kEnd;
        if (step == Step::kStore) world->bucket.words[way] = next_word(word, kLockedKey);
        return;
      case Step::kStore:
        world->rows[way][0] = id;
        step = Step::kStoreMore;
        return;
      case Step::kStoreMore:
        world->rows[way][1] = id;
        step = Step::kPublish;
        return;
      case Step::kPublish:
        world->bucket.words[way] = next_word(word, id);
        step = Step::kEnd;
        return;
      case Step::kEnd:
        return;
    }
  }

 private:
  void find(const World& world) {
    way = find_way(world.bucket, id);
    step = Step::kLoad;
    if (way == kNoWay) {
      way = oldest_way(world.bucket);
      step = way == kNoWay ? Step::kEnd : Step::kLock;
    }
    if (way != kNoWay) word = world.bucket.words[way];
  }
};

struct Outcomes {
  int64_t num_orders = 0;
  int64_t num_wrong = 0;     //!< lookups that gave another row
  int64_t num_mixed = 0;     //!< orders after which a slot had another row than it said
  int64_t num_repeated = 0;  //!< orders after which two had one row
  int64_t num_locked = 0;
};

void try_all(const World& world, const std::vector<Lookup>& lookups, Outcomes* outcomes) {
  bool is_end = true;
  for (size_t i = 0; i < lookups.size(); ++i) {
    if (lookups[i].is_done()) continue;
    is_end = false;
    World next = world;
    std::vector<Lookup> then = lookups;
    then[i].advance(&next);
    try_all(next, then, outcomes);
  }
  if (!is_end) return;
  ++outcomes->num_orders;
  for (const Lookup& lookup : lookups) outcomes->num_wrong += lookup.is_wrong;
  std::set<int32_t> keys;
  for (int way = 0; way < kAdaptiveWays; ++way) {
    const int32_t key = slot_key(world.bucket.words[way]);
    outcomes->num_locked += key == kLockedKey;
    outcomes->num_mixed += world.rows[way][0] != key || world.rows[way][1] != key;
    outcomes->num_repeated += !keys.insert(key).second;
  }
}

//! Whose first slot is replaced again and again.
World full_bucket() {
  World world{.bucket = bucket_of({word_of(0, 10), word_of(9, 11), word_of(9, 12), word_of(9, 13)}),
              .rows = {{10, 10}, {11, 11}, {12, 12}, {13, 13}}};
  return world;
}

TEST_CASE("adaptive rows: in no order of three lookups' steps is a row wrong") {
  const std::vector<std::vector<int32_t>> ids = {
      {10, 20, 30}, {10, 20, 10}, {20, 20, 20}, {20, 20, 30}, {10, 10, 20}};
  for (const std::vector<int32_t>& each : ids) {
    std::vector<Lookup> lookups;
    for (const int32_t id : each) lookups.push_back({.id = id});
    Outcomes outcomes;
    try_all(full_bucket(), lookups, &outcomes);
    CHECK(outcomes.num_orders > 100);
    CHECK(outcomes.num_wrong == 0);
    CHECK(outcomes.num_mixed == 0);
    CHECK(outcomes.num_repeated == 0);
    CHECK(outcomes.num_locked == 0);
  }
}

TEST_CASE("adaptive rows: without the second look at the word some would be") {
  Outcomes outcomes;
  try_all(full_bucket(), {{.id = 10, .checks = false}, {.id = 20}}, &outcomes);
  CHECK(outcomes.num_wrong > 0);
}

TEST_CASE("adaptive rows: threads that read and replace them get no other one") {
  constexpr int kChunks = 8;
  std::array<std::atomic<uint64_t>, kAdaptiveWays> words;
  for (auto& word : words) word = kEmptySlot;
  std::array<std::array<std::atomic<int32_t>, kChunks>, kAdaptiveWays> rows{};
  std::atomic<int64_t> num_wrong{0};
  std::atomic<int64_t> num_found{0};
  std::atomic<int64_t> num_kept{0};
  const auto look_up = [&](int32_t id) {
    AdaptiveBucket bucket;
    for (int i = 0; i < kAdaptiveWays; ++i) {
      bucket.words[i] = words[static_cast<size_t>(i)].load(std::memory_order_acquire);
    }
    const int found = find_way(bucket, id);
    const int way = found == kNoWay ? oldest_way(bucket) : found;
    if (way == kNoWay) return;
    std::atomic<uint64_t>& word = words[static_cast<size_t>(way)];
    auto& row = rows[static_cast<size_t>(way)];
    uint64_t seen = bucket.words[way];
    if (found != kNoWay) {
      bool is_right = true;
      for (auto& chunk : row) is_right &= chunk.load(std::memory_order_acquire) == id;
      if (word.load(std::memory_order_relaxed) != seen) return;
      ++num_found;
      num_wrong += !is_right;
    } else if (word.compare_exchange_strong(seen, next_word(seen, kLockedKey))) {
      for (auto& chunk : row) chunk.store(id, std::memory_order_release);
      word.store(next_word(seen, id), std::memory_order_release);
      ++num_kept;
    }
  };
  std::vector<std::thread> threads;
  for (uint32_t thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&, thread] {
      Random random(thread);
      for (int turn = 0; turn < 50000; ++turn) {
        look_up(static_cast<int32_t>(random.integer(0, turn % 3 == 0 ? 20 : 4)));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(num_wrong == 0);
  CHECK(num_found > 0);
  CHECK(num_kept > kAdaptiveWays);
}

}  // namespace
}  // namespace engram
