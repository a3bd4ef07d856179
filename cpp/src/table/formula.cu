// SPDX-License-Identifier: Apache-2.0
#include "ops/launch.cuh"
#include "table/formula_cuda.h"

namespace engram {
namespace {

constexpr int kThreads = 256;
constexpr int kChunkBytes = 16;
constexpr int kChunksPerThread = 8;  //!< enough work for a block to be worth its launch
constexpr int64_t kBytesPerBlock = int64_t{kThreads} * kChunksPerThread * kChunkBytes;
constexpr int64_t kMaxBlocks = INT32_MAX;

//! Calls visit(place, count, chunk) for each chunk of this thread: the formula's bytes at `place`,
//! of which the first `count` count (16 or, at the end, fewer). A warp's chunks lie side by side.
template <typename Visit>
__device__ void for_each_chunk(FormulaPlace at, int64_t num_bytes, const Visit& visit) {
  int64_t place = blockIdx.x * kBytesPerBlock + threadIdx.x * kChunkBytes;
  at.skip_words(static_cast<uint64_t>(place) / 8);
#pragma unroll
  for (int i = 0; i < kChunksPerThread && place < num_bytes; ++i) {
    visit(place, min(num_bytes - place, int64_t{kChunkBytes}), at.chunk());
    place += kThreads * kChunkBytes;
    at.skip_words(kThreads * kChunkBytes / 8);
  }
}

__global__ void __launch_bounds__(kThreads)
    fill_formula_kernel(FormulaPlace begin, int64_t num_bytes, uint8_t* to) {
  for_each_chunk(begin, num_bytes, [&](int64_t place, int64_t count, const FormulaChunk& chunk) {
    if (count == kChunkBytes) {
      __stcs(reinterpret_cast<ulonglong2*>(to + place), make_ulonglong2(chunk.low, chunk.high));
    } else {
      for (int i = 0; i < count; ++i) to[place + i] = byte_of(chunk, i);
    }
  });
}

//! Bytes in which two words differ.
__device__ int num_different(uint64_t a, uint64_t b) {
  uint64_t bits = a ^ b;
  bits |= bits >> 4;
  bits |= bits >> 2;
  bits |= bits >> 1;
  return __popcll(bits & 0x0101010101010101u);
}

__global__ void __launch_bounds__(kThreads)
    check_formula_kernel(FormulaPlace begin, int64_t num_bytes, const uint8_t* from,
                         unsigned long long* num_wrong) {
  int wrong = 0;
  for_each_chunk(begin, num_bytes, [&](int64_t place, int64_t count, const FormulaChunk& chunk) {
    if (count == kChunkBytes) {
      // NOTE: not through the read-only cache: another process may have written this memory.
      const ulonglong2 found = __ldcv(reinterpret_cast<const ulonglong2*>(from + place));
      wrong += num_different(found.x, chunk.low) + num_different(found.y, chunk.high);
    } else {
      for (int i = 0; i < count; ++i) wrong += from[place + i] != byte_of(chunk, i);
    }
  });
  if (wrong > 0) atomicAdd(num_wrong, static_cast<unsigned long long>(wrong));
}

template <typename Byte, typename... More>
cudaError_t launch_chunks(void (*kernel)(FormulaPlace, int64_t, Byte*, More...),
                          const FormulaKey& key, int64_t begin, int64_t num_bytes,
                          cudaStream_t stream, Byte* bytes, More... more) {
  const int64_t num_blocks = ceil_div(num_bytes, kBytesPerBlock);
  if (num_blocks == 0) return cudaSuccess;
  if (num_blocks > kMaxBlocks || !is_aligned(kChunkBytes, bytes)) return cudaErrorInvalidValue;
  return launch(kernel, dim3(static_cast<unsigned>(num_blocks)), dim3(kThreads), stream,
                FormulaPlace(formula_words(key), begin), num_bytes, bytes, more...);
}

}  // namespace

cudaError_t fill_formula_cuda(const FormulaKey& key, int64_t begin, int64_t num_bytes, uint8_t* to,
                              cudaStream_t stream) {
  return launch_chunks(fill_formula_kernel, key, begin, num_bytes, stream, to);
}

cudaError_t check_formula_cuda(const FormulaKey& key, int64_t begin, int64_t num_bytes,
                               const uint8_t* from, unsigned long long* num_wrong,
                               cudaStream_t stream) {
  return launch_chunks(check_formula_kernel, key, begin, num_bytes, stream, from, num_wrong);
}

}  // namespace engram
