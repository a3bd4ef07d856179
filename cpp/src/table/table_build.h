// SPDX-License-Identifier: Apache-2.0
//! \file table_build.h
//! One table on its way through a bind call (bind.cpp), on one rank.
#pragma once

#include <array>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engram/table.h"
#include "table/device_table.h"
#include "table/disk_table.h"
#include "table/group.h"
#include "table/host_table.h"
#include "table/keeper.h"
#include "table/load.h"
#include "table/plan.h"
#include "table/seat.h"
#include "table/sharded_table.h"

namespace engram {

//! One of a table's two arrays; of the four kinds the placement's, once it is there.
struct ArrayBuild {
  std::string label;  //!< "engram_1.values"
  Placement placement = Placement::kHost;
  Source source;
  std::unique_ptr<HostArray> host;
  std::unique_ptr<DeviceArray> device;
  std::unique_ptr<ShardedArray> sharded;
  std::unique_ptr<DiskArray> disk;
  std::unique_ptr<SourceReader> reader;  //!< of a sharded array
  int64_t device_bytes = 0;              //!< of `device`, once a GPU has asked for it
};

//! What a store says of a table that is to be bound so. Throws Error, which names the table.
TableInfo read_info(const std::string& name, const TableOptions& options);

//! The rows of its file hot_rows, the most read first; none where it has no such file. Throws
//! Error, which names the table.
std::vector<int32_t> read_hot_ids(const std::string& name, const TableOptions& options,
                                  const TableInfo& info);

class TableBuild {
 public:
  TableBuild(std::string name, TableOptions options)
      : name_(std::move(name)), options_(std::move(options)) {}

  //! Reads the manifest. Throws Error; as all here, one that names the table.
  void read(const Seat& seat);
  TableVote vote(const Seat& seat) const;
  void set_plan(TablePlan plan) { plan_ = std::move(plan); }
  void set_kept(KeptTable kept) { kept_ = std::move(kept); }

  const std::string& name() const { return name_; }
  const TableOptions& options() const { return options_; }
  //! Of the whole table.
  const TableInfo& info() const { return info_; }
  std::array<ArrayBuild, 2>& arrays() { return arrays_; }
  //! Whether the ranks allocate and fill an array in host memory, no keeper.
  bool fills(const ArrayBuild& array) const {
    return array.placement == Placement::kHost && !options_.keeper;
  }
  //! Of the host arrays that the ranks fill.
  const Copy& copy(const Seat& seat) const { return plan_.copy_of(seat.rank); }
  std::vector<RoomRequest> room_requests(int num_ranks, BlocksDealt* dealt) const;
  //! Of GPU memory, that this rank is going to take.
  int64_t gpu_bytes(const Seat& seat) const;
  //! Bytes that all ranks together are going to load.
  int64_t bytes_to_load(int num_ranks) const;

  //! Allocates what this rank owns; adds descriptors for the others to `part`.
  void create(const Seat& seat, Group::Part* part);
  //! Of a device_sharded array.
  Parts parts_of(const ArrayBuild& array, int num_ranks) const;
  //! Maps what others own, or a keeper; `parts` are those of create(), by rank.
  void attach(const Seat& seat, std::vector<Group::Part>* parts);

  //! What this rank created is written to no more by who maps it from now on.
  void seal(const Seat& seat);

  //! The table; nothing is left here. huge_share: of the host memory, where it is filled.
  std::shared_ptr<const Table> finish(const Seat& seat, double huge_share, double load_seconds);

 private:
  HostMemoryOptions memory_options(const Seat& seat) const;
  //! Why this rank cannot have a kind of memory.
  std::string problem(MemoryKind kind, const Seat& seat) const;
  void attach_kept(const Seat& seat);
  //! Null but for placement disk.
  std::shared_ptr<DiskReader> make_reader() const;
  //! What hot rows in GPU memory take of the budget; nothing where the options want none.
  struct HotSizes {
    int64_t max_slots = 0;     //!< of the static part
    int64_t num_adaptive = 0;  //!< buckets
    int64_t num_bytes = 0;
  };
  HotSizes hot_sizes() const;
  //! Null where the options have neither hot_rows nor hot_adaptive.
  std::shared_ptr<GpuHotRows> make_hot_rows() const;

  std::string name_;
  TableOptions options_;
  TableInfo info_;
  std::vector<int32_t> hot_ids_;  //!< the most read first, of this rank's columns
  HeadSplit split_;               //!< this rank's columns: all, but for heads
  std::array<ArrayBuild, 2> arrays_;
  TablePlan plan_;
  std::optional<KeptTable> kept_;
};

}  // namespace engram
