// SPDX-License-Identifier: Apache-2.0
//! \file table.h
//! Named tables: one registry a process. Plans hold names; here names get rows to read.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "engram/table_options.h"

namespace engram {

//! A byte range of a file.
struct FileRange {
  std::string file;
  int64_t offset = 0;
  int64_t num_bytes = 0;
  std::vector<std::string> block_sums = {};  //!< XXH3-128 of each 64 MiB, in hex; may be empty
};

//! What a store says about one layer's table; bound with heads = true, of this rank's columns.
struct TableInfo {
  std::string store;
  std::string fingerprint;   //!< of the layout: 64 hex digits
  std::string content_id;    //!< of the bytes of all layers
  int32_t layer = 0;         //!< the model's number of the layer
  int32_t layer_idx = 0;     //!< its place among the layout's layers
  int32_t num_layers = 0;    //!< L
  int32_t first_column = 0;  //!< of hash ids' columns, the first that is read here
  int32_t num_columns = 0;   //!< C
  int32_t num_heads = 0;     //!< H: columns of an n-gram order, counted over all ranks' columns
  int32_t head_dim = 0;      //!< D
  int64_t first_row = 0;     //!< row id of values[0]
  int64_t num_rows = 0;
  std::vector<int64_t> column_rows;  //!< [C], their sum is num_rows
  FileRange values;                  //!< FP8 [rows of all columns, D]
  FileRange scales;                  //!< E8M0 [rows of all columns, D/32]
};

class Lanes;

//! What a lookup on one device reads: the rows from info().first_row on.
struct TableView {
  const uint8_t* values = nullptr;
  const uint8_t* scales = nullptr;
  bool values_in_host = false;  //!< a GPU reads them over PCIe
  engram_hot_rows hot = {};     //!< rows of these that the GPU's memory holds too
  Lanes* lanes = nullptr;       //!< by which CPUs may bring rows of these to the GPU
};

class DiskReader;
class GpuHotRows;
class HostMemory;

//! The memory of one array of a table, or its file; freed with this object.
class TableArray {
 public:
  virtual ~TableArray() = default;
  //! Address for kernels of `device`; loads or registers what is not there yet; null where the
  //! array is on disk. Throws Error.
  virtual const uint8_t* on_device(int device) = 0;
  //! Address for this CPU; null where the memory is a GPU's, or the array is on disk.
  virtual const uint8_t* on_host() = 0;
  //! Forbids this process to write to it where that is host memory. Throws Error.
  virtual void protect() {}
  //! Null where it is not in host memory.
  virtual const HostMemory* host_memory() const { return nullptr; }
  //! How long a GPU's registration of host memory took; none: there was none.
  virtual std::optional<double> registered_seconds() const { return std::nullopt; }
};

//! How a table came to be where it is, for reports.
struct TableHistory {
  int32_t rank = 0;  //!< in the group
  int32_t size = 1;
  std::string keeper;     //!< name of the process that holds the memory; empty: the
                          //!< ranks do
  int64_t num_bytes = 0;  //!< that this process's part of the arrays takes
  double since = 0;       //!< seconds since 1970
  double load_seconds = 0;
  int64_t huge_bytes = 0;  //!< of the host memory, on pages of 2 MiB
};

//! Arrays under what a store says of them.
class Table {
 public:
  //! `held` is freed after the arrays; `disk` and `hot`, which read them, before, and `lanes`, by
  //! which CPUs bring rows to GPUs, first.
  Table(TableOptions options, TableInfo info, TableHistory history,
        std::unique_ptr<TableArray> values, std::unique_ptr<TableArray> scales,
        std::shared_ptr<void> held, std::shared_ptr<DiskReader> disk = nullptr,
        std::shared_ptr<GpuHotRows> hot = nullptr, std::shared_ptr<Lanes> lanes = nullptr)
      : options_(std::move(options)),
        info_(std::move(info)),
        history_(std::move(history)),
        held_(std::move(held)),
        values_(std::move(values)),
        scales_(std::move(scales)),
        disk_(std::move(disk)),
        hot_(std::move(hot)),
        lanes_(std::move(lanes)) {}

