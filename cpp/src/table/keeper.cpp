// SPDX-License-Identifier: Apache-2.0
#include "table/keeper.h"

#include <poll.h>
#include <sys/random.h>
#include <unistd.h>

#include "engram/error.h"
#include "table/keeper_protocol.h"
#include "table/log.h"
#include "table/points.h"

namespace engram {
namespace {

using nlohmann::json;

constexpr int kPollMs = 100;
constexpr double kSendSeconds = 5;

std::string random_id() {
  uint64_t bits[2] = {};
  if (getrandom(bits, sizeof(bits), 0) != sizeof(bits)) {
    throw Error(ENGRAM_INTERNAL_ERROR, "keeper: expected random numbers of the kernel, found none");
  }
  return concat(std::hex, bits[0], bits[1]);
}

//! A name that is told from a path.
const std::string& checked(const std::string& name) {
  ENGRAM_CHECK(!name.empty() && name.find('/') == name.npos,
               "keeper: name: expected a text without '/', found '", name, "'");
  return name;
}

//! What a request names; null where it is not here.
const Table* find(const TablesByName& tables, const json& wanted) {
  for (const auto& [name, table] : tables) {
    const TableInfo& info = table->info();
    if (wanted.at("layer") == info.layer && wanted.at("content_id") == info.content_id &&
        wanted.at("fingerprint") == info.fingerprint) {
      return table.get();
    }
  }
  return nullptr;
}

json hand_out(const HostMemory& memory, bool write, std::vector<FileDescriptor>* fds) {
  std::vector<FileDescriptor> copies;
  if (write) {
    for (const FileDescriptor& each : memory.descriptors()) copies.push_back(each.duplicate());
  } else {
    copies = memory.read_only_descriptors();
  }
  const json array = {{"num_bytes", memory.num_bytes()}, {"fds", copies.size()}};
  for (FileDescriptor& each : copies) fds->push_back(std::move(each));
  return array;
}

Listener listen(const std::string& name, const std::string& socket) {
  try {
    return Listener(keeper_address(name, socket));
  } catch (const AddressInUse& error) {
    throw AddressInUse(concat("keeper '", name, "': expected a ",
                              socket.empty() ? "name" : "socket", " that is free, found ",
                              socket.empty() ? "it" : socket, " taken by pid ", error.pid()),
                       error.pid());
  }
}

}  // namespace

Address keeper_address(const std::string& name, const std::string& socket) {
  return {.name = "keeper/" + name, .path = socket};
}

Keeper::Keeper(const std::string& name, const std::string& socket)
    : name_(name), id_(random_id()), listener_(listen(checked(name), socket)) {
  ENGRAM_POINT("keeper.listen");
}

void Keeper::run(const TablesByName& tables, const std::atomic<bool>& stop) {
  log(LogLevel::kInfo, concat("keeper '", name_, "': holds ", tables.size(), " tables"));
  ENGRAM_POINT("keeper.serving");
  while (!stop) {
    const int listening = is_full_ ? -1 : listener_.fd();  // a negative one is skipped
    std::vector<pollfd> watched{{.fd = listening, .events = POLLIN, .revents = 0}};
    for (const Client& client : clients_) {
      watched.push_back({.fd = client.connection.fd(), .events = POLLIN, .revents = 0});
    }
    if (poll(watched.data(), watched.size(), kPollMs) < 0) continue;
    for (size_t i = clients_.size(); i-- > 0;) {
      if (watched[i + 1].revents == 0 || serve(clients_[i], tables)) continue;
      clients_.erase(clients_.begin() + static_cast<ptrdiff_t>(i));
    }
    if (is_full_ || watched[0].revents != 0) accept();
  }
  ENGRAM_POINT("keeper.stop");
}

void Keeper::accept() {
  try {
    if (auto connection = listener_.accept(deadline_after(0))) {
      ENGRAM_POINT("keeper.accepted");
      clients_.push_back({std::move(*connection)});
    }
    is_full_ = false;
  } catch (const Error& error) {
    // At its limit of open files: who waits has a turn once others have left.
    if (!is_full_) log(LogLevel::kWarning, concat("keeper '", name_, "': ", error.what()));
    is_full_ = true;
  }
}

bool Keeper::serve(Client& client, const TablesByName& tables) {
  const auto who = [&] { return concat("pid ", client.connection.peer_pid()); };
  try {
    const std::optional<Message> request = client.connection.take();
    if (!request) return true;
    const Message message = answer(request->data, tables);
    ENGRAM_POINT("keeper.send");
    client.connection.send(message, deadline_after(kSendSeconds));
    if (message.data.at("type") != kTablesType) return true;
    client.attached = true;
    log(LogLevel::kInfo, concat("keeper '", name_, "': ", who(), " has attached"));
    return true;
  } catch (const Disconnected&) {
    if (client.attached) {
      log(LogLevel::kInfo, concat("keeper '", name_, "': ", who(), " has left"));
    }
  } catch (const std::exception& error) {
    log(LogLevel::kWarning, concat("keeper '", name_, "': ", who(), ": ", error.what()));
  }
  return false;
}

Message Keeper::answer(const json& request, const TablesByName& tables) const {
  if (!request.is_object() || request.value("type", "") != kAttachType) {
    throw Error(ENGRAM_INVALID_ARGUMENT, "expected a request to attach, found something else");
  }
  const auto refused = [&](const std::string& text) -> Message {
    return {.data = {{"type", kRefusedType}, {"text", text}}, .fds = {}};
  };
  if (request.at("version") != kKeeperVersion) {
    return refused(concat("expected version ", kKeeperVersion, " of the library's keepers, found ",
                          request.at("version").dump()));
  }
  Message message{.data = {{"type", kTablesType}, {"name", name_}, {"id", id_}, {"pid", getpid()}},
                  .fds = {}};
  const bool write = request.at("write").get<bool>();
  for (const json& wanted : request.at("tables")) {
    const Table* const table = find(tables, wanted);
    if (table == nullptr) {
      return refused(concat("expected a table of layer ", wanted.at("layer").dump(),
                            " with content id ", wanted.at("content_id").get<std::string>(),
                            ", found none"));
    }
    const HostMemory& values = *table->values().host_memory();
    const HostMemory& scales = *table->scales().host_memory();
    json item = {{"kind", memory_kind_name(values.options().kind)},
                 {"pages", page_kind_name(values.options().pages)},
                 {"numa", numa_policy_name(values.options().numa)},
                 {"huge_bytes", table->history().huge_bytes}};
    item["values"] = hand_out(values, write, &message.fds);
    item["scales"] = hand_out(scales, write, &message.fds);
    message.data["tables"].push_back(std::move(item));
  }
  return message;
}

}  // namespace engram
