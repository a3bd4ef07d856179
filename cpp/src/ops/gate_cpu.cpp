// SPDX-License-Identifier: Apache-2.0
// engram_gate on the CPU.
#include <cstring>

#include "check.h"
#include "engram/ops.h"
#include "multiversion.h"
#include "ops/float_bits.h"
#include "ops/gate.h"
#include "parallel.h"

namespace engram {
namespace {

constexpr int64_t kElementsPerRange = 1 << 17;
constexpr int kLanes =
    64;  // partial sums side by side: enough for any vector width, and to hide the adds' latency

template <int kDtype>
struct Element {  // ENGRAM_FLOAT32
  using Type = float;
  static ENGRAM_HOST_DEVICE float load(float value) { return value; }
  static ENGRAM_HOST_DEVICE float store(float value) { return value; }
};

template <>
struct Element<ENGRAM_BFLOAT16> {
  using Type = uint16_t;
  static ENGRAM_HOST_DEVICE float load(uint16_t bits) { return float_from_bf16(bits); }
  static ENGRAM_HOST_DEVICE uint16_t store(float value) { return bf16_from_float(value); }
};

template <>
struct Element<ENGRAM_FLOAT16> {
  using Type = uint16_t;
  static ENGRAM_HOST_DEVICE float load(uint16_t bits) { return float_from_fp16(bits); }
  static ENGRAM_HOST_DEVICE uint16_t store(float value) { return fp16_from_float(value); }
};

//! Sums over one copy's elements, which lane i % kLanes adds up.
struct Sums {
  float dot[kLanes] = {};
  float hidden_squares[kLanes] = {};
  float key_squares[kLanes] = {};

  ENGRAM_HOST_DEVICE void add(int lane, float hidden, float key, float q, float k) {
    dot[lane] += hidden * q * (k * key);
    hidden_squares[lane] += hidden * hidden;
    key_squares[lane] += key * key;
  }

  static ENGRAM_HOST_DEVICE float total(const float* lanes) {
    float sum = 0.0f;
    for (int lane = 0; lane < kLanes; ++lane) sum += lanes[lane];
    return sum;
  }
};

template <int kDtype>
struct GateRange {
  using Hidden = Element<kDtype>;
  using Type = typename Hidden::Type;

  //! g of one token and copy.
  static ENGRAM_HOST_DEVICE float gate_of(const Type* hidden, const uint16_t* key,
                                          const uint16_t* q, const uint16_t* k, int size,
                                          float eps) {
    Sums sums;
    const auto add = [&](int lane, int i) __attribute__((always_inline)) {
      sums.add(lane, Hidden::load(hidden[i]), float_from_bf16(key[i]), float_from_bf16(q[i]),
               float_from_bf16(k[i]));
    };
    int first = 0;
    for (; first + kLanes <= size; first += kLanes) {
      for (int lane = 0; lane < kLanes; ++lane) add(lane, first + lane);
    }
    for (int lane = 0; first + lane < size; ++lane) add(lane, first + lane);
    return gate_value(Sums::total(sums.dot), Sums::total(sums.hidden_squares),
                      Sums::total(sums.key_squares), size, eps);
  }

  static ENGRAM_HOST_DEVICE void run(const engram_gate_args& args, int64_t begin, int64_t end) {
    const int size = args.hidden_size;
    for (int64_t token = begin; token < end; ++token) {
      const int64_t offset = row_offset(token, row_offset(args.hc_mult, size));
      const Type* const hidden = static_cast<const Type*>(args.hidden) + offset;
      Type* const out = static_cast<Type*>(args.out) + offset;
      if (args.token_mask != nullptr && !args.token_mask[token]) {
        memmove(out, hidden, static_cast<size_t>(row_offset(args.hc_mult, size)) * sizeof(Type));
        continue;
      }
      const uint16_t* const keys = args.kv + row_offset(token, row_offset(args.hc_mult + 1, size));
      const uint16_t* const value = keys + row_offset(args.hc_mult, size);
      for (int32_t copy = 0; copy < args.hc_mult; ++copy) {
        const int64_t first = row_offset(copy, size);
        const float g = gate_of(hidden + first, keys + first, args.q_weight + first,
                                args.k_weight + first, size, args.eps);
        for (int i = 0; i < size; ++i) {
          out[first + i] =
              Hidden::store(Hidden::load(hidden[first + i]) + g * float_from_bf16(value[i]));
        }
      }
    }
  }
};

template <int kDtype>
void gate_dtype(const engram_gate_args& args, int num_threads) {
  const int64_t grain = ceil_div(kElementsPerRange, row_offset(args.hc_mult, args.hidden_size));
  parallel_for(args.num_tokens, grain, num_threads, [&](int64_t begin, int64_t end) {
    run_widest<GateRange<kDtype>>(args, begin, end);
  });
}

}  // namespace

void check_gate(const engram_gate_args& args) {
  check_range(args.num_tokens, "num_tokens", 0, INT32_MAX);
  check_at_least(args.hc_mult, "hc_mult", 1);
  check_at_least(args.hidden_size, "hidden_size", 1);
  ENGRAM_CHECK(
      args.dtype == ENGRAM_BFLOAT16 || args.dtype == ENGRAM_FLOAT16 || args.dtype == ENGRAM_FLOAT32,
      "dtype: expected ", ENGRAM_FLOAT32, " (float32), ", ENGRAM_FLOAT16, " (float16) or ",
      ENGRAM_BFLOAT16, " (bfloat16), got ", args.dtype);
  ENGRAM_CHECK(args.eps >= 0.0f && args.eps <= 1.0f, "eps: expected 0 to 1, got ", args.eps);
  check_product({int64_t{args.hc_mult} + 1, args.hidden_size}, "kv values of a token", INT32_MAX);
  check_product({args.num_tokens, int64_t{args.hc_mult} + 1, args.hidden_size, 4},
                "bytes of hidden");
  if (args.num_tokens == 0) return;
  check_array(args.hidden, "hidden");
  check_elements(args.kv, "kv");
  check_elements(args.q_weight, "q_weight");
  check_elements(args.k_weight, "k_weight");
  check_array(args.out, "out");
  const uintptr_t alignment = args.dtype == ENGRAM_FLOAT32 ? alignof(float) : alignof(uint16_t);
  check_aligned(args.hidden, "hidden", alignment);
  check_aligned(args.out, "out", alignment);
}

void gate_cpu(const engram_gate_args& args, int num_threads) {
  if (args.dtype == ENGRAM_BFLOAT16) return gate_dtype<ENGRAM_BFLOAT16>(args, num_threads);
  if (args.dtype == ENGRAM_FLOAT16) return gate_dtype<ENGRAM_FLOAT16>(args, num_threads);
  gate_dtype<ENGRAM_FLOAT32>(args, num_threads);
}

}  // namespace engram
