// SPDX-License-Identifier: Apache-2.0
// The inner loops of project_cpu.cpp, which includes this file once for each instruction set, with
//   ENGRAM_TARGET   the function attribute of the instruction set, or nothing
//   ENGRAM_LANES    floats in one of its vectors
//   ENGRAM_TOKENS   most tokens whose sums fit its registers beside two vectors of weights
// inside a namespace of its own. (Vector types are lowered before inlining, so multiversion.h
// cannot serve here.)

typedef float Lanes
    __attribute__((vector_size(ENGRAM_LANES * sizeof(float)), aligned(4), may_alias));

//! One 32x32 block of weights, rows row_bytes apart, as floats [in][out].
ENGRAM_TARGET void dequantize(const uint8_t* const* rows, int64_t in, float scale, float* block) {
  uint32_t words[kBlock / 4][kBlock];  // four inputs each
  for (int out = 0; out < kBlock; ++out) {
    for (int word = 0; word < kBlock / 4; ++word)
      memcpy(&words[word][out], rows[out] + in + word * 4, 4);
  }
  for (int i = 0; i < kBlock; ++i) {
    for (int out = 0; out < kBlock; ++out) {
      block[i * kBlock + out] = float_from_fp8(words[i / 4][out] >> (i % 4 * 8)) * scale;
    }
  }
}

//! sums[token][out] += x[token][in] * block[in][out] in the order of `in`, whatever the number of
//! tokens.
template <int kTokens>
ENGRAM_TARGET void accumulate(const float* block, const float* x, int64_t x_stride, int num_in,
                              float* sums) {
  constexpr int kVectors = 2;
  constexpr int kWidth = kVectors * ENGRAM_LANES;
  for (int first = 0; first < kBlock; first += kWidth) {
    Lanes sum[kTokens][kVectors];
    for (int token = 0; token < kTokens; ++token) {
      for (int v = 0; v < kVectors; ++v) {
        sum[token][v] =
            *reinterpret_cast<const Lanes*>(sums + token * kBlock + first + v * ENGRAM_LANES);
      }
    }
    for (int in = 0; in < num_in; ++in) {
      const Lanes* const weights = reinterpret_cast<const Lanes*>(block + in * kBlock + first);
#pragma GCC unroll 16
      for (int token = 0; token < kTokens; ++token) {
        const float value = x[token * x_stride + in];
        for (int v = 0; v < kVectors; ++v) sum[token][v] += weights[v] * value;
      }
    }
    for (int token = 0; token < kTokens; ++token) {
      for (int v = 0; v < kVectors; ++v) {
        *reinterpret_cast<Lanes*>(sums + token * kBlock + first + v * ENGRAM_LANES) = sum[token][v];
      }
    }
  }
}

ENGRAM_TARGET void accumulate_all(const float* block, const float* x, int64_t x_stride, int num_in,
                                  int64_t num_tokens, float* sums) {
  int64_t token = 0;
  for (; token + ENGRAM_TOKENS <= num_tokens; token += ENGRAM_TOKENS) {
    accumulate<ENGRAM_TOKENS>(block, x + token * x_stride, x_stride, num_in, sums + token * kBlock);
  }
  for (; token + 4 <= num_tokens; token += 4) {
    accumulate<4>(block, x + token * x_stride, x_stride, num_in, sums + token * kBlock);
  }
  for (; token < num_tokens; ++token) {
    accumulate<1>(block, x + token * x_stride, x_stride, num_in, sums + token * kBlock);
  }
}
