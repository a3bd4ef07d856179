// SPDX-License-Identifier: Apache-2.0
// The C ABI of the table registry.
#include <cstring>

#include "check.h"
#include "engram/table.h"
#include "guard.h"
#include "nlohmann/json.hpp"

using namespace engram;

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
    const TableView view = table->view(device);
    args->values = view.values;
    args->scales = view.scales;
    args->first_row = 0;
    args->num_rows = table->info().num_rows;
    args->num_columns = table->info().num_columns;
    args->head_dim = table->info().head_dim;
  });
}

engram_status engram_table_describe(char* text, size_t capacity, size_t* size) {
  return guard([&] {
    check_array(size, "size");
    nlohmann::ordered_json tables = nlohmann::ordered_json::object();
    for (const auto& [name, table] : TableRegistry::instance().tables()) {
      const TableInfo& info = table->info();
      tables[name] = {{"store", info.store},
                      {"layer", info.layer},
                      {"fingerprint", info.fingerprint},
                      {"content_id", info.content_id},
                      {"num_rows", info.num_rows},
                      {"num_columns", info.num_columns},
                      {"head_dim", info.head_dim},
                      {"placement", placement_name(table->options().placement)},
                      {"scales", placement_name(table->options().scales)}};
    }
    // Folders may hold bytes that are no UTF-8.
    const std::string json =
        tables.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
    *size = json.size() + 1;
    if (text != nullptr && *size <= capacity) std::memcpy(text, json.c_str(), *size);
  });
}
