// SPDX-License-Identifier: Apache-2.0
// The projection on every architecture: weights dequantised into shared memory, products of a warp.
#include <cuda_bf16.h>

#include <algorithm>

#include "dequantize.cuh"
#include "engram/ops.h"
#include "launch.cuh"
#include "project_kernels.h"
#include "ptx.cuh"

namespace engram {
namespace {

constexpr int kWarpSize = 32;
constexpr int kMma = 16;             //!< tokens and inner values of one mma; it takes 8 outputs
constexpr int kInputsPerLoad = 8;    //!< BF16 in 16 bytes
constexpr int kWeightsPerLoad = 16;  //!< FP8 in 16 bytes: half a scale block
constexpr int kRowPad = 8;           //!< moves each row of a tile by 16 bytes: no bank conflicts
constexpr int kTileGroup = 8;        //!< token tiles that run side by side and share weights in L2

//! What a block computes: kTokens x kOutputs sums, kInner inner values at a time, by
//! kTokenWarps x kOutputWarps warps. Every shape adds the inner values in the same order, 16 at a
//! time from the first on, so an output does not depend on the shape and so not on the number of
//! tokens.
template <int kTokens_, int kOutputs_, int kInner_, int kTokenWarps_, int kOutputWarps_>
struct Shape {
  static constexpr int kTokens = kTokens_;
  static constexpr int kOutputs = kOutputs_;
  static constexpr int kInner = kInner_;
  static constexpr int kTokenWarps = kTokenWarps_;
  static constexpr int kOutputWarps = kOutputWarps_;
  static constexpr int kThreads = kTokenWarps * kOutputWarps * kWarpSize;
  static constexpr int kPitch = kInner + kRowPad;
  static constexpr int kWarpTokens = kTokens / kTokenWarps;
  static constexpr int kWarpOutputs = kOutputs / kOutputWarps;
  static constexpr int kInputLoads = kTokens * kInner / kInputsPerLoad / kThreads;
  static constexpr int kWeightLoads = kOutputs * kInner / kWeightsPerLoad / kThreads;
  static_assert(kWarpTokens % kMma == 0 && kWarpOutputs % 16 == 0, "whole mmas, two outputs wide");
  static_assert(kInner % kScaleBlock == 0 && kPitch % 8 == 0, "whole scale blocks, 16-byte rows");
  static_assert(kInputLoads * kThreads * kInputsPerLoad == kTokens * kInner &&
                    kWeightLoads * kThreads * kWeightsPerLoad == kOutputs * kInner,
                "every thread loads the same number of vectors");
};

using FewTokens = Shape<16, 64, 128, 1, 4>;  // long inner steps: many weight bytes in flight
using SomeTokens = Shape<64, 64, 64, 2, 2>;
using ManyTokens = Shape<128, 128, 32, 2, 4>;

//! A step's operands in shared memory, both as BF16 with the inner values side by side.
template <typename S>
struct alignas(16) Tiles {
  __nv_bfloat16 inputs[S::kTokens][S::kPitch];
  __nv_bfloat16 weights[S::kOutputs][S::kPitch];
};

//! A thread's part of the next step's operands, on its way from global memory.
template <typename S>
struct Loads {
  uint4 inputs[S::kInputLoads];
  uint4 weights[S::kWeightLoads];
  uint8_t scales[S::kWeightLoads];
};

//! Reads of step `inner`; what lies past the last token, output or inner value is zero.
template <typename S>
__device__ void load_global(const engram_project_args& args, int64_t first_token, int first_output,
                            int inner, Loads<S>& loads) {
  constexpr int kInputsPerRow = S::kInner / kInputsPerLoad;
  constexpr int kWeightsPerRow = S::kInner / kWeightsPerLoad;
#pragma unroll
  for (int i = 0; i < S::kInputLoads; ++i) {
    const int load = threadIdx.x + i * S::kThreads;
    const int64_t token = first_token + load / kInputsPerRow;
    const int k = inner + load % kInputsPerRow * kInputsPerLoad;
    loads.inputs[i] = uint4{};
    if (token >= args.num_tokens || k >= args.in_features) continue;
    const uint16_t* const from = args.x + row_offset(token, args.in_features) + k;
    loads.inputs[i] = __ldg(reinterpret_cast<const uint4*>(from));
  }
#pragma unroll
  for (int i = 0; i < S::kWeightLoads; ++i) {
    const int load = threadIdx.x + i * S::kThreads;
    const int output = first_output + load / kWeightsPerRow;
    const int k = inner + load % kWeightsPerRow * kWeightsPerLoad;
    loads.weights[i] = uint4{};
    loads.scales[i] = 0;
    if (output >= args.out_features || k >= args.in_features) continue;
    const uint8_t* const from = args.weight + row_offset(output, args.in_features) + k;
    loads.weights[i] = __ldg(reinterpret_cast<const uint4*>(from));
    loads.scales[i] = __ldg(args.scale + k / kScaleBlock +
                            row_offset(output / kScaleBlock, args.in_features / kScaleBlock));
  }
}

//! Dequantises on the way. A weight outside BF16's range is what bf16_from_fp8 makes of it:
//! rounded where subnormal, infinite where too large; every other one is exact.
template <typename S>
__device__ void store_shared(const Loads<S>& loads, Tiles<S>& tiles) {
  constexpr int kInputsPerRow = S::kInner / kInputsPerLoad;
  constexpr int kWeightsPerRow = S::kInner / kWeightsPerLoad;
#pragma unroll
  for (int i = 0; i < S::kInputLoads; ++i) {
    const int load = threadIdx.x + i * S::kThreads;
    const int k = load % kInputsPerRow * kInputsPerLoad;
    *reinterpret_cast<uint4*>(&tiles.inputs[load / kInputsPerRow][k]) = loads.inputs[i];
  }
#pragma unroll
  for (int i = 0; i < S::kWeightLoads; ++i) {
    const int load = threadIdx.x + i * S::kThreads;
    const int k = load % kWeightsPerRow * kWeightsPerLoad;
    auto* const to = reinterpret_cast<uint4*>(&tiles.weights[load / kWeightsPerRow][k]);
    const uint2 first = bf16x4_from_fp8(loads.weights[i].x, loads.scales[i]);
    const uint2 second = bf16x4_from_fp8(loads.weights[i].y, loads.scales[i]);
    const uint2 third = bf16x4_from_fp8(loads.weights[i].z, loads.scales[i]);
    const uint2 fourth = bf16x4_from_fp8(loads.weights[i].w, loads.scales[i]);
    to[0] = make_uint4(first.x, first.y, second.x, second.y);
    to[1] = make_uint4(third.x, third.y, fourth.x, fourth.y);
  }
}

//! A warp's sums: [16 tokens][8 outputs] blocks as multiply_matrices holds them.
template <typename S>
using WarpSums = float[S::kWarpTokens / kMma][S::kWarpOutputs / 8][4];

//! Adds one step of num_inner values, a multiple of 16.
template <typename S>
__device__ void multiply_tiles(const Tiles<S>& tiles, int warp_token, int warp_output,
                               int num_inner, WarpSums<S>& sums) {
  const int lane = threadIdx.x % kWarpSize;
#pragma unroll
  for (int inner = 0; inner < S::kInner; inner += kMma) {
    // Nothing is added past the last inner value, whatever the shape's step.
    if (S::kInner > kScaleBlock && inner >= num_inner) break;
    uint32_t inputs[S::kWarpTokens / kMma][4];
#pragma unroll
    for (int i = 0; i < S::kWarpTokens / kMma; ++i) {
      const int row = warp_token + i * kMma + lane % 16;
      load_matrices(inputs[i], &tiles.inputs[row][inner + lane / 16 * 8]);
    }
#pragma unroll
    for (int j = 0; j < S::kWarpOutputs / 8; j += 2) {
      uint32_t weights[4];  // inner halves of outputs j*8..j*8+7, then of the next eight
      const int row = warp_output + j * 8 + lane / 16 * 8 + lane % 8;
      load_matrices(weights, &tiles.weights[row][inner + lane / 8 % 2 * 8]);
#pragma unroll
      for (int i = 0; i < S::kWarpTokens / kMma; ++i) {
        multiply_matrices(sums[i][j], inputs[i], weights[0], weights[1]);
        multiply_matrices(sums[i][j + 1], inputs[i], weights[2], weights[3]);
      }
    }
  }
}

//! Rounds and writes two neighbouring outputs; pairs: as one word.
__device__ void store_pair(const engram_project_args& args, int64_t token, int output, bool pairs,
                           float first, float second) {
  if (token >= args.num_tokens || output >= args.out_features) return;
  uint16_t* const to = args.out + row_offset(token, args.out_features) + output;
  const __nv_bfloat162 rounded = __floats2bfloat162_rn(first, second);
  if (pairs) {
    *reinterpret_cast<__nv_bfloat162*>(to) = rounded;
    return;
  }
  to[0] = __bfloat16_as_ushort(rounded.x);
  if (output + 1 < args.out_features) to[1] = __bfloat16_as_ushort(rounded.y);
}

//! pairs: out_features is even and out aligned to 4 bytes.
template <typename S>
__global__ void __launch_bounds__(S::kThreads)
    project_kernel(const __grid_constant__ engram_project_args args, bool pairs) {
  __shared__ Tiles<S> tiles[2];

  // Coordinates
  const int64_t first_token =
      row_offset(row_offset(blockIdx.z, kTileGroup) + blockIdx.x, S::kTokens);
  const int first_output = blockIdx.y * S::kOutputs;
  if (first_token >= args.num_tokens) return;
  const int warp = threadIdx.x / kWarpSize;
  const int warp_token = warp / S::kOutputWarps * S::kWarpTokens;
  const int warp_output = warp % S::kOutputWarps * S::kWarpOutputs;

  // Load and compute: while a step is multiplied, the next one is on its way
  WarpSums<S> sums = {};
  Loads<S> loads;
  load_global(args, first_token, first_output, 0, loads);
  store_shared(loads, tiles[0]);
  __syncthreads();
  int stage = 0;
  for (int inner = 0; inner < args.in_features; inner += S::kInner) {
    const bool has_next = args.in_features - inner > S::kInner;
    if (has_next) load_global(args, first_token, first_output, inner + S::kInner, loads);
    multiply_tiles<S>(tiles[stage], warp_token, warp_output, args.in_features - inner, sums);
    stage ^= 1;
    if (has_next) store_shared(loads, tiles[stage]);
    __syncthreads();
  }

  // Store
  const int lane = threadIdx.x % kWarpSize;
#pragma unroll
  for (int i = 0; i < S::kWarpTokens / kMma; ++i) {
    const int64_t token = first_token + warp_token + i * kMma + lane / 4;
#pragma unroll
    for (int j = 0; j < S::kWarpOutputs / 8; ++j) {
      const int output = first_output + warp_output + j * 8 + lane % 4 * 2;
      store_pair(args, token, output, pairs, sums[i][j][0], sums[i][j][1]);
      store_pair(args, token + 8, output, pairs, sums[i][j][2], sums[i][j][3]);
    }
  }
}

template <typename S>
cudaError_t launch_project(const engram_project_args& args, cudaStream_t stream) {
  const int64_t token_tiles = ceil_div(args.num_tokens, S::kTokens);
  const dim3 grid(static_cast<unsigned>(std::min<int64_t>(token_tiles, kTileGroup)),
                  static_cast<unsigned>(ceil_div(args.out_features, S::kOutputs)),
                  static_cast<unsigned>(ceil_div(token_tiles, kTileGroup)));
  const bool pairs = args.out_features % 2 == 0 && is_aligned(4, args.out);
  return launch(project_kernel<S>, grid, dim3(S::kThreads), stream, args, pairs);
}

}  // namespace

cudaError_t project_generic(const engram_project_args& args, int, cudaStream_t stream) {
  if (args.num_tokens <= FewTokens::kTokens) return launch_project<FewTokens>(args, stream);
  if (args.num_tokens <= SomeTokens::kTokens) return launch_project<SomeTokens>(args, stream);
  return launch_project<ManyTokens>(args, stream);
}

}  // namespace engram
