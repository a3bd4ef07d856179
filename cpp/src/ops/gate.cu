// SPDX-License-Identifier: Apache-2.0
#include <cuda_bf16.h>

#include <algorithm>
#include <type_traits>

#include "engram/ops.h"
#include "float_bits.h"
#include "gate.h"
#include "launch.cuh"

namespace engram {
namespace {

constexpr int kWarpSize = 32;
constexpr int kMaxThreads = 512;
constexpr int kMaxWarps = kMaxThreads / kWarpSize;
constexpr int kVectorWidth = 8;    //!< 16 bytes of BF16
constexpr int kCachedVectors = 2;  //!< of a thread, in registers: rows up to 8192 are read once
constexpr int kMaxTokensPerBlock = 8;
constexpr int kFullDevice = 256;  //!< blocks of a copy before a block takes a second token
constexpr unsigned kAllLanes = 0xFFFFFFFFu;

template <engram_dtype kDtype>
using Element = std::conditional_t<kDtype == ENGRAM_FLOAT32, float, uint16_t>;

//! kWidth neighbouring elements, one or more vector accesses wide.
template <typename Type, int kWidth>
struct alignas(kWidth == 1 ? alignof(Type) : 16) Pack {
  Type elements[kWidth];
};

template <int kWidth>
using Bf16Pack = Pack<uint16_t, kWidth>;

template <typename PackType, typename Type>
__device__ PackType load_pack(const Type* row, int vector) {
  return reinterpret_cast<const PackType*>(row)[vector];
}

template <engram_dtype kDtype>
__device__ float to_float(Element<kDtype> element) {
  if constexpr (kDtype == ENGRAM_FLOAT32) return element;
  if constexpr (kDtype == ENGRAM_FLOAT16) return float_from_fp16(element);
  if constexpr (kDtype == ENGRAM_BFLOAT16) return float_from_bf16(element);
}

template <engram_dtype kDtype>
__device__ Element<kDtype> from_float(float value) {
  if constexpr (kDtype == ENGRAM_FLOAT32) return value;
  if constexpr (kDtype == ENGRAM_FLOAT16) return fp16_from_float(value);
  if constexpr (kDtype == ENGRAM_BFLOAT16) {
    return __bfloat16_as_ushort(__float2bfloat16_rn(value));  // bf16_from_float in one instruction
  }
}

struct Sums {
  float dot;
  float hidden_squares;
  float key_squares;
};

//! Adds what one vector gives. q*k of two BF16 is exact in FP32, so it may be kept for all tokens.
template <engram_dtype kDtype, int kWidth>
__device__ void add_vector(Sums& sums, const Pack<Element<kDtype>, kWidth>& hidden,
                           const Bf16Pack<kWidth>& key, const float (&weights)[kWidth]) {
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    const float h = to_float<kDtype>(hidden.elements[i]);
    const float k = float_from_bf16(key.elements[i]);
    sums.dot = fmaf(h * k, weights[i], sums.dot);
    sums.hidden_squares = fmaf(h, h, sums.hidden_squares);
    sums.key_squares = fmaf(k, k, sums.key_squares);
  }
}

template <int kWidth>
__device__ void load_weights(const uint16_t* q_row, const uint16_t* k_row, int vector,
                             float (&weights)[kWidth]) {
  const auto q = load_pack<Bf16Pack<kWidth>>(q_row, vector);
  const auto k = load_pack<Bf16Pack<kWidth>>(k_row, vector);
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    weights[i] = float_from_bf16(q.elements[i]) * float_from_bf16(k.elements[i]);
  }
}

template <engram_dtype kDtype, int kWidth>
__device__ void store_vector(Element<kDtype>* out_row, int vector, float gate,
                             const Pack<Element<kDtype>, kWidth>& hidden,
                             const Bf16Pack<kWidth>& value) {
  Pack<Element<kDtype>, kWidth> out;
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    out.elements[i] = from_float<kDtype>(
        fmaf(gate, float_from_bf16(value.elements[i]), to_float<kDtype>(hidden.elements[i])));
  }
  reinterpret_cast<Pack<Element<kDtype>, kWidth>*>(out_row)[vector] = out;
}

