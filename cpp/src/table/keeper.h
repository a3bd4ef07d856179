// SPDX-License-Identifier: Apache-2.0
//! \file keeper.h
//! A process that holds host tables for others of its user, so that a restarted server finds them
//! loaded; and how those others get them.
//!
//! Who attaches connects, asks once, and leaves its connection open as long as it has the tables:
//!     {"type": "attach", "version", "pid", "write", "tables": [{"layer", "content_id",
//!      "fingerprint"}]}
//! and is answered
//!     {"type": "tables", "name", "id", "pid", "tables": [{"kind", "pages", "numa", "huge_bytes",
//!      "values": {"num_bytes", "fds"}, "scales": {...}}]} with the descriptors in that order, or
//!     {"type": "refused", "text"}
//! The keeper's end harms nobody who has attached.
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "engram/table.h"
#include "table/socket.h"

namespace engram {

class Keeper {
 public:
  //! Listens from now on, so that who comes early waits. Throws Error where the name is taken.
  Keeper(const std::string& name, const std::string& socket);

  //! Tells this process's answers from those of one that took its name later.
  const std::string& id() const { return id_; }

  //! Hands out tables until `stop` is set (looked at ten times a second). Connections that
  //! misbehave are closed and logged; those past the limit of open files wait.
  void run(const TablesByName& tables, const std::atomic<bool>& stop);

 private:
  struct Client {
    Connection connection;
    bool attached = false;
  };
  void accept();
  //! False: the connection is to be closed.
  bool serve(Client& client, const TablesByName& tables);
  Message answer(const nlohmann::json& request, const TablesByName& tables) const;

  std::string name_;
  std::string id_;
  Listener listener_;
  std::vector<Client> clients_;
  bool is_full_ = false;  // nobody more could be accepted
};

//! One table of a keeper's, not mapped yet.
struct KeptTable {
  std::string keeper;  //!< name
  std::string id;      //!< equal for two ranks if and only if it is the same memory
  HostMemoryOptions options;
  int64_t huge_bytes = 0;
  std::vector<FileDescriptor> values;
  std::vector<FileDescriptor> scales;
  std::shared_ptr<void> connection;  //!< to be kept as long as the memory
};

//! Asks for tables, by name of this process's choice. `keeper` is a name, the path of a socket, or
//! empty for any keeper of this user that has the table. `write`: for memory that must be mapped
//! for writing. Throws Error: no such keeper, a table that it does not have or has in other sizes,
//! a death, no answer by the deadline, cancelled.
std::map<std::string, KeptTable> ask_keepers(const std::string& keeper,
                                             const std::map<std::string, TableInfo>& wanted,
                                             bool write, Deadline deadline,
                                             const std::function<bool()>& cancelled);

}  // namespace engram
