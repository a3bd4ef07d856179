// SPDX-License-Identifier: Apache-2.0
// Launches project_sm90.cuh's kernel: shapes, tensor maps and the division of work.
#include <cudaTypedefs.h>

#include <algorithm>

#include "launch.cuh"
#include "project_kernels.h"
#include "project_sm90.cuh"

namespace engram {
namespace sm90 {
namespace {

using Tokens16 = Shape<16, 256, 4, 1>;
using Tokens32 = Shape<32, 128, 4, 1>;
using Tokens64 = Shape<64, 128, 4, 1>;
using Tokens128 = Shape<128, 64, 4, 1>;
using Tokens256 = Shape<256, 64, 2, 4>;
using Wide192 = Shape<192, 64, 3, 1>;
using Wide256 = Shape<256, 64, 3, 1>;

// That cost a tile of 256 outputs as much as its weights do, by times of 256 to 8192 tokens on an
// H200.
constexpr int kDecodeTokens = 116;
// That take as long as a tile: 4 to 7 there.
constexpr int kStripsPerTile = 5;

//! The driver's function, found without linking its library; null where it is too old.
PFN_cuTensorMapEncodeTiled_v12000 find_encoder() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult result;
  const cudaError_t code = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function,
                                                            12000, cudaEnableDefault, &result);
  return code == cudaSuccess && result == cudaDriverEntryPointSuccess
             ? reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(function)
             : nullptr;
}

//! Boxes of box_rows x box_columns of a row-major matrix.
bool encode(CUtensorMap& map, CUtensorMapDataType type, int element_bytes, const void* matrix,
            int64_t rows, int64_t columns, int box_rows, int box_columns,
            CUtensorMapSwizzle swizzle) {
  static const PFN_cuTensorMapEncodeTiled_v12000 encoder = find_encoder();
  if (encoder == nullptr) return false;
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
  const cuuint64_t pitch[] = {static_cast<cuuint64_t>(columns) * element_bytes};
  const cuuint32_t box[] = {static_cast<cuuint32_t>(box_columns),
                            static_cast<cuuint32_t>(box_rows)};
  const cuuint32_t steps[] = {1, 1};
  return encoder(&map, type, 2, const_cast<void*>(matrix), sizes, pitch, box, steps,
                 CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                 CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

//! Boxes of box_rows rows, a multiple of 16.
template <typename S>
bool encode_weight(CUtensorMap& map, const engram_project_args& call, int box_rows) {
  if (call.weight_layout == ENGRAM_WEIGHT_SM90_V1) {
    // 16 rows are one, of 16 bytes for each inner value: two elements of 8, a box has 256 at most.
    return encode(map, CU_TENSOR_MAP_DATA_TYPE_FLOAT64, 8, call.weight, call.out_features / 16,
                  int64_t{2} * call.in_features, box_rows / 16, 2 * S::kWeightColumns,
                  CU_TENSOR_MAP_SWIZZLE_NONE);
  }
  return encode(map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, call.weight, call.out_features,
                call.in_features, box_rows, S::kWeightColumns,
                S::kWeightColumns == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B);
}

//! Leaves the outputs of the last row tile to strips where tiles would take another round, and
//! strips less time than that.
void leave_strips(Args& args, int num_clusters) {
  const auto rounds = [&](int num_row_tiles) {
    return ceil_div(int64_t{num_row_tiles} * args.num_token_tiles, num_clusters);
  };
  const int num_whole = args.num_row_tiles - 1;
  const int64_t num_left = args.out_features - int64_t{num_whole} * args.rows * kClusterBlocks;
  const int64_t num_token_strips = ceil_div(args.num_tokens, kStripTokens);
  const int64_t num_strips = ceil_div(num_left, kStripRows * kClusterBlocks) * num_token_strips;
  const int64_t strips_cost = ceil_div(num_strips, num_clusters);
  if (strips_cost >= kStripsPerTile * (rounds(args.num_row_tiles) - rounds(num_whole))) return;
  args.num_row_tiles = num_whole;
  args.num_token_strips = static_cast<int>(num_token_strips);
  args.num_strips = static_cast<int>(num_strips);
}

//! Whole tiles in full rounds of the clusters, and those left in the parts that are done first.
template <typename S>
void split_work(Args& args, int num_clusters) {
  const int num_tiles = args.num_row_tiles * args.num_token_tiles;
  const int num_left = num_tiles % num_clusters;
  const auto cost = [&](int num_parts) {
    return ceil_div(num_left * num_parts, num_clusters) * (S::kTokens / num_parts + kDecodeTokens);
  };
  args.num_parts = 1;
  for (int num_parts = 2; num_parts <= S::kParts; num_parts *= 2) {
    if (cost(num_parts) < cost(args.num_parts)) args.num_parts = num_parts;
  }
  args.num_whole = num_tiles - num_left;
  args.num_pieces = args.num_whole + num_left * args.num_parts;
}

}  // namespace

template <typename S>
cudaError_t launch_shape(const engram_project_args& call, int num_blocks, cudaStream_t stream) {
  Args args{};
  args.scale = call.scale;
  args.out = call.out;
  args.num_tokens = static_cast<int>(call.num_tokens);
  args.in_features = call.in_features;
  args.out_features = call.out_features;
  const int num_clusters = num_blocks / kClusterBlocks;
  if (S::kIsFixed) {
    args.rows = S::kMaxRows;
  } else {
    // As few rounds as the shape allows, and the same number of outputs to every block.
    const int64_t rounds = ceil_div(call.out_features, num_clusters * kClusterBlocks * S::kMaxRows);
    args.rows = static_cast<int>(
        16 * ceil_div(call.out_features, rounds * num_clusters * kClusterBlocks * 16));
  }
  args.num_row_tiles = static_cast<int>(ceil_div(call.out_features, args.rows * kClusterBlocks));
  args.num_token_tiles = static_cast<int>(ceil_div(call.num_tokens, S::kTokens));
  if constexpr (S::kHasStrips) leave_strips(args, num_clusters);
  split_work<S>(args, num_clusters);
  const int shared_bytes =
      S::num_stages(args.rows) * S::stage_bytes(args.rows) + S::kBufferBytes + kReservedBytes / 2;
  if (!encode_weight<S>(args.weight, call, args.rows) ||
      (args.num_strips > 0 && !encode_weight<S>(args.strip_weight, call, kStripRows)) ||
      !encode(args.x, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, call.x, call.num_tokens,
              call.in_features, S::kInputRows, kInputColumns, CU_TENSOR_MAP_SWIZZLE_128B)) {
    return cudaErrorNotSupported;
  }
  void (*const kernel)(Args) = call.weight_layout == ENGRAM_WEIGHT_SM90_V1
                                   ? project_kernel<S, Sm90V1Weights<S>>
                                   : project_kernel<S, RowMajorWeights<S>>;
  // The most that any call takes: calls of other sizes may set it at the same time.
  const cudaError_t code = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                kSharedBytes - kReservedBytes / 2);
  if (code != cudaSuccess) return code;
  const int grid =
      std::min(num_clusters, std::max(args.num_pieces, args.num_strips)) * kClusterBlocks;
  return launch_clusters(kernel, dim3(grid), dim3(S::kThreads), kClusterBlocks, shared_bytes,
                         stream, args);
}

}  // namespace sm90

