// SPDX-License-Identifier: Apache-2.0
//! \file found_rows.cuh
//! Rows that lie wherever their lanes have found them, written by a warp: all are loaded before the
//! first one is stored.
#pragma once

#include "ptx.cuh"
#include "table_row.cuh"

namespace engram {

constexpr int kRowsInFlight = 8;  //!< of a warp

//! A row of the result, and its bytes.
struct FoundRow {
  int64_t token = 0;
  int column = 0;
  bool is_written = false;          //!< false: left as it is
  bool is_lost = false;             //!< no bytes are there: NaN, not zeros
  const uint8_t* values = nullptr;  //!< 8-byte aligned; null: there are none
  const uint8_t* scales = nullptr;
};

__device__ __forceinline__ const uint8_t* shuffle(const uint8_t* address, int lane) {
  const auto bits = reinterpret_cast<unsigned long long>(address);
  return reinterpret_cast<const uint8_t*>(__shfl_sync(kWholeWarp, bits, lane));
}

//! The rows that the first kRowsInFlight lanes have found. All lanes call it.
template <engram_row_form kForm>
__device__ __forceinline__ void write_found_rows(const engram_lookup_args& args,
                                                 const FoundRow& own, bool values_aligned) {
  const int lane = static_cast<int>(threadIdx.x);
  const unsigned written = __ballot_sync(kWholeWarp, own.is_written);
  if (written == 0) return;
  const unsigned lost = __ballot_sync(kWholeWarp, own.is_lost);
  const int chunks_per_row = args.head_dim / kRowChunkBytes;
#pragma unroll 1
  for (int begin = 0; begin < chunks_per_row; begin += 32) {
    const int chunk = begin + lane;
    const bool has_chunk = chunk < chunks_per_row;

    // Load all rows before the first store
    uint2 values[kRowsInFlight];
    uint8_t scales[kRowsInFlight];
#pragma unroll
    for (int i = 0; i < kRowsInFlight; ++i) {
      const uint8_t* const from = shuffle(own.values, i);
      const uint8_t* const scales_from = shuffle(own.scales, i);
      const int64_t missing = (lost >> i & 1u) != 0 ? kLostId : kNoRow;
      values[i] = missing_values<uint2>(missing);
      scales[i] = missing_scale(missing);
      if (!has_chunk || from == nullptr) continue;
      values[i] = load_once(reinterpret_cast<const uint2*>(from) + chunk);
      scales[i] = load_once(scales_from + chunk * kRowChunkBytes / kScaleBlock);
    }

    // Convert and store
#pragma unroll
    for (int i = 0; i < kRowsInFlight; ++i) {
      const int64_t token = __shfl_sync(kWholeWarp, own.token, i);
      const int column = __shfl_sync(kWholeWarp, own.column, i);
      if (!has_chunk || (written >> i & 1u) == 0) continue;
      store_row_chunk<kForm>(args, token, column, chunk, values[i], scales[i], values_aligned);
    }
  }
}

}  // namespace engram
