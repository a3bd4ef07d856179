// SPDX-License-Identifier: Apache-2.0
#include "table/parts.h"

#include <algorithm>
#include <cmath>
#include <random>
#include <string>

#include "doctest/doctest.h"
#include "engram/error.h"
#include "engram/layout.h"
#include "engram/ops.h"

namespace engram {
namespace {

using Rows = std::vector<int64_t>;

constexpr int64_t kValueBytes = 256;
constexpr int64_t kScaleBytes = 8;

//! The V4.1 tables' columns: consecutive primes from engram_vocab_size on.
std::vector<Rows> true_columns() {
  const auto is_prime = [](int64_t number) {
    for (int64_t divisor = 2; divisor * divisor <= number; ++divisor) {
      if (number % divisor == 0) return false;
    }
    return true;
  };
  std::vector<Rows> layers(2);
  int64_t number = 16000000;
  for (Rows& columns : layers) {
    for (; columns.size() < 24; ++number) {
      if (is_prime(number)) columns.push_back(number);
    }
  }
  return layers;
}

int64_t sum(const Rows& rows) {
  int64_t total = 0;
  for (const int64_t count : rows) total += count;
  return total;
}

//! Bytes of the array in a rank's part.
int64_t filled_bytes(const Parts& parts, int rank) {
  int64_t bytes = 0;
  for (const Parts::Run& run : parts.runs()) {
    if (run.rank == rank) bytes += std::min(run.end, parts.num_bytes()) - run.begin;
  }
  return bytes;
}

//! Share of a token's rows that each rank holds, on average: 1/num_ranks where all is even.
std::vector<double> load_shares(const Parts& parts, const Rows& columns, int64_t row_bytes) {
  std::vector<double> shares(static_cast<size_t>(parts.num_ranks()));
  size_t run = 0;
  int64_t begin = 0;
  for (const int64_t rows : columns) {
    const int64_t end = begin + rows * row_bytes;
    while (parts.runs()[run].end <= begin) ++run;
    for (size_t i = run; i < parts.runs().size() && parts.runs()[i].begin < end; ++i) {
      const Parts::Run& part = parts.runs()[i];
      const int64_t held = std::min(part.end, end) - std::max(part.begin, begin);
      shares[static_cast<size_t>(part.rank)] +=
          static_cast<double>(held) / static_cast<double>(end - begin);
    }
    begin = end;
  }
  for (double& share : shares) share /= static_cast<double>(columns.size());
  return shares;
}

//! What must hold of every cutting.
void check_cover(const Parts& parts, const Rows& columns, int64_t row_bytes, int64_t granule) {
  const auto& runs = parts.runs();
  REQUIRE(!runs.empty());
  CHECK(parts.num_bytes() == sum(columns) * row_bytes);
  CHECK(runs.front().begin == 0);
  CHECK(runs.back().end == parts.mapped_bytes());
  CHECK(parts.mapped_bytes() - parts.num_bytes() < granule);
  CHECK(parts.mapped_bytes() >= parts.num_bytes());
  int64_t filled = 0;
  for (int rank = 0; rank < parts.num_ranks(); ++rank) filled += filled_bytes(parts, rank);
  CHECK(filled == parts.num_bytes());
  for (size_t i = 0; i < runs.size(); ++i) {
    CHECK(runs[i].end > runs[i].begin);
    CHECK(runs[i].begin % granule == 0);
    CHECK(runs[i].end % granule == 0);
    CHECK(runs[i].rank >= 0);
    CHECK(runs[i].rank < parts.num_ranks());
    if (i == 0) continue;
    CHECK(runs[i].begin == runs[i - 1].end);
    CHECK(runs[i].rank != runs[i - 1].rank);
  }
}

//! Rank of each granule by the definition: the row range that holds the granule's middle.
std::vector<int> ranks_by_middle(const Rows& columns, int64_t row_bytes, int num_ranks,
                                 int64_t granule) {
  const int64_t num_bytes = sum(columns) * row_bytes;
  std::vector<int> ranks;
  for (int64_t begin = 0; begin < num_bytes; begin += granule) {
    const int64_t middle = begin + granule / 2;
    int owner = num_ranks - 1;
    int64_t first_row = 0;
    for (const int64_t rows : columns) {
      for (int rank = 0; rank < num_ranks; ++rank) {
        const int64_t low = (first_row + rows * rank / num_ranks) * row_bytes;
        const int64_t high = (first_row + rows * (rank + 1) / num_ranks) * row_bytes;
        if (middle >= low && middle < high) owner = rank;
      }
      first_row += rows;
    }
    ranks.push_back(owner);
  }
  return ranks;
}

std::vector<int> ranks_of_granules(const Parts& parts, int64_t granule) {
  std::vector<int> ranks;
  for (const Parts::Run& run : parts.runs()) {
    ranks.insert(ranks.end(), static_cast<size_t>((run.end - run.begin) / granule), run.rank);
  }
  return ranks;
}

TEST_CASE("parts of V4.1-Flash are equal for any number of ranks") {
  const std::vector<Rows> layers = true_columns();
  CHECK(sum(layers[0]) == 384006168);
  CHECK(sum(layers[1]) == 384016682);
  for (const Rows& columns : layers) {
    for (const int64_t row_bytes : {kValueBytes, kScaleBytes}) {
      for (int num_ranks = 1; num_ranks <= 16; ++num_ranks) {
        CAPTURE(num_ranks);
        CAPTURE(row_bytes);
        const Parts parts(columns, row_bytes, num_ranks);
        check_cover(parts, columns, row_bytes, kGranuleBytes);
        // One range a column and rank, as far as neighbours are not the same rank's.
        CHECK(parts.runs().size() == (num_ranks == 1 ? 1u : columns.size() * num_ranks));
        // A range is off by less than a granule of its share of a column, and over 24 columns that
        // evens out: in parts per 10000 of a rank's share, up to 8 and up to 16 ranks.
        const double per_10000 =
            row_bytes == kValueBytes ? (num_ranks <= 8 ? 3.5 : 8) : (num_ranks <= 8 ? 160 : 380);
        const double bound = per_10000 / 10000;
        const double even = 1.0 / num_ranks;
        const std::vector<double> shares = load_shares(parts, columns, row_bytes);
        for (int rank = 0; rank < num_ranks; ++rank) {
          CHECK(std::abs(shares[static_cast<size_t>(rank)] / even - 1) < bound);
          const double part = static_cast<double>(filled_bytes(parts, rank));
          CHECK(std::abs(part / (even * static_cast<double>(parts.num_bytes())) - 1) < bound);
        }
      }
    }
  }
}

TEST_CASE("parts of each column are equal, to a granule") {
  const Rows columns = true_columns()[0];
  for (const int num_ranks : {2, 3, 7, 8}) {
    CAPTURE(num_ranks);
    const Parts parts(columns, kValueBytes, num_ranks);
    int64_t begin = 0;
    for (const int64_t rows : columns) {
      const int64_t end = begin + rows * kValueBytes;
      std::vector<int64_t> held(static_cast<size_t>(num_ranks));
      for (const Parts::Run& run : parts.runs()) {
        const int64_t bytes = std::min(run.end, end) - std::max(run.begin, begin);
        if (bytes > 0) held[static_cast<size_t>(run.rank)] += bytes;
      }
      for (const int64_t bytes : held) {
        CHECK(std::abs(bytes - rows * kValueBytes / num_ranks) <= kGranuleBytes);
      }
      begin = end;
    }
  }
}

TEST_CASE("parts go by the middle of each granule") {
  std::mt19937_64 random(7);
  const auto below = [&random](uint64_t bound) { return static_cast<int64_t>(random() % bound); };
  for (int trial = 0; trial < 400; ++trial) {
    Rows columns(static_cast<size_t>(1 + below(6)));
    for (int64_t& rows : columns) rows = 1 + below(trial % 2 == 0 ? 20 : 400);
    const int64_t row_bytes = 1 + below(40);
    const int64_t granule = 2 << below(8);
    const int num_ranks = static_cast<int>(1 + below(9));
    CAPTURE(trial);
    const Parts parts(columns, row_bytes, num_ranks, granule);
    check_cover(parts, columns, row_bytes, granule);
    CHECK(ranks_of_granules(parts, granule) ==
          ranks_by_middle(columns, row_bytes, num_ranks, granule));
  }
}

TEST_CASE("parts of a table smaller than a granule lie on one rank") {
  for (const int num_ranks : {1, 2, 5}) {
    const Parts parts({3, 4, 5}, 256, num_ranks);
    check_cover(parts, {3, 4, 5}, 256, kGranuleBytes);
    CHECK(parts.runs().size() == 1);
    CHECK(parts.part_bytes(num_ranks - 1) == kGranuleBytes);
    CHECK(filled_bytes(parts, num_ranks - 1) == 12 * 256);
  }
}

TEST_CASE("parts: what is refused") {
  CHECK_THROWS_WITH_AS(Parts({}, 256, 2), "parts: expected at least 1 column, found none", Error);
  CHECK_THROWS_WITH_AS(Parts({5, 0}, 256, 2),
                       "parts: expected at least 1 row in each column, found 0", Error);
  CHECK_THROWS_WITH_AS(Parts({5}, 0, 2), "parts: expected at least 1 byte a row, found 0", Error);
  CHECK_THROWS_WITH_AS(Parts({5}, 256, 0), "parts: expected at least 1 rank, found 0", Error);
  CHECK_THROWS_WITH_AS(Parts({5}, 256, 2, 3), "parts: expected an even granule, found 3 bytes",
                       Error);
}

TEST_CASE("heads: ranks own neighbouring columns, all columns once") {
  const Rows columns = true_columns()[1];
  for (const int num_ranks : {1, 2, 3, 4, 5, 6, 8, 12, 24}) {
    CAPTURE(num_ranks);
    int32_t column = 0;
    int64_t row = 0;
    for (int rank = 0; rank < num_ranks; ++rank) {
      const HeadSplit split = split_heads(columns, rank, num_ranks);
      CHECK(split.first_column == column);
      CHECK(split.first_row == row);
      CHECK(split.num_columns >= 1);
      // The ceil split: as many as the others have, but for the last.
      const int32_t even = (24 + num_ranks - 1) / num_ranks;
      CHECK((rank == num_ranks - 1 || split.num_columns == even));
      column += split.num_columns;
      row += split.num_rows;
    }
    CHECK(column == 24);
    CHECK(row == 384016682);
  }
}

TEST_CASE("heads: what is refused") {
  const Rows columns(24, 10);
  CHECK_THROWS_WITH_AS(split_heads(columns, 2, 2), "heads: expected a rank of 0 to 1, found 2",
                       Error);
  CHECK_THROWS_WITH_AS(
      split_heads(columns, 0, 16),
      "heads: expected 24 columns to leave each of 16 ranks at least one, found that 2 a rank "
      "leave the last ranks none",
      Error);
}

//! A table, ids that read it, and its lookup.
struct Heads {
  static constexpr int kHeadDim = 32;
  static constexpr int kTokens = 5;
  const Rows columns{11, 13, 17, 19, 23, 29, 31};
  std::vector<uint8_t> values;
  std::vector<uint8_t> scales;
  std::vector<int32_t> ids;  // [kTokens, C]