template <typename PackType, typename Type>
__device__ void copy_row(const Type* from, Type* to, int num_vectors) {
  for (int vector = threadIdx.x; vector < num_vectors; vector += blockDim.x) {
    reinterpret_cast<PackType*>(to)[vector] = load_pack<PackType>(from, vector);
  }
}

//! The block's sums, the same in every thread: warps first, then over the warps in their order.
//! NOTE: two calls in a row need two buffers; the barrier of the second call frees the first.
__device__ Sums block_sums(Sums sums, Sums (&warp_sums)[kMaxWarps]) {
#pragma unroll
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
    sums.dot += __shfl_xor_sync(kAllLanes, sums.dot, offset);
    sums.hidden_squares += __shfl_xor_sync(kAllLanes, sums.hidden_squares, offset);
    sums.key_squares += __shfl_xor_sync(kAllLanes, sums.key_squares, offset);
  }
  if (threadIdx.x % kWarpSize == 0) warp_sums[threadIdx.x / kWarpSize] = sums;
  __syncthreads();
  Sums total = {};
  for (int warp = 0; warp < static_cast<int>(blockDim.x) / kWarpSize; ++warp) {
    total.dot += warp_sums[warp].dot;
    total.hidden_squares += warp_sums[warp].hidden_squares;
    total.key_squares += warp_sums[warp].key_squares;
  }
  return total;
}

//! A block for one copy of tokens_per_block neighbouring tokens.
//! NOTE: out may be hidden: a thread reads all it writes first, and no other thread's elements.
template <engram_dtype kDtype, int kWidth>
__global__ void __launch_bounds__(kMaxThreads)
    gate_kernel(const __grid_constant__ engram_gate_args args, int tokens_per_block) {
  using HiddenPack = Pack<Element<kDtype>, kWidth>;
  __shared__ Sums warp_sums[2][kMaxWarps];

  // Coordinates
  const int copy = blockIdx.y;
  const int num_vectors = args.hidden_size / kWidth;
  const int num_threads = blockDim.x;
  const int64_t first_token = row_offset(blockIdx.x, tokens_per_block);
  const int64_t end_token = min(first_token + tokens_per_block, args.num_tokens);

  // Weights of the vectors that stay in registers
  const uint16_t* const q_row = args.q_weight + row_offset(copy, args.hidden_size);
  const uint16_t* const k_row = args.k_weight + row_offset(copy, args.hidden_size);
  float weights[kCachedVectors][kWidth];
#pragma unroll
  for (int slot = 0; slot < kCachedVectors; ++slot) {
    const int vector = threadIdx.x + slot * num_threads;
    if (vector < num_vectors) load_weights(q_row, k_row, vector, weights[slot]);
  }

  int buffer = 0;
  for (int64_t token = first_token; token < end_token; ++token) {
    const int64_t hidden_offset =
        row_offset(row_offset(token, args.hc_mult) + copy, args.hidden_size);
    const int64_t kv_row = row_offset(token, args.hc_mult + 1);
    const auto* const hidden_row = static_cast<const Element<kDtype>*>(args.hidden) + hidden_offset;
    const uint16_t* const key_row = args.kv + row_offset(kv_row + copy, args.hidden_size);
    const uint16_t* const value_row = args.kv + row_offset(kv_row + args.hc_mult, args.hidden_size);
    auto* const out_row = static_cast<Element<kDtype>*>(args.out) + hidden_offset;
    if (args.token_mask != nullptr && args.token_mask[token] == 0) {
      copy_row<HiddenPack>(hidden_row, out_row, num_vectors);
      continue;
    }

    // Load
    HiddenPack hidden[kCachedVectors];
    Bf16Pack<kWidth> keys[kCachedVectors];
    Bf16Pack<kWidth> values[kCachedVectors];
#pragma unroll
    for (int slot = 0; slot < kCachedVectors; ++slot) {
      const int vector = threadIdx.x + slot * num_threads;
      if (vector >= num_vectors) continue;
      hidden[slot] = load_pack<HiddenPack>(hidden_row, vector);
      keys[slot] = load_pack<Bf16Pack<kWidth>>(key_row, vector);
      values[slot] = load_pack<Bf16Pack<kWidth>>(value_row, vector);
    }

    // Compute
    Sums sums = {};
#pragma unroll
    for (int slot = 0; slot < kCachedVectors; ++slot) {
      const int vector = threadIdx.x + slot * num_threads;
      if (vector < num_vectors) {
        add_vector<kDtype, kWidth>(sums, hidden[slot], keys[slot], weights[slot]);
      }
    }
    const int first_uncached = threadIdx.x + kCachedVectors * num_threads;
#pragma unroll 1
    for (int vector = first_uncached; vector < num_vectors; vector += num_threads) {
      float vector_weights[kWidth];
      load_weights(q_row, k_row, vector, vector_weights);
      add_vector<kDtype, kWidth>(sums, load_pack<HiddenPack>(hidden_row, vector),
                                 load_pack<Bf16Pack<kWidth>>(key_row, vector), vector_weights);
    }
    const Sums total = block_sums(sums, warp_sums[buffer]);
    buffer ^= 1;
    const float gate =
        gate_value(total.dot, total.hidden_squares, total.key_squares, args.hidden_size, args.eps);

    // Store
#pragma unroll
    for (int slot = 0; slot < kCachedVectors; ++slot) {
      const int vector = threadIdx.x + slot * num_threads;
      if (vector >= num_vectors) continue;
      store_vector<kDtype, kWidth>(out_row, vector, gate, hidden[slot], values[slot]);
    }
#pragma unroll 1
    for (int vector = first_uncached; vector < num_vectors; vector += num_threads) {
      store_vector<kDtype, kWidth>(out_row, vector, gate, load_pack<HiddenPack>(hidden_row, vector),
                                   load_pack<Bf16Pack<kWidth>>(value_row, vector));
    }
  }
}

