// SPDX-License-Identifier: Apache-2.0
// hash_cpu against a twin that follows the definition position by position, with divisions.
#include <algorithm>
#include <map>
#include <string>

#include "doctest/doctest.h"
#include "engram/error.h"
#include "engram/layout.h"
#include "engram/ops.h"
#include "random.h"

namespace engram {
namespace {

constexpr int kVocab = 1000;
constexpr int kPad = 2;

struct HashCase {
  int layers, order, heads;
  std::vector<int64_t> multipliers, primes, offsets;
  std::vector<int32_t> token_map, token_ids, cu_seqlens, lookback, next_lookback, ids;
  std::vector<int64_t> positions;
  std::vector<uint8_t> dead, lookback_dead;

  HashCase(int num_layers, int max_order, int num_heads, const std::vector<int>& lengths,
           uint32_t seed)
      : layers(num_layers), order(max_order), heads(num_heads) {
    Random random(seed);
    const auto columns = static_cast<size_t>((order - 1) * heads);
    multipliers = random.integers<int64_t>(static_cast<size_t>(layers * order), 1, INT64_MAX / 600);
    for (int layer = 0; layer < layers; ++layer) {
      int64_t offset = 0;
      for (size_t column = 0; column < columns; ++column) {
        primes.push_back(random.integer(1, 16000000));
        offsets.push_back(offset);
        offset += primes.back();
      }
    }
    token_map = random.integers<int32_t>(kVocab, 0, 599);
    cu_seqlens = {0};
    for (const int length : lengths) {
      const int64_t first = random.integer(0, 5);
      for (int i = 0; i < length; ++i) positions.push_back(first + i);
      cu_seqlens.push_back(cu_seqlens.back() + length);
    }
    const auto tokens = positions.size();
    const auto window = lengths.size() * static_cast<size_t>(order - 1);
    token_ids = random.integers<int32_t>(tokens, 0, kVocab - 1);
    dead = random.integers<uint8_t>(tokens, 0, 9);
    for (uint8_t& flag : dead) flag = flag == 0;
    lookback = random.integers<int32_t>(window, -100, kVocab - 1);
    for (int32_t& id : lookback) id = id == -100 ? kLostId : std::max(id, kUnknownId);
    lookback_dead = random.integers<uint8_t>(window, 0, 9);
    for (uint8_t& flag : lookback_dead) flag = flag == 0;
    next_lookback.assign(window, -7);
    ids.assign(tokens * columns * static_cast<size_t>(layers), -7);
  }

  engram_hash_args args() {
    return {.multipliers = multipliers.data(),
            .primes = primes.data(),
            .offsets = offsets.data(),
            .token_map = token_map.data(),
            .token_ids = token_ids.data(),
            .positions = positions.data(),
            .cu_seqlens = cu_seqlens.data(),
            .lookback_ids = lookback.data(),
            .lookback_dead = lookback_dead.data(),
            .dead_mask = dead.data(),
            .hash_ids = ids.data(),
            .next_lookback_ids = next_lookback.data(),
            .num_tokens = static_cast<int64_t>(token_ids.size()),
            .num_requests = static_cast<int32_t>(cu_seqlens.size()) - 1,
            .num_layers = layers,
            .max_ngram_size = order,
            .num_heads = heads,
            .vocab_size = kVocab,
            .pad_token_id = kPad,
            .positions_dtype = ENGRAM_INT64};
  }

  //! The same request by request: every known position of the sequence in one map.
  std::vector<int32_t> twin() const {
    std::vector<int32_t> result;
    for (size_t request = 0; request + 1 < cu_seqlens.size(); ++request) {
      const auto begin = static_cast<size_t>(cu_seqlens[request]);
      const auto end = static_cast<size_t>(cu_seqlens[request + 1]);
      if (begin == end) continue;
      std::map<int64_t, int64_t> sources;
      for (size_t t = begin; t < end; ++t) {
        sources[positions[t]] = dead[t] ? kDead : token_map[static_cast<size_t>(token_ids[t])];
      }
      for (int column = 0; column < order - 1; ++column) {
        const size_t slot = request * static_cast<size_t>(order - 1) + static_cast<size_t>(column);
        if (lookback[slot] == kUnknownId) continue;
        const int32_t id = lookback[slot];
        sources[positions[begin] - 1 - column] = lookback_dead[slot] ? kDead
                                                 : id == kLostId
                                                     ? kLost
                                                     : token_map[static_cast<size_t>(id)];
      }
      for (size_t t = begin; t < end; ++t) hash_position(sources, positions[t], &result);
    }
    return result;
  }

 private:
  static constexpr int kDead = -1;
  static constexpr int kLost = -2;

