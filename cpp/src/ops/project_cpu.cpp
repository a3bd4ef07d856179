// SPDX-License-Identifier: Apache-2.0
// engram_project on the CPU: weights become floats tile by tile, then FP32 products and sums. The
// sum of one output runs over the inputs in order, one after the other, so a token's result does
// not depend on the tokens beside it.
#include <algorithm>
#include <cstring>
#include <vector>

#include "check.h"
#include "engram/ops.h"
#include "multiversion.h"
#include "ops/float_bits.h"
#include "parallel.h"

namespace engram {
namespace {

constexpr int kBlock = kScaleBlock;  // outputs of a tile, and inputs that share its scale
constexpr int64_t kTokensPerPass =
    480;  // whose inputs are held as floats, and share one pass over the weights
constexpr int64_t kTileInputs =
    16 * kBlock;  // 64 KiB of weights: they stay in the core's cache for all tokens

ENGRAM_HOST_DEVICE float float_from_fp8(uint32_t byte) {
  const uint32_t magnitude = byte & 0x7Fu;
  // With FP32's leading bit a subnormal m * 2^-9 reads as (1 + m/8) * 2^-7; twice that less 2^-6 is
  // its value, and that is the larger of the two for every normal number.
  const float leading = float_from_bits((magnitude << 20) + (120u << 23));
  const float doubled = leading * 2.0f - 0x1p-6f;
  const float finite = doubled < leading ? doubled : leading;
  const uint32_t bits = magnitude == kFp8NanMagnitude ? 0x7FC00000u : bits_from_float(finite);
  return float_from_bits(bits | (byte & 0x80u) << 24);
}

float float_from_e8m0(uint8_t scale) {
  if (scale == kE8m0Nan) return float_from_bits(0x7FC00000u);
  return float_from_bits(scale == 0 ? 0x00400000u : static_cast<uint32_t>(scale) << 23);
}

#if defined(__x86_64__)
namespace avx512 {
#define ENGRAM_TARGET ENGRAM_TARGET_AVX512
#define ENGRAM_LANES 16
#define ENGRAM_TOKENS 12
#include "ops/project_kernel.h"
#undef ENGRAM_TARGET
#undef ENGRAM_LANES
#undef ENGRAM_TOKENS
}  // namespace avx512

namespace avx2 {
#define ENGRAM_TARGET ENGRAM_TARGET_AVX2
#define ENGRAM_LANES 8
#define ENGRAM_TOKENS 6
#include "ops/project_kernel.h"
#undef ENGRAM_TARGET
#undef ENGRAM_LANES
#undef ENGRAM_TOKENS
}  // namespace avx2
#endif

namespace baseline {
#define ENGRAM_TARGET
#define ENGRAM_LANES 4
#define ENGRAM_TOKENS 6
#include "ops/project_kernel.h"
#undef ENGRAM_TARGET
#undef ENGRAM_LANES
#undef ENGRAM_TOKENS
}  // namespace baseline

struct Kernel {
  decltype(&baseline::dequantize) dequantize;
  decltype(&baseline::accumulate_all) accumulate;
};

Kernel widest_kernel() {
#if defined(__x86_64__)
  if (has_avx512()) return {avx512::dequantize, avx512::accumulate_all};
  if (has_avx2()) return {avx2::dequantize, avx2::accumulate_all};
#endif
  return {baseline::dequantize, baseline::accumulate_all};
}

//! Outputs [first, first + 32) of num_tokens tokens; x holds the tokens' inputs as floats.
void project_block(const engram_project_args& args, const Kernel& kernel, const float* x,
                   int64_t num_tokens, int64_t first, uint16_t* out) {
  const int64_t num_in = args.in_features;
  const int num_out = static_cast<int>(std::min<int64_t>(kBlock, args.out_features - first));
  const uint8_t* rows[kBlock];  // past the last output: a row again, whose sums are not stored
  for (int i = 0; i < kBlock; ++i)
    rows[i] = args.weight + row_offset(first + std::min(i, num_out - 1), num_in);
  const uint8_t* const scales = args.scale + row_offset(first / kBlock, num_in / kBlock);
  std::vector<float> tile(static_cast<size_t>(std::min(kTileInputs, num_in) * kBlock));
  std::vector<float> sums(static_cast<size_t>(num_tokens * kBlock));
  for (int64_t tile_in = 0; tile_in < num_in; tile_in += kTileInputs) {
    const int tile_size = static_cast<int>(std::min(kTileInputs, num_in - tile_in));
    for (int i = 0; i < tile_size; i += kBlock) {
      const int64_t in = tile_in + i;
      kernel.dequantize(rows, in, float_from_e8m0(scales[in / kBlock]), tile.data() + i * kBlock);
    }
    kernel.accumulate(tile.data(), x + tile_in, num_in, tile_size, num_tokens, sums.data());
  }
  for (int64_t token = 0; token < num_tokens; ++token) {
    uint16_t* const token_out = out + row_offset(token, args.out_features) + first;
    for (int i = 0; i < num_out; ++i)
      token_out[i] = bf16_from_float(sums[static_cast<size_t>(token * kBlock + i)]);
  }
}

}  // namespace

void check_project(const engram_project_args& args) {
  check_range(args.num_tokens, "num_tokens", 0, INT32_MAX);
  check_multiple(args.in_features, "in_features", kScaleBlock);
  check_at_least(args.out_features, "out_features", 1);
  check_range(args.kernel, "kernel", ENGRAM_PROJECT_AUTO, ENGRAM_PROJECT_SM90_WIDE_256);
  check_range(args.weight_layout, "weight_layout", ENGRAM_WEIGHT_ROW_MAJOR, ENGRAM_WEIGHT_SM90_V1);
  if (args.weight_layout == ENGRAM_WEIGHT_SM90_V1) {
    check_multiple(args.out_features, "out_features", 16);
  }
  check_product({args.num_tokens, args.in_features, 2}, "bytes of x");
  check_product({args.num_tokens, args.out_features, 2}, "bytes of out");
  if (args.num_tokens == 0) return;
  check_elements(args.x, "x");
  check_elements(args.weight, "weight");
  check_elements(args.scale, "scale");
  check_elements(args.out, "out");
}

void check_project_on_gpu(const engram_project_args& args) {
  if (args.num_tokens == 0) return;
  check_aligned(args.x, "x", 16);
  check_aligned(args.weight, "weight", 16);
}

void project_cpu(const engram_project_args& args, int num_threads) {
  ENGRAM_CHECK(args.weight_layout == ENGRAM_WEIGHT_ROW_MAJOR,
               "weight_layout: expected row_major on the CPU, found another");
  const Kernel kernel = widest_kernel();
  std::vector<float> x(
      static_cast<size_t>(std::min(args.num_tokens, kTokensPerPass) * args.in_features));
  for (int64_t pass = 0; pass < args.num_tokens; pass += kTokensPerPass) {
    const int64_t num_tokens = std::min(kTokensPerPass, args.num_tokens - pass);
    const uint16_t* const pass_x = args.x + row_offset(pass, args.in_features);
    uint16_t* const pass_out = args.out + row_offset(pass, args.out_features);
    for (int64_t i = 0; i < num_tokens * args.in_features; ++i) {
      x[static_cast<size_t>(i)] = float_from_bf16(pass_x[i]);
    }
    parallel_for(ceil_div(args.out_features, kBlock), 1, num_threads,
                 [&](int64_t begin, int64_t end) {
                   for (int64_t block = begin; block < end; ++block) {
                     project_block(args, kernel, x.data(), num_tokens, block * kBlock, pass_out);
                   }
                 });
  }
}

}  // namespace engram
