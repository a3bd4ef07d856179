// SPDX-License-Identifier: Apache-2.0
// Which way a lookup goes on a GPU.
#include "engram/ops.h"
#include "ops/lookup_thresholds.h"
#include "ops/row_runs.h"
#include "table/lane.h"

namespace engram {

int32_t lookup_path(const engram_lookup_args& args) {
  if (args.path != ENGRAM_LOOKUP_AUTO) return args.path;
  if (args.values_in_host == 0) return ENGRAM_LOOKUP_DIRECT;
  const LookupThresholds& thresholds = lookup_thresholds();
  if (args.lanes != nullptr && args.num_tokens >= thresholds.gathered_tokens) {
    return ENGRAM_LOOKUP_GATHERED;
  }
  if (args.num_tokens < thresholds.sorted_tokens ||
      args.workspace_bytes < run_array_bytes(segment_shape(args))) {
    return ENGRAM_LOOKUP_DIRECT;
  }
  return ENGRAM_LOOKUP_SORTED;
}

int64_t lookup_workspace_bytes(const engram_lookup_args& args) {
  engram_lookup_args with_workspace = args;
  with_workspace.workspace_bytes = INT64_MAX;
  if (lookup_path(with_workspace) != ENGRAM_LOOKUP_SORTED) return 0;
  return run_array_bytes(segment_shape(args));
}

#if ENGRAM_CUDA
namespace {

cudaError_t lookup_direct(const engram_lookup_args& args, cudaStream_t stream) {
  return has_hot_rows(args.hot) ? lookup_hot(args, {}, stream) : lookup_cuda(args, stream);
}

cudaError_t lookup_sorted(const engram_lookup_args& args, cudaStream_t stream) {
  if (args.num_tokens == 0) return cudaSuccess;
  const SegmentShape shape = segment_shape(args);
  const RunArrays arrays = run_arrays(shape, args.workspace);
  cudaError_t code = cudaSuccess;
  if (has_hot_rows(args.hot)) code = lookup_hot(args, hot_marks(shape, arrays), stream);
  if (code == cudaSuccess) code = make_runs(args, shape, arrays, stream);
  if (code != cudaSuccess) return code;
  return read_runs(args, shape, arrays,
                   args.num_read_blocks > 0 ? args.num_read_blocks : kReadBlocks, stream);
}

cudaError_t lookup_gathered(const engram_lookup_args& args, cudaStream_t stream) {
  int device = 0;
  const cudaError_t code = cudaGetDevice(&device);
  if (code == cudaSuccess) static_cast<Lanes*>(args.lanes)->lookup(args, device, stream);
  return code;
}

}  // namespace

cudaError_t lookup_by_path(const engram_lookup_args& args, cudaStream_t stream) {
  switch (lookup_path(args)) {
    case ENGRAM_LOOKUP_GATHERED:
      return lookup_gathered(args, stream);
    case ENGRAM_LOOKUP_SORTED:
      return lookup_sorted(args, stream);
    default:
      return lookup_direct(args, stream);
  }
}
#endif

}  // namespace engram
