// SPDX-License-Identifier: Apache-2.0
// The C ABI of the table registry.
#include <cstring>

#include "check.h"
#include "engram/table.h"
#include "guard.h"
#include "nlohmann/json.hpp"
#include "table/bind.h"
#include "table/log.h"

using namespace engram;

namespace {

void fill(const TableView& view, const TableInfo& info, engram_lookup_args* args) {
  args->values = view.values;
  args->scales = view.scales;
  args->values_in_host = view.values_in_host ? 1 : 0;
  args->first_row = info.first_row;
  args->num_rows = info.num_rows;
  args->num_columns = info.num_columns;
  args->head_dim = info.head_dim;
}

nlohmann::ordered_json describe(const Table& table) {
  const TableInfo& info = table.info();
  const TableHistory& history = table.history();
  nlohmann::ordered_json about = {{"store", info.store},
                                  {"layer", info.layer},
                                  {"fingerprint", info.fingerprint},
                                  {"content_id", info.content_id},
                                  {"num_rows", info.num_rows},
                                  {"first_column", info.first_column},
                                  {"num_columns", info.num_columns},
                                  {"head_dim", info.head_dim},
                                  {"placement", placement_name(table.options().placement)},
                                  {"scales", placement_name(table.options().scales)},
                                  {"memory", nullptr},
                                  {"pages", nullptr},
                                  {"numa", nullptr},
                                  {"num_bytes", history.num_bytes},
                                  {"huge_bytes", nullptr},
                                  {"rank", history.rank},
                                  {"size", history.size},
                                  {"keeper", nullptr},
                                  {"since", history.since},
                                  {"load_seconds", history.load_seconds},
                                  {"registered_seconds", nullptr}};
  if (!history.keeper.empty()) about["keeper"] = history.keeper;
  double registered = 0;
  for (const TableArray* const array : {&table.values(), &table.scales()}) {
    const HostMemory* const memory = array->host_memory();
    if (memory == nullptr) continue;
    about["memory"] = memory_kind_name(memory->options().kind);
    about["pages"] = page_kind_name(table.options().pages);
    about["numa"] = numa_policy_name(table.options().numa);
    about["huge_bytes"] = history.huge_bytes;
    if (const auto seconds = array->registered_seconds()) {
      about["registered_seconds"] = registered += *seconds;
    }
  }
  return about;
}

}  // namespace

engram_status engram_table_bind(const char* toml, const char* folder, const char* where) {
  return guard([&] {
    check_array(toml, "toml");
    check_array(folder, "folder");
    check_array(where, "where");
    TableRegistry::instance().bind(parse_tables(toml, folder, where));
  });
}

engram_status engram_table_bind_file(const char* path) {
  return guard([&] {
    check_array(path, "path");
    TableRegistry::instance().bind(parse_tables_file(path));
  });
}

engram_status engram_table_check_file(const char* path) {
  return guard([&] {
    check_array(path, "path");
    check_tables(parse_tables_file(path));
  });
}

engram_status engram_table_progress(int64_t* done, int64_t* total) {
  return guard([&] {
    check_array(done, "done");
    check_array(total, "total");
    const Progress& progress = TableRegistry::state().progress;
    *total = progress.total.load();
    *done = progress.done.load();
  });
}

engram_status engram_table_cancel() {
  return guard([] { TableRegistry::state().cancelled = true; });
}

engram_status engram_table_unbind(const char* name) {
  return guard([&] {
    check_array(name, "name");
    TableRegistry::instance().unbind(name);
  });
}

engram_status engram_table_view(const char* name, int32_t device, engram_lookup_args* args) {
  return guard([&] {
    check_array(name, "name");
    check_array(args, "args");
    const auto table = TableRegistry::instance().require(name);
    fill(table->view(device), table->info(), args);
  });
}

engram_status engram_table_host_view(const char* name, engram_lookup_args* args) {
  return guard([&] {
    check_array(name, "name");
    check_array(args, "args");
    const auto table = TableRegistry::instance().require(name);
    fill(table->host_view(), table->info(), args);
  });
}

engram_status engram_table_describe(char* text, size_t capacity, size_t* size) {
  return guard([&] {
    check_array(size, "size");
    nlohmann::ordered_json tables = nlohmann::ordered_json::object();
    for (const auto& [name, table] : TableRegistry::instance().tables()) {
      tables[name] = describe(*table);
    }
    // Folders may hold bytes that are no UTF-8.
    const std::string json =
        tables.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
    *size = json.size() + 1;
    if (text != nullptr && *size <= capacity) std::memcpy(text, json.c_str(), *size);
  });
}

engram_status engram_tables_serve(const char* toml, const char* folder, const char* where,
                                  const char* name, const char* socket) {
  return guard([&] {
    check_array(toml, "toml");
    check_array(folder, "folder");
    check_array(where, "where");
    check_array(name, "name");
    check_array(socket, "socket");
    TableRegistry::instance().serve(parse_tables(toml, folder, where), name, socket);
  });
}

engram_status engram_tables_stop() {
  return guard([] { TableRegistry::state().stop_serving = true; });
}

engram_status engram_set_log(engram_log_function function) {
  return guard([&] { set_log(function); });
}
