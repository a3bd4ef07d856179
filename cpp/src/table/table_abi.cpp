// SPDX-License-Identifier: Apache-2.0
// The C ABI of the table registry.
#include <cstring>

#include "check.h"
#include "cuda_support.h"
#include "engram/ops.h"
#include "engram/table.h"
#include "fault.h"
#include "guard.h"
#include "nlohmann/json.hpp"
#include "ops/lookup_disk.h"
#include "table/bind.h"
#include "table/disk_reader.h"
#include "table/gpu_hot_rows.h"
#include "table/lane.h"
#include "table/launcher.h"
#include "table/log.h"
#include "table/record.h"

using namespace engram;

namespace {

//! A JSON text for C, as far as there is room for all of it.
template <typename Json>
void hand_out(const Json& json, char* text, size_t capacity, size_t* size) {
  // Folders may hold bytes that are no UTF-8.
  const std::string dumped = json.dump(-1, ' ', false, Json::error_handler_t::replace);
  *size = dumped.size() + 1;
  if (text != nullptr && *size <= capacity) std::memcpy(text, dumped.c_str(), *size);
}

void fill(const TableView& view, const TableInfo& info, engram_lookup_args* args) {
  args->values = view.values;
  args->scales = view.scales;
  args->values_in_host = view.values_in_host ? 1 : 0;
  args->hot = view.hot;
  args->lanes = view.lanes;
  args->first_row = info.first_row;
  args->num_rows = info.num_rows;
  args->num_columns = info.num_columns;
  args->head_dim = info.head_dim;
}

nlohmann::ordered_json describe_hot(const GpuHotRows& hot, const TableInfo& info) {
  nlohmann::ordered_json asked = nlohmann::ordered_json::object();
  nlohmann::ordered_json found = nlohmann::ordered_json::object();
  nlohmann::ordered_json adaptive = nlohmann::ordered_json::object();
  const std::vector<HotCounts> counts = hot.counts();
  for (size_t i = 0; i < counts.size(); ++i) {
    const int order = 2 + (info.first_column + static_cast<int>(i)) / info.num_heads;
    const std::string key = std::to_string(order);
    asked[key] = asked.value(key, uint64_t{0}) + counts[i].num_asked;
    found[key] = found.value(key, uint64_t{0}) + counts[i].num_found;
    adaptive[key] = adaptive.value(key, uint64_t{0}) + counts[i].num_adaptive;
  }
  return {{"num_rows", hot.num_rows()},
          {"capacity", hot.capacity()},
          {"adaptive_capacity", hot.adaptive_capacity()},
          {"num_bytes", hot.num_bytes()},
          {"asked", asked},
          {"found", found},
          {"adaptive_found", adaptive}};
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
                                  {"registered_seconds", nullptr},
                                  {"disk", nullptr},
                                  {"hot", nullptr}};
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
  if (const DiskReader* const disk = table.disk()) {
    const DiskCounts counts = disk->counts();
    about["disk"] = {{"reads_by", disk->queue_kind()},
                     {"hot_bytes", disk->hot_rows().num_bytes()},
                     {"hot_capacity", disk->hot_rows().capacity()},
                     {"hot_rows", counts.hot_rows},
                     {"disk_rows", counts.disk_rows},
                     {"num_reads", counts.num_reads}};
  }
  if (const GpuHotRows* const hot = table.hot()) about["hot"] = describe_hot(*hot, info);
  return about;
}

void throw_fault(const std::string& name, const Table& table) {
  if (table.disk() == nullptr) return;
  if (const auto fault = table.disk()->take_fault()) {
#if ENGRAM_CUDA
    forget_fault(pack_fault(FaultCode::kUnreadRows, table.info().layer, 0));
#endif
    throw Error(
        ENGRAM_DEVICE_FAULT,
        concat("table '", name, "': rows of an earlier lookup could not be read: ", *fault));
  }
}

void lookup_on_gpu(const std::shared_ptr<const Table>& table,
                   [[maybe_unused]] const engram_lookup_args& args, const engram_exec& exec) {
  ENGRAM_CHECK(table->disk() != nullptr,
               "device: expected -1 for a table in memory, whose rows engram_lookup reads where "
               "engram_table_view says, found ",
               exec.device);
  require_cuda(exec.device);
#if ENGRAM_CUDA
  throw_pending_fault(exec.device);
  if (args.num_tokens == 0) return;
  table->lanes()->lookup(args, exec.device, static_cast<cudaStream_t>(exec.stream));
#endif
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

engram_status engram_table_decline(const char* toml, const char* folder, const char* where,
                                   const char* reason) {
  return guard([&] {
    check_array(toml, "toml");
    check_array(folder, "folder");
    check_array(where, "where");
    check_array(reason, "reason");
    TableRegistry::instance().bind({.tables = {},
                                    .group = parse_tables(toml, folder, where).group,
                                    .failure = Error(ENGRAM_INVALID_ARGUMENT, reason)});
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

engram_status engram_table_lookup(const char* name, const engram_lookup_args* args,
                                  const engram_exec* exec) {
  return guard([&] {
    check_array(name, "name");
    check_array(args, "args");
    check_array(exec, "exec");
    check_range(exec->device, "device", -1, INT32_MAX);
    check_at_least(exec->num_threads, "num_threads", 0);
    const auto table = TableRegistry::instance().require(name);
    throw_fault(name, *table);
    const bool on_gpu = exec->device >= 0;
    engram_lookup_args call = *args;
    fill(on_gpu ? TableView{} : table->host_view(), table->info(), &call);
    call.num_columns = args->num_columns;
    check_range(args->head_dim, "head_dim", call.head_dim, call.head_dim);
    check_lookup_call(call);
    if (on_gpu) return lookup_on_gpu(table, call, *exec);
    if (call.num_tokens == 0) return;
    if (table->disk() != nullptr) {
      lookup_disk(*table->disk(), call, exec->num_threads);
    } else {
      lookup_cpu(call, exec->num_threads);
    }
  });
}

engram_status engram_table_fault(const char* name) {
  return guard([&] {
    check_array(name, "name");
    throw_fault(name, *TableRegistry::instance().require(name));
  });
}

engram_status engram_table_describe(char* text, size_t capacity, size_t* size) {
  return guard([&] {
    check_array(size, "size");
    nlohmann::ordered_json tables = nlohmann::ordered_json::object();
    for (const auto& [name, table] : TableRegistry::instance().tables()) {
      tables[name] = describe(*table);
    }
    hand_out(tables, text, capacity, size);
  });
}

engram_status engram_table_holders(int32_t pid, char* text, size_t capacity, size_t* size) {
  return guard([&] {
    check_array(size, "size");
    hand_out(read_records(pid), text, capacity, size);
  });
}

engram_status engram_launcher_rank(int32_t* rank) {
  return guard([&] {
    check_array(rank, "rank");
    *rank = launcher_group().rank;
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
