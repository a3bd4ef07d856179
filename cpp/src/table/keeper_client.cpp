// SPDX-License-Identifier: Apache-2.0
// How tables are had from keepers.
#include <poll.h>
#include <unistd.h>

#include <chrono>

#include "engram/error.h"
#include "table/keeper.h"
#include "table/keeper_protocol.h"
#include "table/points.h"
#include "table/record.h"

namespace engram {
namespace {

using nlohmann::json;

constexpr int kPollMs = 100;

using Wanted = std::map<std::string, TableInfo>;

[[noreturn]] void refuse(const std::string& text) { throw Error(ENGRAM_INVALID_ARGUMENT, text); }

json identity(const TableInfo& info) {
  return {
      {"layer", info.layer}, {"content_id", info.content_id}, {"fingerprint", info.fingerprint}};
}

bool holds(const json& record, const json& wanted) {
  for (const json& table : record.at("tables")) {
    bool same = true;
    for (const auto& [key, value] : wanted.items()) same = same && table.at(key) == value;
    if (same) return true;
  }
  return false;
}

bool listens(const Address& address) {
  try {
    return try_connect(address).has_value();
  } catch (const Error&) {
    return false;  // where it listens, there is another user's socket here
  }
}

//! The first by name of this user's keepers that holds a table and, where there are several, can be
//! reached: one that ends, or that is in another network namespace, is in nobody's way.
Address find_keeper(const json& records, const std::string& name, const TableInfo& info) {
  const json wanted = identity(info);
  std::map<std::string, std::string> found;
  std::string others;
  for (const json& record : records) {
    try {
      if (record.at("role") != "keeper") continue;
      const auto keeper = record.at("name").get<std::string>();
      if (holds(record, wanted)) {
        found.emplace(keeper, record.at("socket").get<std::string>());
      } else {
        others += concat(others.empty() ? "" : ", ", "'", keeper, "'");
      }
    } catch (const json::exception&) {  // another program's
    }
  }
  if (found.empty()) {
    refuse(concat("table '", name, "': expected a keeper of this user with the table of layer ",
                  info.layer, " with content id ", info.content_id, ", found ",
                  others.empty() ? "no keeper" : "others: " + others,
                  "; trtllm-engram tables serve STORE makes one"));
  }
  const Address first = keeper_address(found.begin()->first, found.begin()->second);
  for (const auto& [keeper, socket] : found) {
    const Address address = keeper_address(keeper, socket);
    if (found.size() == 1 || listens(address)) return address;
  }
  return first;
}

//! Of the keeper with a name: where it listens, if it is seen here, else where one of the name
//! does.
Address named_keeper(const json& records, const std::string& name) {
  std::string path;
  for (const json& record : records) {
    try {
      if (record.at("role") != "keeper" || record.at("name") != name) continue;
      path = record.at("socket").get<std::string>();
      if (path.empty()) break;          // of two, the one whom nobody else can have the name of
    } catch (const json::exception&) {  // another program's
    }
  }
  return keeper_address(name, path);
}

//! Waits for the answer to what was sent.
Message wait_for_answer(Connection& connection, const std::string& where, Deadline deadline,
                        const std::function<bool()>& cancelled) {
  while (true) {
    if (auto message = connection.take()) return std::move(*message);
    if (cancelled()) refuse(where + ": cancelled");
    ENGRAM_CHECK(std::chrono::steady_clock::now() < deadline, where,
                 ": expected an answer in time, found none (pid ", connection.peer_pid(), ")");
    pollfd watched{.fd = connection.fd(), .events = POLLIN, .revents = 0};
    poll(&watched, 1, kPollMs);
  }
}

std::vector<FileDescriptor> take_fds(const json& array, int64_t expected_bytes,
                                     const std::string& where, std::vector<FileDescriptor>* fds,
                                     size_t* next) {
  const auto num_bytes = array.at("num_bytes").get<int64_t>();
  const auto count = array.at("fds").get<size_t>();
  ENGRAM_CHECK(num_bytes == expected_bytes && count <= fds->size() - *next, where, ": expected ",
               expected_bytes, " bytes and their descriptors, found ", num_bytes, " bytes and ",
               fds->size() - *next, " descriptors");
  std::vector<FileDescriptor> taken;
  for (size_t i = 0; i < count; ++i) taken.push_back(std::move((*fds)[(*next)++]));
  return taken;
}

//! Asks one keeper.
void ask(const Address& address, const Wanted& wanted, bool write, Deadline deadline,
         const std::function<bool()>& cancelled, std::map<std::string, KeptTable>* tables) {
  const std::string where =
      address.path.empty()
          ? concat("keeper '", address.name.substr(address.name.find('/') + 1), "'")
          : concat("keeper at ", address.path);
  ENGRAM_POINT("keeper.attach");
  std::string passed_over;
  std::optional<Connection> found = try_connect(address, &passed_over);
  if (!found) {
    remove_stale(address);
    refuse(concat(where, ": expected it to listen, found nobody of this user",
                  passed_over.empty() ? "" : ", but " + passed_over));
  }
  const auto connection = std::make_shared<Connection>(std::move(*found));
  json request = {{"type", kAttachType},
                  {"version", kKeeperVersion},
                  {"pid", getpid()},
                  {"write", write},
                  {"tables", json::array()}};
  for (const auto& [name, info] : wanted) request["tables"].push_back(identity(info));
  Message answer;
  try {
    connection->send({.data = std::move(request), .fds = {}}, deadline);
    answer = wait_for_answer(*connection, where, deadline, cancelled);
  } catch (const Disconnected&) {
    remove_stale(address);
    throw Error(ENGRAM_INTERNAL_ERROR, where + ": ended before it had answered");
  }
  const json& data = answer.data;
  try {
    if (data.at("type") == kRefusedType) {
      refuse(concat(where, ": ", data.at("text").get<std::string>()));
    }
    size_t next = 0;
    size_t index = 0;
    for (const auto& [name, info] : wanted) {
      const json& item = data.at("tables").at(index++);
      KeptTable table;
      table.keeper = data.at("name").get<std::string>();
      table.id = data.at("id").get<std::string>();
      table.options = {.kind = parse_memory_kind(item.at("kind").get<std::string>()),
                       .pages = parse_page_kind(item.at("pages").get<std::string>()),
                       .numa = parse_numa_policy(item.at("numa").get<std::string>())};
      table.huge_bytes = item.at("huge_bytes").get<int64_t>();
      table.values = take_fds(item.at("values"), info.values.num_bytes, where, &answer.fds, &next);
      table.scales = take_fds(item.at("scales"), info.scales.num_bytes, where, &answer.fds, &next);
      table.connection = connection;
      tables->emplace(name, std::move(table));
    }
  } catch (const json::exception& error) {
    refuse(concat(where, ": expected an answer as this library's, found another: ", error.what()));
  }
  ENGRAM_POINT("keeper.attached");
}

}  // namespace

std::map<std::string, KeptTable> ask_keepers(const std::string& keeper, const Wanted& wanted,
                                             bool write, Deadline deadline,
                                             const std::function<bool()>& cancelled) {
  const auto by_address = [](const Address& a, const Address& b) {
    return std::tie(a.name, a.path) < std::tie(b.name, b.path);
  };
  std::map<Address, Wanted, decltype(by_address)> of_keepers(by_address);
  const bool is_path = keeper.find('/') != keeper.npos;
  const json records = is_path ? json::array() : read_records();
  for (const auto& [name, info] : wanted) {
    const Address address = keeper.empty() ? find_keeper(records, name, info)
                            : is_path      ? keeper_address("", keeper)
                                           : named_keeper(records, keeper);
    of_keepers[address].emplace(name, info);
  }
  std::map<std::string, KeptTable> tables;
  for (const auto& [address, part] : of_keepers) {
    ask(address, part, write, deadline, cancelled, &tables);
  }
  return tables;
}

}  // namespace engram
