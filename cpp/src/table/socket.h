// SPDX-License-Identifier: Apache-2.0
//! \file socket.h
//! Messages with file descriptors between processes of one user on one machine.
//!
//! Unix sockets that keep messages apart (SOCK_SEQPACKET), closed on exec, never a SIGPIPE. Both
//! ends look at the other's user (SO_PEERCRED) before anything else: a socket of another user is
//! closed, and passed over where it is in the way.
//!
//! A forked child has copies of the descriptors: its destructors close those and nothing else.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <vector>

#include "nlohmann/json.hpp"
#include "table/descriptor.h"

namespace engram {

//! Until when something is waited for. One that has passed: no waiting, what is there is taken.
using Deadline = std::chrono::steady_clock::time_point;
Deadline deadline_after(double seconds);

//! Texts inside `data` may hold any bytes, such as names of files.
struct Message {
  nlohmann::json data;
  std::vector<FileDescriptor> fds;
};

//! The descriptors of a message, for a queue.
std::vector<int> handles_of(const Message& message);

//! Where a listener is found.
struct Address {
  //! Of this user and network namespace alone; what is listened at is the abstract socket
  //! "trtllm-engram/UID/NAME/K", K from 0 to 7, since others can take names too. Also the name in
  //! errors.
  std::string name;
  //! Where not empty: a socket in the file system instead, for containers with separate network
  //! namespaces. At most 107 bytes.
  std::string path;
};

//! For errors: the path, or "socket 'NAME'".
std::string address_text(const Address& address);

//! The other end is closed, most often because its process ended.
class Disconnected : public Error {
 public:
  explicit Disconnected(const std::string& message) : Error(ENGRAM_INTERNAL_ERROR, message) {}
};

//! Somebody listens at the address, of this user.
class AddressInUse : public Error {
 public:
  AddressInUse(const std::string& message, pid_t pid)
      : Error(ENGRAM_INVALID_ARGUMENT, message), pid_(pid) {}
  //! 0 for one in another PID namespace.
  pid_t pid() const { return pid_; }

 private:
  pid_t pid_;
};

//! One end; for one thread at a time. `where` names it in errors, which are all one line "WHERE:
//! ...". A descriptor that cannot be received (RLIMIT_NOFILE) is an Error that gives the limit.
class Connection {
 public:
  //! Takes over a connected socket. Throws Error where the other end is another user's.
  Connection(FileDescriptor socket, std::string where);

  //! Waits until the message is with the kernel; throws Error at the deadline, Disconnected.
  void send(const Message& message, Deadline deadline);

  //! The same in steps that never wait, for who watches several: queue() adds to what is to be
  //! sent; the descriptors (which stay the caller's) must stay open until flush(), called whenever
  //! fd() can be written, says that nothing is left.
  void queue(const nlohmann::json& data, const std::vector<int>& fds = {});
  //! True: nothing is left. Throws Disconnected, Error.
  bool flush();
  bool has_queued() const { return !queued_.empty(); }
  //! What the kernel holds of what was sent, with its overhead: the other end has not read it.
  int64_t unread_bytes() const;
  //! A message that has come in whole, if there is one. What was sent before the other end closed
  //! is still received; then Disconnected is thrown.
  std::optional<Message> take();

  //! Who connected or, on that end, who listens; 0 for one in another PID namespace.
  pid_t peer_pid() const { return peer_pid_; }
  //! What who connected is known by from the first, before it says anything and if it dies; empty:
  //! it has no such word.
  std::string peer_word() const;
  //! For poll(); never blocks.
  int fd() const { return socket_.get(); }

 private:
  struct Packet {
    std::string bytes;
    std::vector<int> fds;
  };
  //! Adds a packet to what has been received, and says whether it was a message's last; none:
  //! there is no packet.
  std::optional<bool> take_packet();
  Message finish_message();

  FileDescriptor socket_;
  std::string where_;
  pid_t peer_pid_ = 0;
  std::deque<Packet> queued_;
  std::string received_;
  std::vector<FileDescriptor> received_fds_;
};

//! Listens, and gives the address free at its end (a path is unlinked, not by a forked child).
class Listener {
 public:
  //! Of an abstract address the first free K; AddressInUse where this user listens at any K. A path
  //! socket has mode 0600 and needs a folder of this user or root that nobody else can write; one
  //! whose process is gone is replaced (under the folder's flock), AddressInUse where it answers,
  //! and another user's is an Error that names the user.
  explicit Listener(const Address& address);
  ~Listener();
  Listener(const Listener&) = delete;
  Listener& operator=(const Listener&) = delete;

  //! Waits for a connection of this user; none at the deadline. Other users' are closed.
  std::optional<Connection> accept(Deadline deadline);
  //! One line about the last connection that was closed, "pid 7 of user 65534"; empty: none was.
  const std::string& turned_away() const { return turned_away_; }

  //! For poll(): can be read where somebody connects.
  int fd() const { return socket_.get(); }

 private:
  void listen_at_name();
  void listen_at_path();

  Address address_;
  FileDescriptor socket_;
  std::string turned_away_;
  pid_t owner_ = 0;         // who unlinks
  uint64_t path_file_ = 0;  // inode of the path that is ours
};

//! Throws the Error that a Listener would meet in what lies at a path now, for who waits for one: a
//! file that is no socket, another user's socket, a folder that others can write. A folder that is
//! not there yet is none.
void check_address(const Address& address);

//! A connection to who listens there now; none: nobody of this user does. Never waits. An abstract
//! name's sockets of other users are passed over, and the last one is told to `passed_over` ("pid 7
//! of user 65534") where that is not null; of a path socket they are an Error. `word`, letters and
//! digits, is the other end's peer_word().
std::optional<Connection> try_connect(const Address& address, std::string* passed_over = nullptr,
                                      const std::string& word = "");

//! Removes a path socket of this user that nobody listens at, if it is one: what a process that was
//! killed leaves behind. Never throws.
void remove_stale(const Address& address) noexcept;

}  // namespace engram
