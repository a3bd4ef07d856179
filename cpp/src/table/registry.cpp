// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdlib>
#include <set>

#include "copies.h"
#include "engram/error.h"
#include "engram/row.h"
#include "engram/table.h"
#include "table/bind.h"
#include "table/gpu_hot_rows.h"
#include "table/keeper.h"
#include "table/lane.h"
#include "table/log.h"
#include "table/points.h"
#include "table/record.h"
#include "table/seat.h"

namespace engram {
namespace {

//! Null where the environment binds nothing.
const char* environment_file() {
  const char* const path = std::getenv("TRTLLM_ENGRAM_TABLES");
  return path == nullptr || *path == '\0' ? nullptr : path;
}

}  // namespace

TableView Table::view(int device) const {
  if (disk_ != nullptr) return {};
  return from_first_row({.values = values_->on_device(device),
                         .scales = scales_->on_device(device),
                         .values_in_host = options_.placement == Placement::kHost,
                         .hot = hot_ ? hot_->on_device(device) : engram_hot_rows{},
                         .lanes = lanes_.get()});
}

TableView Table::host_view() const {
  if (disk_ != nullptr) return {};
  const TableView view = rows_on_host();
  ENGRAM_CHECK(view.values != nullptr && view.scales != nullptr, options_.store, " layer ",
               info_.layer, ": expected a table in host memory, found placement ",
               placement_name(options_.placement), " and scales ", placement_name(options_.scales));
  return view;
}

TableView Table::rows_on_host() const {
  TableView view{.values = values_->on_host(), .scales = scales_->on_host()};
  if (view.values != nullptr) view.values += row_offset(info_.first_row, info_.head_dim);
  if (view.scales != nullptr) {
    view.scales += row_offset(info_.first_row, scales_per_row(info_.head_dim));
  }
  return view;
}

TableView Table::from_first_row(TableView arrays) const {
  if (options_.placement != Placement::kDevice) {
    arrays.values += row_offset(info_.first_row, info_.head_dim);
  }
  if (options_.scales != Placement::kDevice) {
    arrays.scales += row_offset(info_.first_row, scales_per_row(info_.head_dim));
  }
  return arrays;
}

BindState& TableRegistry::state() {
  static constinit BindState state;  // there before any signal comes
  return state;
}

TableRegistry& TableRegistry::instance() {
  require_first_copy();
  // Never destroyed: engines that are torn down while the process exits still hold tables.
  static auto* const registry = new TableRegistry();
  return *registry;
}

void TableRegistry::bind(const Bindings& bindings) {
  const std::lock_guard loading(loading_mutex_);
  load(bindings, group_options(bindings.group), [&] { refuse_bound(bindings); });
}

void TableRegistry::refuse_bound(const Bindings& bindings) const {
  const std::lock_guard lock(mutex_);
  for (const auto& [name, options] : bindings.tables) {
    const auto found = tables_.find(name);
    ENGRAM_CHECK(found == tables_.end(), "table '", name,
                 "': expected a free name, found it bound to ", found->second->info().store,
                 " layer ", found->second->info().layer);
  }
}

void TableRegistry::load(const Bindings& bindings, const GroupOptions& group,
                         const std::function<void()>& check) {
  const std::optional<Error>& failure = bindings.failure;
  if (bindings.tables.empty() && !failure && group.size == 1) return;
  // The group's error comes once all ranks have.
  if (failure && group.size > 1) log(LogLevel::kError, failure->what());
  state().cancelled = false;
  state().progress.done = 0;
  const auto rest = [this] {
    state().progress.total = 0;
    state().progress.done = 0;
  };
  try {
    TablesByName loaded = bind_tables(bindings, group, state(), [&] {
      if (failure) throw *failure;
      check();
    });
    const std::lock_guard lock(mutex_);
    for (auto& [name, table] : loaded) tables_[name].swap(table);  // what it had is freed later
  } catch (...) {
    rest();
    throw;
  }
  rest();
}

void TableRegistry::serve(const Bindings& bindings, const std::string& name,
                          const std::string& socket) {
  state().stop_serving = false;
  if (bindings.failure) throw *bindings.failure;
  for (const auto& [table, options] : bindings.tables) {
    ENGRAM_CHECK(options.placement == Placement::kHost && options.scales == Placement::kHost &&
                     !options.keeper && options.memory != MemoryKind::kPrivate,
                 "table '", table,
                 "': expected placement host, scales with_rows and memory memfd, ",
                 "shm or cumem for a keeper, found others");
    ENGRAM_CHECK(options.hot_rows.empty() && options.hot_adaptive == 0, "table '", table,
                 "': ", options.hot_rows.empty() ? "hot_gib" : "hot_rows",
                 ": expected of who binds with memory keeper, found it of the keeper");
    ENGRAM_CHECK(options.numa.kind != NumaPolicy::kGpu, "table '", table,
                 "': numa: expected a policy of one copy for a keeper, which holds each table ",
                 "once for all GPUs, found gpu");
  }
  set_stop_role("keeper");
  Keeper keeper(name, socket);
  TablesByName served;
  const KeeperRole role(name, socket, keeper.id());  // ends before its tables are freed
  {
    const std::lock_guard loading(loading_mutex_);
    load(bindings, {.name = "keeper/" + name}, [&] { refuse_bound(bindings); });
    const std::lock_guard lock(mutex_);
    for (const auto& [table, options] : bindings.tables) served.emplace(table, tables_.at(table));
  }
  const auto free_names = [&] {
    const std::lock_guard lock(mutex_);
    for (const auto& [table, held] : served) tables_.erase(table);
  };
  try {
    // Clients map the memory too; those that must write to it do so to register it, no more.
    for (const auto& [table, held] : served) held->protect();
    keeper.run(served, state().stop_serving);
  } catch (...) {
    free_names();
    throw;
  }
  free_names();
}

void TableRegistry::unbind(const std::string& name) {
  free_left_lanes();
  std::shared_ptr<const Table> freed;  // after the lock: freeing takes time
  const std::lock_guard lock(mutex_);
  const auto found = tables_.find(name);
  ENGRAM_CHECK(found != tables_.end(), "table '", name, "': expected a bound name, found none");
  freed = found->second;
  tables_.erase(found);
}

std::shared_ptr<const Table> TableRegistry::find(const std::string& name) {
  const auto bound = [&]() -> std::shared_ptr<const Table> {
    const std::lock_guard lock(mutex_);
    const auto found = tables_.find(name);
    return found == tables_.end() ? nullptr : found->second;
  };
  if (auto table = bound()) return table;
  bind_environment(nullptr);
  return bound();
}

std::shared_ptr<const Table> TableRegistry::require(const std::string& name) {
  if (auto table = find(name)) return table;
  refuse_unbound(name, {});
}

void TableRegistry::refuse_unbound(const std::string& name, const Bindings& filed) const {
  std::set<std::string> known;
  for (const auto& [bound, table] : tables()) known.insert(bound);
  for (const auto& [there, options] : filed.tables) known.insert(there);
  std::string names;
  for (const std::string& one : known) names += (names.empty() ? "" : ", ") + one;
  const char* const path = environment_file();
  throw Error(ENGRAM_INVALID_ARGUMENT,
              concat("table '", name, "': expected a bound name, found ",
                     names.empty() ? "no tables" : names, "; ",
                     path == nullptr
                         ? "bind it through trtllm_engram.runtime.Tables or TRTLLM_ENGRAM_TABLES"
                         : concat("TRTLLM_ENGRAM_TABLES, ", path, ", does not name it")));
}

TablesByName TableRegistry::tables() const {
  const std::lock_guard lock(mutex_);
  return tables_;
}

void TableRegistry::acquire(const std::vector<std::string>& names) {
  bind_environment(&names);
  const std::lock_guard lock(mutex_);
  for (const std::string& name : names) ++num_acquired_[name];
}

void TableRegistry::release(const std::vector<std::string>& names) {
  free_left_lanes();
  TablesByName freed;  // after the lock: freeing takes time
  const std::lock_guard lock(mutex_);
  for (const std::string& name : names) {
    if (--num_acquired_[name] > 0) continue;
    num_acquired_.erase(name);
    if (is_filed(name)) freed.insert(tables_.extract(name));
  }
}

bool TableRegistry::is_filed(const std::string& name) const {
  const auto bound = tables_.find(name);
  const auto filed = filed_.find(name);
  return bound != tables_.end() && filed != filed_.end() &&
         filed->second.table.lock() == bound->second;
}

void TableRegistry::bind_environment(const std::vector<std::string>* names) {
  const char* const path = environment_file();
  if (path == nullptr && names == nullptr) return;
  const std::lock_guard environment(environment_mutex_);
  Bindings missing = path == nullptr ? Bindings{} : parse_tables_file(path);
  const std::lock_guard loading(loading_mutex_);
  if (names != nullptr && !missing.failure) {
    const TablesByName bound = tables();
    for (const std::string& name : *names) {
      if (!bound.contains(name) && !missing.tables.contains(name)) refuse_unbound(name, missing);
    }
    std::erase_if(missing.tables, [&](const auto& entry) {
      return std::find(names->begin(), names->end(), entry.first) == names->end();
    });
  }
  {
    const std::lock_guard lock(mutex_);
    std::erase_if(missing.tables, [&](const auto& entry) {
      const auto& [name, options] = entry;
      const auto filed = filed_.find(name);
      const bool changed = filed == filed_.end() || filed->second.options != options;
      // What the host bound itself, or binds meanwhile, comes first.
      if (tables_.contains(name)) return names == nullptr || !is_filed(name) || !changed;
      if (changed) return false;
      // It was unbound, but somebody uses it: no second copy.
      auto used = filed->second.table.lock();
      if (used != nullptr) tables_.emplace(name, std::move(used));
      return tables_.contains(name);
    });
  }
  if (missing.tables.empty() && !missing.failure) return;
  load(missing, group_options(missing.group), [] {});
  const std::lock_guard lock(mutex_);
  for (const auto& [name, options] : missing.tables) {
    filed_.insert_or_assign(name, Filed{options, tables_.at(name)});
  }
}

}  // namespace engram
