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
constexpr int kMaxThreads = 256;
constexpr int kMaxWarps = kMaxThreads / kWarpSize;
constexpr int kMinBlocks = 2;                  //!< of kMaxThreads on an SM: 128 registers a thread
constexpr int kVectorWidth = 8;                //!< 16 bytes of BF16
constexpr int64_t kMaxGridBlocks = INT32_MAX;  //!< CUDA's own limit
//! Vectors of a thread, in registers. Small blocks with many reads in flight keep the memory busy
//! while others sum. FP32 rows take twice the registers.
template <engram_dtype kDtype>
constexpr int kCachedVectors = kDtype == ENGRAM_FLOAT32 ? 2 : 5;
constexpr unsigned kAllLanes = 0xFFFFFFFFu;

template <engram_dtype kDtype>
using Element = std::conditional_t<kDtype == ENGRAM_FLOAT32, float, uint16_t>;

//! kWidth neighbouring elements as they lie in memory: whole words in whole registers.
template <typename Type, int kWidth>
struct alignas(16) Pack {
  uint32_t words[kWidth * sizeof(Type) / sizeof(uint32_t)];
};
template <typename Type>
struct Pack<Type, 1> {
  Type words[1];
};

template <int kWidth>
using Bf16Pack = Pack<uint16_t, kWidth>;

template <typename PackType, typename Type>
__device__ PackType load_pack(const Type* row, int vector) {
  return reinterpret_cast<const PackType*>(row)[vector];
}

//! Element i of a pack.
template <engram_dtype kDtype, int kWidth>
__device__ float float_at(const Pack<Element<kDtype>, kWidth>& pack, int i) {
  if constexpr (kDtype == ENGRAM_FLOAT32) return reinterpret_cast<const float&>(pack.words[i]);
  const uint32_t word = pack.words[i / 2];
  const auto bits = static_cast<uint16_t>(i % 2 == 0 ? word : word >> 16);
  return kDtype == ENGRAM_FLOAT16 ? float_from_fp16(bits) : float_from_bf16(bits);
}

template <int kWidth>
__device__ float bf16_at(const Bf16Pack<kWidth>& pack, int i) {
  return float_at<ENGRAM_BFLOAT16, kWidth>(pack, i);
}

template <engram_dtype kDtype>
__device__ uint32_t bits_from(float value) {
  if constexpr (kDtype == ENGRAM_FLOAT32) return bits_from_float(value);
  if constexpr (kDtype == ENGRAM_FLOAT16) return fp16_from_float(value);
  return __bfloat16_as_ushort(__float2bfloat16_rn(value));  // bf16_from_float in one instruction
}

template <engram_dtype kDtype, int kWidth>
__device__ void set_element(Pack<Element<kDtype>, kWidth>& pack, int i, float value) {
  if constexpr (kWidth == 1) {
    const uint32_t bits = bits_from<kDtype>(value);
    memcpy(pack.words, &bits, sizeof(pack.words));
  } else if constexpr (kDtype == ENGRAM_FLOAT32) {
    pack.words[i] = bits_from<kDtype>(value);
  } else if (i % 2 == 0) {
    pack.words[i / 2] = bits_from<kDtype>(value);
  } else {
    pack.words[i / 2] |= bits_from<kDtype>(value) << 16;
  }
}

struct Sums {
  float dot;
  float hidden_squares;
  float key_squares;
};

//! One vector of everything that the sums are over.
template <engram_dtype kDtype, int kWidth>
struct Operands {
  Pack<Element<kDtype>, kWidth> hidden;
  Bf16Pack<kWidth> key;
  Bf16Pack<kWidth> q_weight;
  Bf16Pack<kWidth> k_weight;
};

//! Adds what one vector gives. q*k of two BF16 is exact in FP32.
template <engram_dtype kDtype, int kWidth>
__device__ void add_vector(Sums& sums, const Operands<kDtype, kWidth>& operands) {
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    const float h = float_at<kDtype, kWidth>(operands.hidden, i);
    const float k = bf16_at(operands.key, i);
    const float weight = bf16_at(operands.q_weight, i) * bf16_at(operands.k_weight, i);
    sums.dot = fmaf(h * k, weight, sums.dot);
    sums.hidden_squares = fmaf(h, h, sums.hidden_squares);
    sums.key_squares = fmaf(k, k, sums.key_squares);
  }
}

