// SPDX-License-Identifier: Apache-2.0
// Launchers that no fake GPU has: lookups there take the direct path.
#include <cuda_runtime_api.h>

#include "engram/ops.h"
#include "ops/row_runs.h"

namespace engram {

cudaError_t lookup_hot(const engram_lookup_args&, const HotMarks&, cudaStream_t) {
  return cudaErrorNotSupported;
}
cudaError_t make_runs(const engram_lookup_args&, const SegmentShape&, const RunArrays&,
                      cudaStream_t) {
  return cudaErrorNotSupported;
}
cudaError_t read_staged_runs(const engram_lookup_args&, const SegmentShape&, const RunArrays&,
                             const StagedRows&, int, cudaStream_t) {
  return cudaErrorNotSupported;
}
cudaError_t read_runs(const engram_lookup_args&, const SegmentShape&, const RunArrays&, int,
                      cudaStream_t) {
  return cudaErrorNotSupported;
}

}  // namespace engram