  Heads() {
    std::mt19937 random(3);
    values.resize(static_cast<size_t>(sum(columns) * kHeadDim));
    scales.resize(static_cast<size_t>(sum(columns)));
    for (uint8_t& value : values) value = static_cast<uint8_t>(random() & 0xBF);
    for (uint8_t& scale : scales) scale = static_cast<uint8_t>(120 + random() % 8);
    for (int token = 0; token < kTokens; ++token) {
      int64_t first_row = 0;
      for (const int64_t rows : columns) {
        ids.push_back(token == 3 ? kNoRow : static_cast<int32_t>(first_row + random() % rows));
        first_row += rows;
      }
    }
  }

  //! Packed rows [kTokens, columns of the split]; arrays as the split's rank keeps them.
  std::vector<uint8_t> lookup(const HeadSplit& split) const {
    const auto kept = [&split](const std::vector<uint8_t>& array, int64_t row_bytes) {
      const auto first = array.begin() + split.first_row * row_bytes;
      return std::vector<uint8_t>(first, first + split.num_rows * row_bytes);
    };
    const std::vector<uint8_t> my_values = kept(values, kHeadDim);
    const std::vector<uint8_t> my_scales = kept(scales, 1);
    const int row_bytes = packed_row_bytes(kHeadDim);
    std::vector<uint8_t> out(static_cast<size_t>(kTokens * split.num_columns * row_bytes), 0xEE);
    engram_lookup_args args{};
    args.values = my_values.data();
    args.scales = my_scales.data();
    args.ids = ids.data() + split.first_column;
    args.ids_stride = static_cast<int64_t>(columns.size());
    args.out = out.data();
    args.first_row = split.first_row;
    args.num_rows = split.num_rows;
    args.num_tokens = kTokens;
    args.num_columns = split.num_columns;
    args.head_dim = kHeadDim;
    args.form = ENGRAM_ROWS_PACKED;
    check_lookup(args);
    lookup_cpu(args, 1);
    return out;
  }
};

TEST_CASE("heads: the ranks' lookups side by side are the table's") {
  const Heads table;
  const size_t row_bytes = packed_row_bytes(Heads::kHeadDim);
  const std::vector<uint8_t> whole = table.lookup(split_heads(table.columns, 0, 1));
  for (const int num_ranks : {2, 4, 7}) {
    CAPTURE(num_ranks);
    std::vector<uint8_t> gathered(whole.size());
    for (int rank = 0; rank < num_ranks; ++rank) {
      const HeadSplit split = split_heads(table.columns, rank, num_ranks);
      const std::vector<uint8_t> rows = table.lookup(split);
      const size_t width = static_cast<size_t>(split.num_columns) * row_bytes;
      for (size_t token = 0; token < Heads::kTokens; ++token) {
        const size_t column =
            token * table.columns.size() + static_cast<size_t>(split.first_column);
        std::copy_n(rows.begin() + static_cast<int64_t>(token * width), width,
                    gathered.begin() + static_cast<int64_t>(column * row_bytes));
      }
    }
    CHECK(gathered == whole);
  }
}

}  // namespace
}  // namespace engram
