// SPDX-License-Identifier: Apache-2.0
// lookup_cpu and stage_cpu against a twin that fills one element after the other.
#include <sys/mman.h>

#include <algorithm>
#include <cstring>

#include "doctest/doctest.h"
#include "engram/layout.h"
#include "engram/ops.h"
#include "engram/row.h"
#include "random.h"

namespace engram {
namespace {

struct LookupCase {
  int64_t num_tokens;
  int num_columns, head_dim;
  int64_t first_row = 30, num_rows = 101, ids_stride;
  std::vector<uint8_t> values, scales;
  std::vector<int32_t> ids;

  LookupCase(int64_t tokens, int columns, int dim)
      : num_tokens(tokens), num_columns(columns), head_dim(dim), ids_stride(columns + 3) {
    Random random(static_cast<uint32_t>(tokens * 1000 + columns * 10 + dim));
    values = random.integers<uint8_t>(static_cast<size_t>(num_rows * dim), 0, 255);
    scales = random.integers<uint8_t>(static_cast<size_t>(num_rows * dim / kScaleBlock), 0, 255);
    for (int64_t row = 0; row < num_rows; row += 2) {
      replace_nans(row);
      make_scales_normal(row);
    }
    ids = random.integers<int32_t>(static_cast<size_t>(tokens * ids_stride), 20, 140);
    for (size_t i = 0; i < ids.size(); i += 7) ids[i] = -1;
    for (size_t i = 0; i < ids.size(); i += 11) ids[i] = kLostId;
  }

  void replace_nans(int64_t row) {
    for (int64_t i = row * head_dim; i < (row + 1) * head_dim; ++i) {
      uint8_t& value = values[static_cast<size_t>(i)];
      if ((value & 0x7F) == kFp8NanMagnitude) value = static_cast<uint8_t>(row);
    }
  }

  //! Scales as almost all are.
  void make_scales_normal(int64_t row) {
    for (int64_t i = row * scales_per_row(head_dim); i < (row + 1) * scales_per_row(head_dim);
         ++i) {
      uint8_t& scale = scales[static_cast<size_t>(i)];
      scale = std::clamp(scale, kLowestNormalScale, kHighestNormalScale);
    }
  }

  int64_t num_scales() const { return int64_t{num_columns} * head_dim / kScaleBlock; }

  engram_lookup_args args(int form, void* out, uint8_t* out_scales) const {
    return {.values = values.data(),
            .scales = scales.data(),
            .ids = ids.data(),
            .out = out,
            .out_scales = out_scales,
            .ids_stride = ids_stride,
            .first_row = first_row,
            .num_rows = num_rows,
            .num_tokens = num_tokens,
            .num_columns = num_columns,
            .head_dim = head_dim,
            .form = form};
  }

  //! Value and scale byte of element i of a token's column; zeros outside the table, NaN of a lost
  //! id.
  std::pair<uint8_t, uint8_t> element(int64_t token, int column, int i) const {
    const int64_t id = ids[static_cast<size_t>(token * ids_stride + column)];
    if (id == kLostId) return {kFp8NanMagnitude, kE8m0Nan};
    const int64_t row = id - first_row;
    if (row < 0 || row >= num_rows) return {0, 0};
    return {values[static_cast<size_t>(row * head_dim + i)],
            scales[static_cast<size_t>((row * head_dim + i) / kScaleBlock)]};
  }

  template <typename Fn>
  void each(const Fn& fn) const {
    for (int64_t token = 0; token < num_tokens; ++token) {
      for (int column = 0; column < num_columns; ++column) {
        for (int i = 0; i < head_dim; ++i) fn(token, column, i, element(token, column, i));
      }
    }
  }
};

const int kThreads[] = {1, 3};

#define EACH_LOOKUP_CASE(test)                                                     \
  for (const LookupCase& test :                                                    \
       {LookupCase(1, 1, 32), LookupCase(37, 24, 256), LookupCase(129, 3, 96),     \
        LookupCase(400, 5, 288), LookupCase(1, 1, 256), LookupCase(1667, 3, 256)}) \
    for (const int num_threads : kThreads)

//! Bytes that an output may begin at, and the lines around it that are not its own.
const size_t kShifts[] = {0, 2, 8, 16, 56};
constexpr size_t kMargin = 128;
constexpr uint8_t kUntouched = 0xAB;

//! Room for `size` bytes and its margins, from which the margins' touched bytes are counted.
struct Output {
  size_t shift, size;
  std::vector<uint8_t> bytes;
  uint8_t* data;

