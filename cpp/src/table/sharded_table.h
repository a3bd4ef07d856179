// SPDX-License-Identifier: Apache-2.0
//! \file sharded_table.h
//! device_sharded: arrays as one address range on the GPU of every rank, their bytes spread over
//! the memory of all of those GPUs. Kernels read them like any other array.
//!
//!     const PeerGpus gpus(group, device);                    // collective, before anything else
//!     ShardedArray values(group, gpus, parts, "engram.1.values");                   // collective
//!     group.exchange("load", [&](Group::Work& work) { values.load(reader, ...); ... });
//!
//! Collective: every rank of the group calls it, in the same order and with equal arguments but for
//! `device`; the Error of one rank is thrown on all of them. After the last collective call nothing
//! here needs the other ranks: a rank that ends takes no memory from those that still map it.
//! In a build without CUDA all of it throws Error (ENGRAM_CUDA_UNAVAILABLE).
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "engram/table.h"
#include "table/parts.h"

namespace engram {

class Group;
class SourceReader;

//! The GPUs that the ranks of a group hold their parts on, each able to read the others' memory.
//! Ranks may share a GPU, and may see (CUDA_VISIBLE_DEVICES) no other GPU than their own.
class PeerGpus {
 public:
  //! Collective. `device` is this rank's GPU (an ordinal of this process). Refused: a rank with no
  //! such GPU or with a driver that shares no GPU memory by descriptors; a pair of GPUs of which
  //! one cannot read the other's memory, tried with a granule of each (the Error has both PCI bus
  //! ids). Whether they have room is asked before (check_room, limits.h).
  PeerGpus(Group& group, int device);

  int device() const { return device_; }

 private:
  int device_;
};

//! One array. Its end unmaps it here, and frees the memory that nobody else maps; the end of a
//! forked child's copy does nothing.
class ShardedArray final : public TableArray {
 public:
  //! Collective. Allocates this rank's part and maps all parts. `label` names the array in errors.
  ShardedArray(Group& group, const PeerGpus& gpus, Parts parts, std::string label);
  ~ShardedArray() override;

  //! Fills this rank's part; not collective, so that one exchange may fill many arrays. Other
  //! ranks' parts are there once that exchange is over.
  //! verify: checks every block that the part touches against the source's sums (a source by
  //! formula has none). add_bytes: what is done since the last call, in all the array's bytes in
  //! the part. Both functions may be empty.
  void load(const SourceReader& reader, bool verify, const std::function<bool()>& cancelled,
            const std::function<void(int64_t)>& add_bytes);

  //! Address for kernels of `device`, the rank's GPU or another of this process that can read all
  //! of the group's GPUs. Thread-safe; lives as long as this object.
  const uint8_t* on_device(int device) override;
  const uint8_t* on_host() override { return nullptr; }

  const Parts& parts() const;

 private:
  class Mapping;
  std::unique_ptr<Mapping> mapping_;
};

}  // namespace engram
