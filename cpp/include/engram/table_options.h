// SPDX-License-Identifier: Apache-2.0
//! \file table_options.h
//! What a bind call is told: the keys of the TOML form.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>

#include "engram/error.h"
#include "table/host_memory.h"

namespace engram {

//! Where an array lies.
enum class Placement {
  kHost,           //!< host memory, once for the node's ranks; every GPU reads it in
                   //!< place
  kDevice,         //!< a copy in the memory of each GPU that asks for it
  kDeviceSharded,  //!< each rank's GPU holds a part, all ranks read all parts
  kDisk,           //!< nowhere: rows are read from the store's files as they are asked for
};

//! "host", "device", "device_sharded" or "disk".
const char* placement_name(Placement placement);

//! [tables.NAME]
struct TableOptions {
  std::string store;       //!< folder with engram.json
  std::string checkpoint;  //!< where the checkpoint lies now; empty: where the
                           //!< store says
  int32_t layer = 0;
  Placement placement = Placement::kHost;
  Placement scales = Placement::kHost;
  //! Kind of host memory; none: kMemfd, or kShm where a rank cannot have that.
  std::optional<MemoryKind> memory;
  bool keeper = false;  //!< host memory is what a keeper holds
  bool heads = false;   //!< a rank's table is its columns alone (parts.h, HeadSplit)
  //! GiB for rows that lie a step nearer than the others: of kDisk RAM, for those read before; of
  //! kHost the memory of each GPU, for those of the file hot_rows and those read before.
  double hot_gib = 1;
  std::string hot_rows;     //!< which rows texts read most (hot_file.h); empty: no file
  double hot_adaptive = 0;  //!< of kHost, the share of hot_gib for rows that were read before
  //! Of kHost: CPU threads that gather rows for GPUs, 0: none; none: as num_gather_threads says.
  std::optional<int32_t> gather_threads;
  PageKind pages = PageKind::kAuto;
  NumaPolicy numa;
  bool verify = false;                   //!< compare what is loaded with the store's sums
  std::optional<uint64_t> formula_seed;  //!< fill by builder/formula.py's formula, read no file
  std::string expect_content;            //!< refuse another content_id; empty: take any

  bool operator==(const TableOptions&) const = default;
};

//! [group]: what is not there is as the launcher's variables say (launcher.h), else one rank.
struct GroupSettings {
  std::string name;
  std::optional<int32_t> rank;  //!< with size or not at all
  std::optional<int32_t> size;
  std::string socket;  //!< path
  std::optional<double> timeout_s;
  std::optional<int64_t> assume_ram;  //!< bytes
  std::string keeper;                 //!< name, or path of its socket; empty: any of this user
                                      //!< that has the table
};

struct Bindings {
  std::map<std::string, TableOptions> tables;
  GroupSettings group;
  //! Why this rank binds nothing; no tables are there then. Who binds them tells the group, which
  //! would wait for this rank, and throws it.
  std::optional<Error> failure;
};

}  // namespace engram
