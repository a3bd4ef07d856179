// SPDX-License-Identifier: Apache-2.0
//! \file table.h
//! Named tables: one registry a process. Plans hold names; here names get rows to read.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace engram {

//! Where an array lies.
enum class Placement {
  kHost,    //!< host memory, once for the process; pinned, so that every GPU reads it in place
  kDevice,  //!< a copy in the memory of each GPU that asks for it
};

//! "host" or "device".
const char* placement_name(Placement placement);

//! A byte range of a file.
struct FileRange {
  std::string file;
  int64_t offset = 0;
  int64_t num_bytes = 0;
  std::vector<std::string> block_sums = {};  //!< XXH3-128 of each 64 MiB, in hex; may be empty
};

//! What a store says about one layer's table.
struct TableInfo {
  std::string store;
  std::string fingerprint;  //!< of the layout: 64 hex digits
  std::string content_id;   //!< of the bytes of all layers
  int32_t layer = 0;        //!< the model's number of the layer
  int32_t num_columns = 0;  //!< C
  int32_t head_dim = 0;     //!< D
  int64_t num_rows = 0;
  std::vector<int64_t> column_rows;  //!< [C], their sum is num_rows
  FileRange values;  //!< FP8 [num_rows, D]
  FileRange scales;  //!< E8M0 [num_rows, D/32]
};

//! How to bind a table: the keys of a TOML table.
struct TableOptions {
  std::string store;       //!< folder with engram.json
  std::string checkpoint;  //!< where the checkpoint lies now; empty: where the store says
  int32_t layer = 0;
  Placement placement = Placement::kHost;
  Placement scales = Placement::kHost;
  std::string expect_content;  //!< refuse another content_id; empty: take any
};

//! What a lookup on one device reads.
struct TableView {
  const uint8_t* values = nullptr;
  const uint8_t* scales = nullptr;
};

//! Memory that is filled from a file once, and freed with this object.
class TableArray {
 public:
  virtual ~TableArray() = default;
  //! Address for kernels of `device`; loads what is not there yet. Throws Error.
  virtual const uint8_t* on_device(int device) = 0;
  //! Address for this CPU; null where the memory is a GPU's.
  virtual const uint8_t* on_host() = 0;
};

//! What a bind call that runs says to other threads, and is told by them.
struct LoadProgress {
  std::atomic<int64_t> done{0};  //!< bytes, over all ranks
  std::atomic<int64_t> total{0};
  std::atomic<bool> cancelled{false};
};

class Table {
 public:
  //! Reads the store's manifest and, in host memory, the rows. Throws Error.
  explicit Table(const TableOptions& options);

  const TableInfo& info() const { return info_; }
  const TableOptions& options() const { return options_; }
  //! Thread-safe; the pointers live as long as this object.
  TableView view(int device) const;
  //! For this CPU. Throws Error where the arrays are not in host memory.
  TableView host_view() const;

 private:
  TableOptions options_;
  TableInfo info_;
  std::unique_ptr<TableArray> values_;
  std::unique_ptr<TableArray> scales_;
};

//! All functions are thread-safe. A table that is in use outlives its name.
class TableRegistry {
 public:
  static TableRegistry& instance();

  //! Binds all names or, on any Error, none; a bound name is refused.
  void bind(const std::map<std::string, TableOptions>& tables);
  void unbind(const std::string& name);
  //! Null where nothing has the name. Binds the tables of $TRTLLM_ENGRAM_TABLES first, once.
  std::shared_ptr<const Table> find(const std::string& name);
  //! The same, but throws Error, naming what was looked for and what there is.
  std::shared_ptr<const Table> require(const std::string& name);
  //! Of the bind call that runs, if any.
  LoadProgress& progress() { return progress_; }
  //! Names and their tables now.
  std::map<std::string, std::shared_ptr<const Table>> tables() const;

 private:
  //! Adds names that nothing has, by who holds loading_mutex_.
  void load(const std::map<std::string, TableOptions>& tables);
  void bind_environment();

  LoadProgress progress_;
  mutable std::mutex mutex_;
  //! Held while tables load, which takes minutes; other names are found meanwhile.
  std::mutex loading_mutex_;
  //! Held while the environment's tables load: who looks for a name waits for them.
  std::mutex environment_mutex_;
  bool environment_bound_ = false;
  std::map<std::string, std::shared_ptr<const Table>> tables_;
};

//! The tables of a TOML text; relative paths are relative to `folder`, `where` names the text in
//! errors.
std::map<std::string, TableOptions> parse_tables(const std::string& text, const std::string& folder,
                                                 const std::string& where);

//! The tables of a TOML file, which nobody but its owner (this user or root) may be able to write.
std::map<std::string, TableOptions> parse_tables_file(const std::string& path);

//! What STORE/engram.json says about a layer; `checkpoint` as in TableOptions.
TableInfo read_table_info(const std::string& store, int32_t layer, const std::string& checkpoint);

}  // namespace engram
