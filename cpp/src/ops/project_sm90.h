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
constexpr int kStripRows = 16;     //!< outputs of a block's strip
constexpr int kStripTokens = 32;   //!< of a strip
constexpr int kMaxStages = 8;
constexpr int kBufferPitch = 48;  //!< bytes of 16 outputs of a token, moved off the same banks
constexpr int kSharedBytes = 227 * 1024;  //!< what a block of compute capability 9.0 may have
constexpr int kReservedBytes = 2048;      //!< barriers, and the way to the next 1024 bytes

//! kTokens x rows sums a block, in steps of kInner inner values, rows at most 64 a warpgroup.
template <int kTokens_, int kInner_, int kWarpgroups_, int kParts_>
struct Shape {
  static constexpr int kTokens = kTokens_;
  static constexpr int kInner = kInner_;
  static constexpr int kWeightColumns = kInner < 128 ? kInner : 128;  //!< of a box
  //! What the last round's tiles may be cut into, by tokens. 1: nothing.
  static constexpr int kParts = kParts_;
  static constexpr int kStepTokens = kTokens / kParts;  //!< tiles have a multiple of it
  static constexpr int kConsumerWarps = kWarpgroups_ * 4;
  static constexpr int kThreads = (kConsumerWarps + 4) * 32;
  //! Registers of a thread, together no more than the block starts with; loading needs few.
  static constexpr int kProducerRegisters = 24;
  static constexpr int kConsumerRegisters = kWarpgroups_ == 2 ? 240 : kWarpgroups_ == 3 ? 160 : 112;
  //! 128 sums and operands that take turns do not fit 160 registers (the compiler then lets no
  //! product run on): there one product of 16 inner values is made at a time, else two while the
  //! last two run on.
  static constexpr bool kIsTight = kTokens / 2 + 24 + 16 > kConsumerRegisters;
  static constexpr int kGroup = kIsTight ? 1 : 2;    //!< products that start together
  static constexpr int kPending = kIsTight ? 0 : 1;  //!< groups that run on
  static constexpr int kMaxRows = kWarpgroups_ * 64;
  //! Whether outputs that are too few for another round of tiles are left to strips.
  static constexpr bool kHasStrips = kWarpgroups_ == 3;
  //! Whether a block always has kMaxRows; else no more than make even rounds.
  static constexpr bool kIsFixed = kParts > 1 || kHasStrips;
  //! Tokens of a box of the copy engine: half the smallest tile's or strip's.
  static constexpr int kInputRows = (kHasStrips ? kStripTokens : kStepTokens) / kClusterBlocks;
  static constexpr int kBufferBytes = kConsumerWarps * 16 * kBufferPitch;

  __host__ __device__ static constexpr int stage_bytes(int rows) {
    return kInner * (rows + kTokens * 2);
  }
  __host__ __device__ static constexpr int num_stages(int rows) {
    const int most = (kSharedBytes - kReservedBytes - kBufferBytes) / stage_bytes(rows);
    return most < kMaxStages ? most : kMaxStages;
  }
  static_assert(num_stages(kMaxRows) > 1, "a stage is given back while the next is multiplied");
  //! Inner values of a strip's stage: a power of two, so that every 32nd scale begins one.
  static constexpr int kStripInner =
      stage_bytes(kMaxRows) < 512 * (kStripRows + kStripTokens * 2) ? 256 : 512;
};

struct Args {
  CUtensorMap weight;        //!< boxes of rows x kWeightColumns, in either layout
  CUtensorMap strip_weight;  //!< the same of kStripRows
  CUtensorMap x;             //!< boxes of kInputRows x kInputColumns
  const uint8_t* scale;
  uint16_t* out;
  int num_tokens;
  int in_features;
  int out_features;
  int rows;           //!< outputs of a block, a multiple of 16
  int num_row_tiles;  //!< of a cluster
  int num_token_tiles;
  int num_whole;  //!< pieces that are whole tiles; all others are parts of the tiles left
  int num_parts;  //!< of such a tile, each with as many tokens
  int num_pieces;
  int num_strips;        //!< of a cluster, for the outputs past the last row tile
  int num_token_strips;  //!< such strips of the same outputs
};

}  // namespace engram::sm90