  const TableInfo& info() const { return info_; }
  const TableOptions& options() const { return options_; }
  const TableHistory& history() const { return history_; }
  const TableArray& values() const { return *values_; }
  const TableArray& scales() const { return *scales_; }
  //! Thread-safe; the pointers live as long as this object. Empty for placement disk, whose rows
  //! come through lanes.
  TableView view(int device) const;
  //! For this CPU. Throws Error where the arrays are not in host memory, nor on disk: then the view
  //! is empty, and disk() reads.
  TableView host_view() const;
  //! The same, null where an array is not in host memory.
  TableView rows_on_host() const;
  //! Null but for placement disk.
  DiskReader* disk() const { return disk_.get(); }
  //! Null where GPUs read all rows themselves.
  Lanes* lanes() const { return lanes_.get(); }
  //! For tables that are filled. Throws Error.
  void protect() const {
    values_->protect();
    scales_->protect();
  }
  //! Null unless the options have hot_rows or hot_adaptive.
  const GpuHotRows* hot() const { return hot_.get(); }

 private:
  //! That of arrays: GPU copies hold this rank's rows, other arrays all rows.
  TableView from_first_row(TableView arrays) const;

  TableOptions options_;
  TableInfo info_;
  TableHistory history_;
  std::shared_ptr<void> held_;
  std::unique_ptr<TableArray> values_;
  std::unique_ptr<TableArray> scales_;
  std::shared_ptr<DiskReader> disk_;
  std::shared_ptr<GpuHotRows> hot_;
  std::shared_ptr<Lanes> lanes_;
};

using TablesByName = std::map<std::string, std::shared_ptr<const Table>>;

struct BindState;
struct GroupOptions;

//! All functions are thread-safe. A table that is in use outlives its name.
class TableRegistry {
 public:
  static TableRegistry& instance();

  //! Binds all names or, on any Error, none; a bound name is refused. All ranks of the group do so
  //! together.
  void bind(const Bindings& bindings);
  //! Binds like one process alone, and hands the tables to who attaches to this keeper, until
  //! state().stop_serving; then unbinds them. `socket`: path to listen at; empty: an abstract name.
  void serve(const Bindings& bindings, const std::string& name, const std::string& socket);
  void unbind(const std::string& name);
  //! Null where nothing has the name. If nothing has it yet, binds those tables of the file
  //! $TRTLLM_ENGRAM_TABLES first that are not bound: the file may have been mended since.
  std::shared_ptr<const Table> find(const std::string& name);
  //! The same, but throws Error, naming what was looked for and what there is.
  std::shared_ptr<const Table> require(const std::string& name);
  //! Binds these names as that file has them now, all or none, for who ends by releasing them. One
  //! whose entry has changed since it was bound is bound anew: who uses the old table keeps it.
  void acquire(const std::vector<std::string>& names);
  //! Unbinds those that the file has bound, once as many have released as had acquired.
  void release(const std::vector<std::string>& names);
  //! Of the bind call that runs, if any.
  static BindState& state();
  //! Names and their tables now.
  TablesByName tables() const;

 private:
  TableRegistry() = default;
  //! What a name was last bound to by the environment's file.
  struct Filed {
    TableOptions options;
    std::weak_ptr<const Table> table;
  };

  void refuse_bound(const Bindings& bindings) const;
  //! Adds names, or replaces their tables, by who holds loading_mutex_; `check` as in bind_tables.
  void load(const Bindings& bindings, const GroupOptions& group,
            const std::function<void()>& check);
  //! All names of the file that are not bound; or of `names` also those that have changed there.
  void bind_environment(const std::vector<std::string>* names);
  //! Whether the name has the file's table, by who holds mutex_.
  bool is_filed(const std::string& name) const;
  [[noreturn]] void refuse_unbound(const std::string& name, const Bindings& filed) const;

  mutable std::mutex mutex_;
  //! Held while tables load, which takes minutes; other names are found meanwhile.
  std::mutex loading_mutex_;
  //! Held while the environment's tables load: who looks for a name waits for them.
  std::mutex environment_mutex_;
  TablesByName tables_;
  std::map<std::string, Filed> filed_;
  std::map<std::string, int64_t> num_acquired_;
};

//! The tables of a TOML text; relative paths are relative to `folder`, `place` names the text in
//! errors, where it is not empty. Whatever is wrong is the Bindings' failure, beside as much of
//! [group] as can be read.
Bindings parse_tables(const std::string& text, const std::string& folder, const std::string& place);

//! The tables of a TOML file, which nobody but its owner (this user or root) may be able to write;
//! else that is the failure, of a rank of the launcher's group.
Bindings parse_tables_file(const std::string& path);

//! What STORE/engram.json says about a layer; `checkpoint` as in TableOptions. Unless the table's
//! files are needed, nobody looks whether they are there, and block_sums are left out.
TableInfo read_table_info(const std::string& store, int32_t layer, const std::string& checkpoint,
                          bool needs_files = true);

}  // namespace engram