  Output(size_t begin, size_t num_bytes)
      : shift(begin),
        size(num_bytes),
        bytes(num_bytes + 3 * kMargin, kUntouched),
        data(bytes.data() + kMargin + shift) {
    data += kMargin - reinterpret_cast<uintptr_t>(bytes.data()) % kMargin;  // lines are aligned
  }

  int64_t num_touched() const {
    const uint8_t* const end = data + size;
    const auto touched = [](uint8_t byte) { return byte != kUntouched; };
    return std::count_if(bytes.data(), static_cast<const uint8_t*>(data), touched) +
           std::count_if(end, bytes.data() + bytes.size(), touched);
  }
};

TEST_CASE("rows as BF16") {
  EACH_LOOKUP_CASE(test) {
    const auto size = static_cast<size_t>(test.num_tokens * test.num_columns * test.head_dim);
    for (const size_t shift : kShifts) {
      Output out(shift, size * sizeof(uint16_t));
      lookup_cpu(test.args(ENGRAM_ROWS_BF16, out.data, nullptr), num_threads);
      const auto* found = reinterpret_cast<const uint16_t*>(out.data);
      int wrong = 0;
      test.each([&](int64_t, int, int, std::pair<uint8_t, uint8_t> element) {
        wrong += *found++ != bf16_from_fp8(element.first, element.second);
      });
      CHECK(wrong == 0);
      CHECK(out.num_touched() == 0);
    }
  }
}

TEST_CASE("every value beside every scale, in rows with NaN and without") {
  LookupCase test(4096, 1, 256);
  test.first_row = 0;
  test.num_rows = test.num_tokens;
  test.ids_stride = 1;
  test.values.clear();
  test.scales.clear();
  for (int32_t row = 0; row < test.num_rows; ++row) {
    test.ids[static_cast<size_t>(row)] = row;
    for (int i = 0; i < 256; ++i) test.values.push_back(static_cast<uint8_t>(i + row % 8 * 32));
    for (int i = 0; i < 8; ++i) test.scales.push_back(static_cast<uint8_t>(row / 8 + i));
    if (row >= 2048) test.replace_nans(row);
  }
  std::vector<uint16_t> out(test.values.size());
  lookup_cpu(test.args(ENGRAM_ROWS_BF16, out.data(), nullptr), 1);
  int wrong = 0;
  size_t at = 0;
  test.each([&](int64_t, int, int, std::pair<uint8_t, uint8_t> element) {
    wrong += out[at++] != bf16_from_fp8(element.first, element.second);
  });
  CHECK(wrong == 0);
}

TEST_CASE("rows packed") {
  EACH_LOOKUP_CASE(test) {
    const int row_bytes = packed_row_bytes(test.head_dim);
    for (const size_t shift : kShifts) {
      Output out(shift, static_cast<size_t>(test.num_tokens * test.num_columns * row_bytes));
      lookup_cpu(test.args(ENGRAM_ROWS_PACKED, out.data, nullptr), num_threads);
      int wrong = 0;
      test.each([&](int64_t token, int column, int i, std::pair<uint8_t, uint8_t> element) {
        const uint8_t* const row = out.data + (token * test.num_columns + column) * row_bytes;
        wrong += row[i] != element.first;
        wrong += row[test.head_dim + i / kScaleBlock] != element.second;
      });
      CHECK(wrong == 0);
      CHECK(out.num_touched() == 0);
    }
  }
}

//! Compares values [T, C*D] and scales whose place scale_at(token, s) says; other scale bytes are
//! 0.
template <typename ScaleAt>
int wrong_mxfp8(const LookupCase& test, const std::vector<uint8_t>& values,
                std::vector<uint8_t> scales, const ScaleAt& scale_at) {
  int wrong = 0;
  size_t at = 0;
  test.each([&](int64_t token, int column, int i, std::pair<uint8_t, uint8_t> element) {
    wrong += values[at++] != element.first;
    if (i % kScaleBlock != 0) return;
    const int64_t s = (int64_t{column} * test.head_dim + i) / kScaleBlock;
    uint8_t& scale = scales[static_cast<size_t>(scale_at(token, s))];
    wrong += scale != element.second;
    scale = 0;
  });
  for (const uint8_t rest : scales) wrong += rest != 0;
  return wrong;
}

TEST_CASE("rows as MXFP8, linear, staged, and staged from packed rows") {
  EACH_LOOKUP_CASE(test) {
    const int64_t num_scales = test.num_scales();
    const auto linear = [&](int64_t token, int64_t s) { return token * num_scales + s; };
    const auto staged = [&](int64_t r, int64_t s) { return staged_scale_offset(r, s, num_scales); };
    const auto size = static_cast<size_t>(test.num_tokens * num_scales * kScaleBlock);
    std::vector<uint8_t> out(size, 7);
    std::vector<uint8_t> scales(static_cast<size_t>(test.num_tokens * num_scales), 7);
    lookup_cpu(test.args(ENGRAM_ROWS_MXFP8_LINEAR, out.data(), scales.data()), num_threads);
    CHECK(wrong_mxfp8(test, out, scales, linear) == 0);

    out.assign(size, 7);
    scales.assign(static_cast<size_t>(staged_scale_bytes(test.num_tokens, num_scales)), 7);
    lookup_cpu(test.args(ENGRAM_ROWS_MXFP8_128X4, out.data(), scales.data()), num_threads);
    CHECK(wrong_mxfp8(test, out, scales, staged) == 0);

    std::vector<uint8_t> packed(size + static_cast<size_t>(test.num_tokens * num_scales));
    lookup_cpu(test.args(ENGRAM_ROWS_PACKED, packed.data(), nullptr), 1);
    out.assign(size, 7);
    scales.assign(scales.size(), 7);
    stage_cpu({.packed = packed.data(),
               .values = out.data(),
               .scales = scales.data(),
               .num_tokens = test.num_tokens,
               .num_columns = test.num_columns,
               .head_dim = test.head_dim},
              num_threads);
    CHECK(wrong_mxfp8(test, out, scales, staged) == 0);
  }
}

//! Memory that takes room only where it is touched.
class SparseMemory {
 public:
  explicit SparseMemory(size_t size)
      : size_(size),
        data_(mmap(nullptr, size, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)) {}
  ~SparseMemory() { munmap(data_, size_); }
  SparseMemory(const SparseMemory&) = delete;
  SparseMemory& operator=(const SparseMemory&) = delete;
  uint8_t* data() const { return static_cast<uint8_t*>(data_); }