template <engram_dtype kDtype, int kWidth>
cudaError_t launch_gate(const engram_gate_args& args, cudaStream_t stream) {
  const int num_vectors = args.hidden_size / kWidth;
  const int64_t num_warps = ceil_div(num_vectors, kCachedVectors * kWarpSize);
  const int num_threads = static_cast<int>(std::min<int64_t>(num_warps, kMaxWarps)) * kWarpSize;
  // Neighbouring tokens share a block's weights once there are blocks for every SM.
  const int tokens_per_block =
      static_cast<int>(std::clamp<int64_t>(args.num_tokens / kFullDevice, 1, kMaxTokensPerBlock));
  const dim3 grid(static_cast<unsigned>(ceil_div(args.num_tokens, tokens_per_block)),
                  static_cast<unsigned>(args.hc_mult));
  return launch(gate_kernel<kDtype, kWidth>, grid, dim3(num_threads), stream, args,
                tokens_per_block);
}

//! Vectors where every row starts at an address for them, else element by element.
template <engram_dtype kDtype>
cudaError_t gate_dtype(const engram_gate_args& args, cudaStream_t stream) {
  const bool vectors = args.hidden_size % kVectorWidth == 0 &&
                       is_aligned(16, args.hidden, args.kv, args.q_weight, args.k_weight, args.out);
  return vectors ? launch_gate<kDtype, kVectorWidth>(args, stream)
                 : launch_gate<kDtype, 1>(args, stream);
}

}  // namespace

cudaError_t gate_cuda(const engram_gate_args& args, cudaStream_t stream) {
  if (args.num_tokens == 0) return cudaSuccess;
  switch (args.dtype) {
    case ENGRAM_FLOAT32:
      return gate_dtype<ENGRAM_FLOAT32>(args, stream);
    case ENGRAM_FLOAT16:
      return gate_dtype<ENGRAM_FLOAT16>(args, stream);
    case ENGRAM_BFLOAT16:
      return gate_dtype<ENGRAM_BFLOAT16>(args, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace engram