template <engram_dtype kDtype, int kWidth>
__device__ void store_vector(Element<kDtype>* out_row, int vector, float gate,
                             const Pack<Element<kDtype>, kWidth>& hidden,
                             const Bf16Pack<kWidth>& value) {
  Pack<Element<kDtype>, kWidth> out;
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    const float h = float_at<kDtype, kWidth>(hidden, i);
    set_element<kDtype, kWidth>(out, i, fmaf(gate, bf16_at(value, i), h));
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
__device__ Sums block_sums(Sums sums) {
  __shared__ Sums warp_sums[kMaxWarps];
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

//! A block for one copy of one token. A token's copies are neighbours, so that one reads the value
//! from memory and the others from the L2.
//! NOTE: out may be hidden: a thread reads all it writes first, and no other thread's elements.
template <engram_dtype kDtype, int kWidth>
__global__ void __launch_bounds__(kMaxThreads, kMinBlocks)
    gate_kernel(const __grid_constant__ engram_gate_args args) {
  using HiddenPack = Pack<Element<kDtype>, kWidth>;
  constexpr int kCached = kCachedVectors<kDtype>;

  // Coordinates
  const int64_t token = blockIdx.x / args.hc_mult;
  const int copy = static_cast<int>(blockIdx.x) % args.hc_mult;
  const int num_vectors = args.hidden_size / kWidth;
  const int num_threads = blockDim.x;
  const int64_t hidden_offset = row_offset(blockIdx.x, args.hidden_size);
  const int64_t kv_row = row_offset(token, args.hc_mult + 1);
  const auto* const hidden_row = static_cast<const Element<kDtype>*>(args.hidden) + hidden_offset;
  const uint16_t* const key_row = args.kv + row_offset(kv_row + copy, args.hidden_size);
  const uint16_t* const value_row = args.kv + row_offset(kv_row + args.hc_mult, args.hidden_size);
  const uint16_t* const q_row = args.q_weight + row_offset(copy, args.hidden_size);
  const uint16_t* const k_row = args.k_weight + row_offset(copy, args.hidden_size);
  auto* const out_row = static_cast<Element<kDtype>*>(args.out) + hidden_offset;
  if (args.token_mask != nullptr && args.token_mask[token] == 0) {
    copy_row<HiddenPack>(hidden_row, out_row, num_vectors);
    return;
  }

  // Load
  const auto load_operands = [&](int vector) {
    return Operands<kDtype, kWidth>{
        load_pack<HiddenPack>(hidden_row, vector), load_pack<Bf16Pack<kWidth>>(key_row, vector),
        load_pack<Bf16Pack<kWidth>>(q_row, vector), load_pack<Bf16Pack<kWidth>>(k_row, vector)};
  };
  Operands<kDtype, kWidth> cached[kCached];
  Bf16Pack<kWidth> values[kCached];
#pragma unroll
  for (int slot = 0; slot < kCached; ++slot) {
    const int vector = threadIdx.x + slot * num_threads;
    if (vector >= num_vectors) continue;
    cached[slot] = load_operands(vector);
    values[slot] = load_pack<Bf16Pack<kWidth>>(value_row, vector);
  }

  // Compute
  Sums sums = {};
#pragma unroll
  for (int slot = 0; slot < kCached; ++slot) {
    const int vector = threadIdx.x + slot * num_threads;
    if (vector < num_vectors) add_vector(sums, cached[slot]);
  }
  const int first_uncached = threadIdx.x + kCached * num_threads;
#pragma unroll 1
  for (int vector = first_uncached; vector < num_vectors; vector += num_threads) {
    add_vector(sums, load_operands(vector));
  }
  const Sums total = block_sums(sums);
  const float gate =
      gate_value(total.dot, total.hidden_squares, total.key_squares, args.hidden_size, args.eps);

  // Store
#pragma unroll
  for (int slot = 0; slot < kCached; ++slot) {
    const int vector = threadIdx.x + slot * num_threads;
    if (vector >= num_vectors) continue;
    store_vector<kDtype, kWidth>(out_row, vector, gate, cached[slot].hidden, values[slot]);
  }
#pragma unroll 1
  for (int vector = first_uncached; vector < num_vectors; vector += num_threads) {
    store_vector<kDtype, kWidth>(out_row, vector, gate, load_pack<HiddenPack>(hidden_row, vector),
                                 load_pack<Bf16Pack<kWidth>>(value_row, vector));
  }
}

template <engram_dtype kDtype, int kWidth>
cudaError_t launch_gate(const engram_gate_args& args, cudaStream_t stream) {
  const int num_vectors = args.hidden_size / kWidth;
  const int64_t num_warps = ceil_div(num_vectors, kCachedVectors<kDtype> * kWarpSize);
  const int num_threads = static_cast<int>(std::min<int64_t>(num_warps, kMaxWarps)) * kWarpSize;
  const int64_t num_blocks = row_offset(args.num_tokens, args.hc_mult);
  if (num_blocks > kMaxGridBlocks) return cudaErrorInvalidConfiguration;
  return launch(gate_kernel<kDtype, kWidth>, dim3(static_cast<unsigned>(num_blocks)),
                dim3(num_threads), stream, args);
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
