// SPDX-License-Identifier: Apache-2.0
#include "ops/convert_rows.h"

#include <vector>

#include "doctest/doctest.h"

namespace engram {
namespace {

//! Every FP8 value beside every scale, and a row that is not there: how many differ from row.h.
int wrong_conversions(ConvertRows convert, int head_dim) {
  const auto size = static_cast<size_t>(head_dim);
  std::vector<uint8_t> values(size);
  std::vector<uint8_t> scales(size / kScaleBlock);
  std::vector<uint16_t> out(2 * size);
  int wrong = 0;
  for (size_t pair = 0; pair < 256 * 8; ++pair) {  // all scales beside all eighths of the values
    for (size_t i = 0; i < size; ++i) values[i] = static_cast<uint8_t>(i + pair % 8 * 32);
    for (size_t i = 0; i < scales.size(); ++i) scales[i] = static_cast<uint8_t>(pair / 8 + i);
    const Row rows[] = {{nullptr, nullptr}, {values.data(), scales.data()}};
    out.assign(2 * size, 0xABCD);
    convert(rows, 2, head_dim, out.data());
    for (size_t i = 0; i < size; ++i) {
      wrong += out[i] != 0;
      wrong += out[size + i] != bf16_from_fp8(values[i], scales[i / kScaleBlock]);
    }
  }
  return wrong;
}

TEST_CASE("every form of a row's conversion gives row.h's bits") {
  for (const int head_dim : {32, 64, 96, 256, 544, 2048, 2112}) {
    CHECK(wrong_conversions(widest_convert_rows(head_dim), head_dim) == 0);
    CHECK(wrong_conversions(convert_rows_baseline, head_dim) == 0);
#if defined(__x86_64__)
    if (has_avx2()) CHECK(wrong_conversions(convert_rows_avx2, head_dim) == 0);
    if (has_avx512()) CHECK(wrong_conversions(convert_rows_avx512, head_dim) == 0);
#endif
  }
}

}  // namespace
}  // namespace engram
