// SPDX-License-Identifier: Apache-2.0
#include "table/hot_rows.h"

#include <set>
#include <vector>

#include "doctest/doctest.h"

namespace engram {
namespace {

constexpr int kValues = 6;
constexpr int kScales = 2;
constexpr int64_t kRows = 1 << 20;

//! Each row's bytes are made of its id.
std::vector<uint8_t> bytes_of(int32_t row) {
  std::vector<uint8_t> bytes(kValues + kScales);
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<uint8_t>(row >> i % 4 * 8 ^ i);
  return bytes;
}

void insert(HotRows& rows, int32_t row) {
  const std::vector<uint8_t> bytes = bytes_of(row);
  rows.insert(row, bytes.data(), bytes.data() + kValues);
}

//! Whether it is there; it must be right then.
bool has(HotRows& rows, int32_t row) {
  std::vector<uint8_t> bytes(kValues + kScales);
  if (!rows.find(row, bytes.data(), bytes.data() + kValues)) return false;
  CHECK(bytes == bytes_of(row));
  return true;
}

TEST_CASE("rows that were kept are found until others take their place") {
  HotRows rows(100000, kRows, kValues, kScales);
  CHECK(rows.num_bytes() <= 100000);
  const auto capacity = static_cast<int32_t>(rows.capacity());
  CHECK(capacity > 3000);
  for (int32_t row = 0; row < capacity; ++row) insert(rows, row);
  for (int32_t row = 0; row < capacity; ++row) CHECK(has(rows, row));
  for (int32_t row = capacity; row < 3 * capacity; ++row) insert(rows, row);
  int32_t kept = 0;
  for (int32_t row = 0; row < 3 * capacity; ++row) kept += has(rows, row);
  CHECK(kept == capacity);
}

TEST_CASE("a row that is found now and then outlives those that are not") {
  HotRows rows(50000, kRows, kValues, kScales);
  const auto capacity = static_cast<int32_t>(rows.capacity());
  const std::set<int32_t> loved = {1, 70, 12345};
  for (const int32_t row : loved) insert(rows, row);
  for (int32_t row = 0; row < 10 * capacity; ++row) {
    insert(rows, 20000 + row);
    if (row % (capacity / 4) != 0) continue;
    for (const int32_t each : loved) CHECK(has(rows, each));
  }
}

TEST_CASE("the whole of a small table fits, whatever the budget, and nothing fits into none") {
  HotRows all(int64_t{1} << 40, 1000, kValues, 0);
  CHECK(all.capacity() < 1100);
  for (int32_t row = 0; row < 1000; ++row) insert(all, row);
  std::vector<uint8_t> bytes(kValues);
  for (int32_t row = 0; row < 1000; ++row) CHECK(all.find(row, bytes.data(), nullptr));
  CHECK(all.num_found() == 1000);
  for (const int64_t budget : {int64_t{0}, int64_t{1000}}) {
    HotRows none(budget, kRows, kValues, kScales);
    insert(none, 1);
    CHECK(!has(none, 1));
    CHECK(none.num_bytes() == 0);
  }
}

}  // namespace
}  // namespace engram
