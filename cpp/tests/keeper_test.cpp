// SPDX-License-Identifier: Apache-2.0
#include "table/keeper.h"

#include <poll.h>
#include <sys/resource.h>

#include <filesystem>

#include "sockets.h"
#include "stores.h"
#include "table/bind.h"
#include "table/keeper_protocol.h"
#include "table/record.h"

namespace engram {
namespace {

using nlohmann::json;

std::string new_name() {
  static int count = 0;
  return concat("test-", getpid(), "-", ++count);
}

//! A keeper of the store's tables, in a process of its own.
class KeeperProcess {
 public:
  KeeperProcess(const Folder& store, const std::string& name, const std::string& socket = "")
      : process_([&]() -> std::string {
          Keeper keeper(name, socket);
          const KeeperRole role(name, socket, keeper.id());
          BindState state;
          const TablesByName tables = bind_tables(bindings_of(store, 5), {}, state, [] {});
          ready_.set();
          keeper.run(tables, state.stop_serving);
          return "ended";
        }) {
    REQUIRE(ready_.wait());
  }

  Process& process() { return process_; }

 private:
  Signal ready_;
  Process process_;
};

Bindings kept_bindings(const Folder& store, const std::string& keeper, uint64_t seed = 5) {
  Bindings bindings = bindings_of(store, seed);
  for (auto& [name, options] : bindings.tables) options.keeper = true;
  bindings.group.keeper = keeper;
  return bindings;
}

TablesByName attach(const Bindings& bindings) {
  BindState state;
  return bind_tables(bindings, {.timeout_s = kPatience}, state, [] {});
}

std::string refusal(const Bindings& bindings) {
  try {
    attach(bindings);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

}  // namespace

TEST_CASE("keeper: tables by name, by path and by what they are, after its end too") {
  const Folder store;
  const Folder folder;
  write_store(store);
  const std::string name = new_name();
  const std::string path = folder.path() + "/socket";
  const size_t before = count_descriptors();
  {
    KeeperProcess keeper(store, name);
    TablesByName by_name = attach(kept_bindings(store, name));
    TablesByName by_content = attach(kept_bindings(store, ""));
    CHECK(look_at(by_name, 5) == "right");
    CHECK(look_at(by_content, 5) == "right");
    const Table& table = *by_name.at("one");
    CHECK(table.history().keeper == name);
    CHECK(table.values().host_memory()->access() == Access::kReadOnly);
    CHECK(table.values().host_memory()->options().kind == MemoryKind::kMemfd);
    keeper.process().signal(SIGKILL);
    CHECK(keeper.process().result().empty());
    CHECK(look_at(by_name, 5) == "right");
    CHECK(look_at(by_content, 5) == "right");
  }
  {
    KeeperProcess keeper(store, name, path);
    CHECK(look_at(attach(kept_bindings(store, path)), 5) == "right");
    CHECK(look_at(attach(kept_bindings(store, name)), 5) == "right");
    CHECK(look_at(attach(kept_bindings(store, "")), 5) == "right");
  }
  CHECK(count_descriptors() == before);
}

TEST_CASE("keeper: what it does not have") {
  const Folder store;
  const Folder other;
  write_store(store);
  const std::string name = new_name();
  CHECK(refusal(kept_bindings(store, name)) ==
        concat("keeper '", name, "': expected it to listen, found nobody of this user"));
  KeeperProcess keeper(store, name);
  CHECK(refusal(kept_bindings(store, name, 6)) ==
        concat("keeper '", name,
               "': expected a table of layer 1 with content id formula:6, found none"));
  const std::string text = refusal(kept_bindings(store, "", 6));
  CHECK(text.find("expected a keeper of this user with the table of layer 1 with content id "
                  "formula:6, found others: '" +
                  name + "'") != text.npos);
  CHECK(look_at(attach(kept_bindings(store, name)), 5) == "right");
}

TEST_CASE("keeper: one of a name") {
  const Folder store;
  write_store(store);
  const std::string name = new_name();
  KeeperProcess keeper(store, name);
  CHECK_THROWS_WITH_AS(
      Keeper(name, ""),
      ("keeper '" + name + "': expected a name that is free, found it taken by pid " +
       std::to_string(keeper.process().pid()))
          .c_str(),
      AddressInUse);
  CHECK_THROWS_WITH(Keeper("a/b", ""), "keeper: name: expected a text without '/', found 'a/b'");
}

TEST_CASE("keeper: more connections than it may have open wait, and end nothing") {
  const Folder store;
  write_store(store);
  const std::string name = new_name();
  KeeperProcess keeper(store, name);
  const pid_t pid = keeper.process().pid();
  const auto num_open = [&] {
    const std::filesystem::directory_iterator files(concat("/proc/", pid, "/fd"));
    return std::distance(begin(files), end(files));
  };
  const auto before = num_open();
  const rlim_t most = static_cast<rlim_t>(before) + 20;
  rlimit usual{};
  REQUIRE(prlimit(pid, RLIMIT_NOFILE, nullptr, &usual) == 0);
  const rlimit low{most, usual.rlim_max};
  REQUIRE(prlimit(pid, RLIMIT_NOFILE, &low, nullptr) == 0);
  std::vector<Connection> idle;
  for (int i = 0; i < 60; ++i) {
    idle.push_back(connect(keeper_address(name, "")));
  }
  CHECK(comes_true([&] { return num_open() >= before + 15; }));
  // NOTE: before any leaves: UBSan opens pipes to look at what is thrown, and takes their lack for
  // a fault.
  REQUIRE(prlimit(pid, RLIMIT_NOFILE, &usual, nullptr) == 0);
  CHECK(comes_true([&] { return num_open() >= before + 60; }));
  idle.clear();
  CHECK(look_at(attach(kept_bindings(store, name)), 5) == "right");
}

TEST_CASE("keeper: requests that are none close their connection, and nobody else's") {
  const Folder store;
  write_store(store);
  const std::string name = new_name();
  KeeperProcess keeper(store, name);
  const auto ask = [&](const json& request) -> std::string {
    auto connection = try_connect(keeper_address(name, ""));
    REQUIRE(connection);
    connection->send({.data = request, .fds = {}}, deadline_after(kPatience));
    try {
      return receive(*connection).data.at("type").get<std::string>();
    } catch (const Disconnected&) {
      return "closed";
    }
  };
  auto silent = try_connect(keeper_address(name, ""));
  REQUIRE(silent);
  CHECK(ask(json::array()) == "closed");
  CHECK(ask({{"type", "hello"}}) == "closed");
  CHECK(ask({{"type", "attach"}}) == "closed");
  const json newer = {{"type", "attach"}, {"version", 99}, {"write", false}, {"tables", {}}};
  CHECK(ask(newer) == "refused");
  CHECK(look_at(attach(kept_bindings(store, name)), 5) == "right");
}

}  // namespace engram
