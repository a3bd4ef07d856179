// SPDX-License-Identifier: Apache-2.0
#include "ops/convert_row.h"

#include <vector>

#include "doctest/doctest.h"

namespace engram {
namespace {

//! Every FP8 value beside every scale, in rows of each length: how many differ from row.h.
int wrong_conversions(ConvertRow convert) {
  int wrong = 0;
  for (const int head_dim : {32, 64, 96, 256, 544}) {
    const auto size = static_cast<size_t>(head_dim);
    std::vector<uint8_t> values(size);
    std::vector<uint8_t> scales(size / kScaleBlock);
    std::vector<uint16_t> out(size);
    for (size_t pair = 0; pair < 256 * 8; ++pair) {  // all scales beside all eighths of the values
      const size_t step = pair / 8;
      const size_t turn = pair % 8;
      for (size_t i = 0; i < size; ++i) values[i] = static_cast<uint8_t>(i + turn * 32);
      for (size_t i = 0; i < scales.size(); ++i) scales[i] = static_cast<uint8_t>(step + i);
      convert(values.data(), scales.data(), head_dim, out.data());
      for (size_t i = 0; i < size; ++i) {
        wrong += out[i] != bf16_from_fp8(values[i], scales[i / kScaleBlock]);
      }
    }
  }
  return wrong;
}

TEST_CASE("every form of a row's conversion gives row.h's bits") {
  CHECK(wrong_conversions(widest_convert_row()) == 0);
  CHECK(wrong_conversions(convert_row_baseline) == 0);
#if defined(__x86_64__)
  if (has_avx2()) CHECK(wrong_conversions(convert_row_avx2) == 0);
  if (has_avx512()) CHECK(wrong_conversions(convert_row_avx512) == 0);
#endif
}

}  // namespace
}  // namespace engram
