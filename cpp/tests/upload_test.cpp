// SPDX-License-Identifier: Apache-2.0
// What of the way onto a GPU needs no GPU: how ranges are cut into reads, and a kernel's bytes.
#include "table/upload.h"

#include <algorithm>
#include <random>

#include "doctest/doctest.h"
#include "engram/error.h"
#include "table/block_sums.h"
#include "table/formula_cuda.h"

namespace engram {
namespace {

using Ranges = std::vector<UploadRange>;

void check_units(const Ranges& ranges, int64_t num_bytes, bool verify) {
  const std::vector<UploadUnit> units = upload_units(ranges, num_bytes, verify);
  int64_t read = 0;
  int64_t done = 0;
  for (const UploadUnit& unit : units) {
    CHECK(unit.begin >= done);
    CHECK(unit.end > unit.begin);
    CHECK(unit.begin / kBlockBytes == (unit.end - 1) / kBlockBytes);
    CHECK(unit.end <= num_bytes);
    if (verify) {
      CHECK(unit.begin % kBlockBytes == 0);
      CHECK((unit.end % kBlockBytes == 0 || unit.end == num_bytes));
    }
    // What the ranges want of it, from its first range on as upload() goes.
    REQUIRE(unit.first_range < ranges.size());
    CHECK(ranges[unit.first_range].end > unit.begin);
    CHECK((unit.first_range == 0 || ranges[unit.first_range - 1].end <= unit.begin));
    int64_t wanted = 0;
    for (size_t i = unit.first_range; i < ranges.size() && ranges[i].begin < unit.end; ++i) {
      wanted += std::min(unit.end, ranges[i].end) - std::max(unit.begin, ranges[i].begin);
    }
    CHECK(wanted > 0);
    if (!verify) CHECK(wanted == unit.end - unit.begin);
    read += wanted;
    done = unit.end;
  }
  int64_t all = 0;
  for (const UploadRange& range : ranges) all += range.end - range.begin;
  CHECK(read == all);
}

TEST_CASE("uploads read what the ranges want, block by block") {
  constexpr int64_t kMiB = 1 << 20;
  const int64_t num_bytes = 3 * kBlockBytes + 5;
  CHECK(upload_units({}, num_bytes, false).empty());
  CHECK(upload_units({}, num_bytes, true).empty());
  for (const Ranges& ranges :
       {Ranges{{0, num_bytes, nullptr}}, Ranges{{num_bytes - 1, num_bytes, nullptr}},
        Ranges{{kBlockBytes, 2 * kBlockBytes, nullptr}},
        Ranges{{2 * kMiB, 4 * kMiB, nullptr}, {6 * kMiB, 130 * kMiB, nullptr}},
        Ranges{{0, 2, nullptr}, {4, 6, nullptr}, {8, kBlockBytes + 1, nullptr}}}) {
    check_units(ranges, num_bytes, false);
    check_units(ranges, num_bytes, true);
  }
  std::mt19937_64 random(1);
  for (int trial = 0; trial < 200; ++trial) {
    Ranges ranges;
    int64_t place = 0;
    for (;;) {
      const auto skip = [&] { return static_cast<int64_t>(random() % ((trial + 1) * kMiB)); };
      const int64_t begin = place + skip();
      place = std::min(begin + 1 + skip(), num_bytes);
      if (place <= begin) break;
      ranges.push_back({begin, place, nullptr});
    }
    check_units(ranges, num_bytes, trial % 2 == 1);
  }
}

TEST_CASE("uploads need a GPU") {
  const Source source{"engram.1.values", {"none", 0, 8, {}}, FormulaKey{}};
  uint8_t to[8];
  UploadOptions options;
  options.device = 1 << 20;
  CHECK_THROWS_AS(upload(SourceReader(source), {{0, 8, to}}, options), Error);
}

TEST_CASE("a kernel's chunks are the formula's bytes") {
  for (const FormulaTensor tensor : {FormulaTensor::kValues, FormulaTensor::kScales}) {
    for (const int64_t begin : {int64_t{0}, int64_t{1}, int64_t{7}, int64_t{8}, int64_t{13},
                                (int64_t{98} << 30) + 5, (int64_t{98} << 30) + 16}) {
      const FormulaWords words = formula_words({14, tensor, 0xFFFFFFFFFFFFFFFF});
      FormulaPlace place(words, begin);
      for (int64_t chunk = 0; chunk < 3; ++chunk) {
        for (int i = 0; i < 16; ++i) {
          CHECK(byte_of(place.chunk(), i) == formula_byte(words, begin + 16 * chunk + i));
        }
        place.skip_words(2);
      }
    }
  }
}

}  // namespace
}  // namespace engram
