// SPDX-License-Identifier: Apache-2.0
//! \file formula_cuda.h
//! formula.h on a GPU: tables are made, and checked, at the speed of its memory.
#pragma once

#include "table/formula.h"

#if ENGRAM_CUDA
#include <cuda_runtime_api.h>
#endif

namespace engram {

//! Sixteen bytes, lowest first.
struct FormulaChunk {
  uint64_t low;
  uint64_t high;
};

//! Where the bytes of a tensor are made from one of its bytes on. The same code serves kernels and
//! their test on the CPU.
struct FormulaPlace {
  FormulaWords words;  //!< word 0 holds the byte
  unsigned shift = 0;  //!< bits of that word before it

  ENGRAM_HOST_DEVICE FormulaPlace(const FormulaWords& tensor, int64_t byte)
      : words(tensor), shift(static_cast<unsigned>(byte & 7) * 8) {
    words.state += (static_cast<uint64_t>(byte) >> 3) * kFormulaStep;
  }

  ENGRAM_HOST_DEVICE void skip_words(uint64_t count) { words.state += count * kFormulaStep; }

  ENGRAM_HOST_DEVICE FormulaChunk chunk() const {
    const uint64_t first = formula_word(words, 0);
    const uint64_t second = formula_word(words, 1);
    if (shift == 0) return {first, second};
    const uint64_t third = formula_word(words, 2);
    const unsigned rest = 64 - shift;
    return {(first >> shift) | (second << rest), (second >> shift) | (third << rest)};
  }
};

//! Byte i of a chunk.
ENGRAM_HOST_DEVICE uint8_t byte_of(const FormulaChunk& chunk, int i) {
  return static_cast<uint8_t>((i < 8 ? chunk.low : chunk.high) >> (i % 8 * 8));
}

#if ENGRAM_CUDA
//! Writes bytes [begin, begin + num_bytes) of a tensor to memory of the current GPU, or memory that
//! it can write; `to` is aligned to 16 bytes. Enqueues one kernel.
cudaError_t fill_formula_cuda(const FormulaKey& key, int64_t begin, int64_t num_bytes, uint8_t* to,
                              cudaStream_t stream);

//! Adds to *num_wrong, in GPU memory, how many of the num_bytes bytes at `from` are not those of
//! the formula; `from` is aligned to 16 bytes. Enqueues one kernel.
cudaError_t check_formula_cuda(const FormulaKey& key, int64_t begin, int64_t num_bytes,
                               const uint8_t* from, unsigned long long* num_wrong,
                               cudaStream_t stream);
#endif

}  // namespace engram