 private:
  size_t size_;
  void* data_;
};

TEST_CASE("rows beyond 2 and 4 GiB") {
  constexpr int64_t kRows = 20000000;
  const SparseMemory values(size_t{kRows} * 256);
  const SparseMemory scales(size_t{kRows} * 8);
  REQUIRE(values.data() != MAP_FAILED);
  REQUIRE(scales.data() != MAP_FAILED);
  const std::vector<int32_t> ids = {8388608, 16777216, kRows - 1};
  for (const int32_t id : ids) {
    memset(values.data() + int64_t{id} * 256, id % 100, 256);
    memset(scales.data() + int64_t{id} * 8, 127, 8);
  }
  std::vector<uint16_t> out(3 * 256);
  lookup_cpu({.values = values.data(),
              .scales = scales.data(),
              .ids = ids.data(),
              .out = out.data(),
              .out_scales = nullptr,
              .ids_stride = 3,
              .first_row = 0,
              .num_rows = kRows,
              .num_tokens = 1,
              .num_columns = 3,
              .head_dim = 256,
              .form = ENGRAM_ROWS_BF16},
             1);
  for (size_t row = 0; row < 3; ++row) {
    const uint16_t expected = bf16_from_fp8(static_cast<uint8_t>(ids[row] % 100), 127);
    CHECK(std::vector<uint16_t>(out.data() + row * 256, out.data() + row * 256 + 256) ==
          std::vector<uint16_t>(256, expected));
  }
}

}  // namespace
}  // namespace engram
