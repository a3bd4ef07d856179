// SPDX-License-Identifier: Apache-2.0
#include <cstdlib>

#include "copies.h"
#include "engram/error.h"
#include "engram/table.h"
#include "table/arrays.h"

namespace engram {

const char* placement_name(Placement placement) {
  return placement == Placement::kHost ? "host" : "device";
}

Table::Table(const TableOptions& options)
    : options_(options), info_(read_table_info(options.store, options.layer, options.checkpoint)) {
  ENGRAM_CHECK(options.expect_content.empty() || options.expect_content == info_.content_id,
               options.store, ": expected tables with content id ", options.expect_content,
               ", found ", info_.content_id);
  values_ = load_array(info_.values, options.placement);
  scales_ = load_array(info_.scales, options.scales);
}

TableView Table::view(int device) const {
  return {values_->on_device(device), scales_->on_device(device)};
}

TableView Table::host_view() const {
  const TableView view{values_->on_host(), scales_->on_host()};
  ENGRAM_CHECK(view.values != nullptr && view.scales != nullptr, options_.store, " layer ",
               info_.layer, ": expected a table in host memory, found placement ",
               placement_name(options_.placement), " and scales ", placement_name(options_.scales));
  return view;
}

TableRegistry& TableRegistry::instance() {
  require_first_copy();
  // Never destroyed: engines that are torn down while the process exits still hold tables.
  static auto* const registry = new TableRegistry();
  return *registry;
}

void TableRegistry::bind(const std::map<std::string, TableOptions>& tables) {
  const std::lock_guard loading(loading_mutex_);
  const auto refuse_bound = [this](const std::string& name) {
    ENGRAM_CHECK(tables_.find(name) == tables_.end(), "table '", name,
                 "': expected a free name, found it bound to ", tables_.at(name)->info().store,
                 " layer ", tables_.at(name)->info().layer);
  };
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [name, options] : tables) refuse_bound(name);
  }
  load(tables);
}

void TableRegistry::load(const std::map<std::string, TableOptions>& tables) {
  std::map<std::string, std::shared_ptr<const Table>> loaded;
  for (const auto& [name, options] : tables) {
    try {
      loaded.emplace(name, std::make_shared<const Table>(options));
    } catch (const Error& error) {
      throw Error(error.status(), concat("table '", name, "': ", error.what()));
    }
  }
  const std::lock_guard lock(mutex_);
  tables_.merge(loaded);
}

void TableRegistry::unbind(const std::string& name) {
  std::shared_ptr<const Table> freed;  // after the lock: freeing takes time
  const std::lock_guard lock(mutex_);
  const auto found = tables_.find(name);
  ENGRAM_CHECK(found != tables_.end(), "table '", name, "': expected a bound name, found none");
  freed = found->second;
  tables_.erase(found);
}

std::shared_ptr<const Table> TableRegistry::find(const std::string& name) {
  bind_environment();
  const std::lock_guard lock(mutex_);
  const auto found = tables_.find(name);
  return found == tables_.end() ? nullptr : found->second;
}

std::shared_ptr<const Table> TableRegistry::require(const std::string& name) {
  if (auto table = find(name)) return table;
  std::string names;
  for (const auto& [bound, table] : tables()) names += (names.empty() ? "" : ", ") + bound;
  throw Error(
      ENGRAM_INVALID_ARGUMENT,
      concat("table '", name, "': expected a bound name, found ",
             names.empty()
                 ? "no tables; bind it through trtllm_engram.runtime.Tables or TRTLLM_ENGRAM_TABLES"
                 : names));
}

std::map<std::string, std::shared_ptr<const Table>> TableRegistry::tables() const {
  const std::lock_guard lock(mutex_);
  return tables_;
}

void TableRegistry::bind_environment() {
  const std::lock_guard environment(environment_mutex_);
  if (environment_bound_) return;
  const char* const path = std::getenv("TRTLLM_ENGRAM_TABLES");
  if (path != nullptr && *path != '\0') {
    std::map<std::string, TableOptions> missing = parse_tables_file(path);
    const std::lock_guard loading(loading_mutex_);
    // What the host bound itself, or binds meanwhile, comes first.
    for (const auto& [name, table] : tables()) missing.erase(name);
    load(missing);
  }
  environment_bound_ = true;
}

}  // namespace engram
