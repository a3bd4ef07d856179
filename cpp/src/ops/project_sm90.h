// SPDX-License-Identifier: Apache-2.0
//! \file project_sm90.h
//! Shapes and arguments of project_sm90.cuh's kernel.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace engram::sm90 {

constexpr int kClusterBlocks = 2;
constexpr int kInputColumns = 64;  //!< inner values in a 128-byte row of inputs
constexpr int kTileGroup = 8;      //!< token tiles that run side by side
constexpr int kMaxStages = 8;
constexpr int kBufferPitch = 48;  //!< bytes of 16 outputs of a token, moved off the same banks

//! kTokens x rows sums a block, in steps of kInner inner values, rows at most 64 a warpgroup.
template <int kTokens_, int kInner_, int kWarpgroups_, int kParts_>
struct Shape {
  static constexpr int kTokens = kTokens_;
  static constexpr int kInner = kInner_;
  static constexpr int kWeightColumns = kInner < 128 ? kInner : 128;  //!< of a box
  //! What the last round's tiles may be cut into, by tokens. 1: nothing, and tiles have no more
  //! rows than make even rounds.
  static constexpr int kParts = kParts_;
  static constexpr int kConsumerWarps = kWarpgroups_ * 4;
  static constexpr int kThreads = (kConsumerWarps + 4) * 32;
  //! Registers of a thread, together no more than the block starts with; loading needs few.
  static constexpr int kProducerRegisters = 24;
  static constexpr int kConsumerRegisters = kWarpgroups_ == 2 ? 240 : 112;
  static constexpr int kMaxRows = kWarpgroups_ * 64;
  //! Tokens of a box of the copy engine: half the smallest tile's.
  static constexpr int kInputRows = kTokens / kParts / kClusterBlocks;
};

struct Args {
  CUtensorMap weight;  //!< boxes of rows x kWeightColumns, in either layout
  CUtensorMap x;       //!< boxes of kInputRows x kInputColumns
  const uint8_t* scale;
  uint16_t* out;
  int num_tokens;
  int in_features;
  int out_features;
  int rows;  //!< outputs of a block, a multiple of 16
  int num_stages;
  int num_row_tiles;  //!< of a cluster
  int num_token_tiles;
  int num_whole;  //!< pieces that are whole tiles; all others are parts of the tiles left
  int num_parts;  //!< of such a tile, each with as many tokens
  int num_pieces;

  template <typename S>
#if defined(__CUDACC__)
  __host__ __device__
#endif
      int stage_bytes() const {
    return rows * S::kInner + S::kTokens * S::kInner * 2;
  }
};

}  // namespace engram::sm90