bool project_sm90_is_built() {
  // Without 90a's instructions the kernel is empty, and so without barriers.
  static const bool is_built = [] {
    cudaFuncAttributes attributes = {};
    void (*const kernel)(sm90::Args) =
        sm90::project_kernel<sm90::Tokens16, sm90::RowMajorWeights<sm90::Tokens16>>;
    return cudaFuncGetAttributes(&attributes, kernel) == cudaSuccess &&
           attributes.sharedSizeBytes > 0;
  }();
  return is_built;
}

cudaError_t project_sm90_16(const engram_project_args& args, int num_blocks, cudaStream_t stream) {
  return sm90::launch_shape<sm90::Tokens16>(args, num_blocks, stream);
}
cudaError_t project_sm90_32(const engram_project_args& args, int num_blocks, cudaStream_t stream) {
  return sm90::launch_shape<sm90::Tokens32>(args, num_blocks, stream);
}
cudaError_t project_sm90_64(const engram_project_args& args, int num_blocks, cudaStream_t stream) {
  return sm90::launch_shape<sm90::Tokens64>(args, num_blocks, stream);
}
cudaError_t project_sm90_128(const engram_project_args& args, int num_blocks, cudaStream_t stream) {
  return sm90::launch_shape<sm90::Tokens128>(args, num_blocks, stream);
}
cudaError_t project_sm90_256(const engram_project_args& args, int num_blocks, cudaStream_t stream) {
  return sm90::launch_shape<sm90::Tokens256>(args, num_blocks, stream);
}
cudaError_t project_sm90_wide_192(const engram_project_args& args, int num_blocks,
                                  cudaStream_t stream) {
  return sm90::launch_shape<sm90::Wide192>(args, num_blocks, stream);
}
cudaError_t project_sm90_wide_256(const engram_project_args& args, int num_blocks,
                                  cudaStream_t stream) {
  return sm90::launch_shape<sm90::Wide256>(args, num_blocks, stream);
}

}  // namespace engram