  void hash_position(const std::map<int64_t, int64_t>& sources, int64_t position,
                     std::vector<int32_t>* result) const {
    std::vector<int64_t> values;
    bool blocked = false;
    for (int shift = 0; shift < order; ++shift) {
      const auto found = sources.find(position - shift);
      blocked =
          blocked || position - shift < 0 || (found != sources.end() && found->second == kDead);
      values.push_back(blocked || found == sources.end() ? token_map[kPad] : found->second);
    }
    if (std::count(values.begin(), values.end(), kLost) > 0) {
      const int num_ids = layers * (order - 1) * heads;
      result->insert(result->end(), static_cast<size_t>(num_ids), kLostId);
      return;
    }
    for (int layer = 0; layer < layers; ++layer) {
      for (int column = 0; column < (order - 1) * heads; ++column) {
        int64_t rolling = 0;
        for (int shift = 0; shift <= column / heads + 1; ++shift) {
          rolling ^= values[static_cast<size_t>(shift)] *
                     multipliers[static_cast<size_t>(layer * order + shift)];
        }
        const auto i = static_cast<size_t>(layer * (order - 1) * heads + column);
        result->push_back(static_cast<int32_t>(rolling % primes[i] + offsets[i]));
      }
    }
  }
};

TEST_CASE("FastMod is exact") {
  Random random(1);
  int wrong = 0;
  for (int i = 0; i < 20000; ++i) {
    const int64_t divisor = random.integer(1, i % 2 ? INT32_MAX : 50);
    const FastMod remainder(divisor);
    const int64_t multiple = INT64_MAX / divisor * divisor;
    for (const int64_t value : {random.integer(0, INT64_MAX), multiple, multiple - 1, INT64_MAX}) {
      wrong += remainder(static_cast<uint64_t>(value)) != static_cast<uint64_t>(value % divisor);
    }
  }
  CHECK(wrong == 0);
}

TEST_CASE("hash equals its twin") {
  HashCase test(2, 4, 8, {5, 0, 1, 37, 2, 0}, 3);
  SUBCASE("as in V4.1") {}
  SUBCASE("smallest") { test = HashCase(1, 2, 1, {1}, 4); }
  SUBCASE("highest order") { test = HashCase(3, kMaxNgramSize, 3, {0, 11, 3}, 5); }
  SUBCASE("many threads") { test = HashCase(2, 3, 2, {4000, 1, 5000}, 6); }
  SUBCASE("lost ids") {
    test.lookback[0] = test.lookback[7] = test.lookback[9] = kLostId;
    test.lookback_dead.assign(test.lookback_dead.size(), 0);
    test.lookback_dead[9] = 1;
  }
  hash_cpu(test.args(), 3);
  CHECK(test.ids == test.twin());
}

TEST_CASE("a chunk and its successor give what one call gives") {
  HashCase whole(2, 4, 2, {9}, 7);
  whole.dead.assign(9, 0);
  whole.lookback_dead.assign(3, 0);
  hash_cpu(whole.args(), 1);
  for (int first = 1; first < 9; ++first) {
    HashCase parts = whole;
    parts.ids.assign(whole.ids.size(), -7);
    engram_hash_args args = parts.args();
    std::vector<int32_t> cu_seqlens = {0, first};
    args.cu_seqlens = cu_seqlens.data();
    args.num_tokens = first;
    hash_cpu(args, 1);
    cu_seqlens[1] = 9 - first;
    args.num_tokens = 9 - first;
    args.token_ids += first;
    args.positions = parts.positions.data() + first;
    args.hash_ids += first * 2 * 6;
    args.lookback_ids = parts.next_lookback.data();
    std::vector<int32_t> last(3);
    args.next_lookback_ids = last.data();
    hash_cpu(args, 1);
    CHECK(parts.ids == whole.ids);
    CHECK(last == whole.next_lookback);
  }
}

TEST_CASE("without cu_seqlens every token is a request") {
  HashCase test(1, 3, 2, {1, 1, 1, 1}, 8);
  engram_hash_args args = test.args();
  args.cu_seqlens = nullptr;
  hash_cpu(args, 1);
  CHECK(test.ids == test.twin());
}

TEST_CASE("bad ids and boundaries are named, and nothing is written") {
  HashCase test(1, 3, 2, {3, 2}, 9);
  std::string expected;
  SUBCASE("token") {
    test.token_ids[4] = kVocab;
    expected = "token_ids[4]: expected 0 to 999, got 1000";
  }
  SUBCASE("lookback") {
    test.lookback[1] = -2;
    expected = "lookback_ids[1]: expected -1 to 999, got -2";
  }
  SUBCASE("first boundary") {
    test.cu_seqlens[0] = 1;
    expected = "cu_seqlens[0]: expected 0, got 1";
  }
  SUBCASE("falling boundary") {
    test.cu_seqlens[1] = 6;
    expected = "cu_seqlens[2]: expected 6 or more, as the boundary before it, got 5";
  }
  SUBCASE("last boundary") {
    test.cu_seqlens[2] = 4;
    expected = "cu_seqlens[2]: expected 5, the number of tokens, got 4";
  }
  SUBCASE("prime") {
    test.primes[3] = 0;
    expected = "primes[3]: expected 1 to 2147483647, got 0";
  }
  const std::vector<int32_t> before = test.ids;
  CHECK_THROWS_WITH_AS(hash_cpu(test.args(), 1), expected.c_str(), Error);
  CHECK(test.ids == before);
  CHECK(test.next_lookback == std::vector<int32_t>(test.next_lookback.size(), -7));
}

}  // namespace
}  // namespace engram
