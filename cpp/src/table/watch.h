// SPDX-License-Identifier: Apache-2.0
//! \file watch.h
//! Several connections at once: messages come in, and what ends is noticed.
#pragma once

#include <cstdint>
#include <list>

#include "table/socket.h"

namespace engram {

//! How a process was lost.
enum class Loss {
  kDied,
  kLeft,    //!< it closed its end, and lives
  kSilent,  //!< nothing came for the timeout
  kBroken,  //!< what came cannot be received
};

//! Another process that is watched.
struct Peer {
  Connection connection;
  FileDescriptor process;  //!< pidfd; none where the kernel or the PID namespace has none
  bool gone = false;       //!< it had ended, and its parent knew, before it could be watched
  int32_t rank = -1;       //!< -1: it has not said
  Deadline heard;          //!< when the last message came
  Deadline looked;         //!< when the process was last looked at
  bool lost = false;       //!< removed at the end of the step, unless on_loss() changes it
};

//! What happens; all on the thread that calls step(). Throwing from one ends the step.
class WatchHandler {
 public:
  virtual ~WatchHandler() = default;
  virtual void on_message(Peer& peer, Message message) = 0;
  //! `detail` is for kBroken. The peer is there until this returns.
  virtual void on_loss(Peer& peer, Loss loss, const std::string& detail) = 0;
  //! Now and then, so often that nobody counts as silent who queues a message each time.
  virtual void on_beat() = 0;
};

//! For one thread; wake() for any.
//!
//! A death is noticed by the socket's end at once; by the process's end where a forked child keeps
//! the socket open; and within 2 s by what /proc says, where a process takes long to end (it frees
//! its memory before it closes its sockets, and may write a core first).
class Watch {
 public:
  explicit Watch(double timeout_s);

  void add(Connection connection);
  std::list<Peer>& peers() { return peers_; }
  bool has_queued() const;
  //! Whether a beat would be news: a peer that has not read the last ones needs no more, and finds
  //! room for what matters.
  bool wants_beat(const Peer& peer) const;
  //! For who has not watched for a while: nobody has been silent until now.
  void refresh();

  //! Waits for something to happen, at most 0.1 s, and handles it. `extra`, where it is no -1, is
  //! waited for too. NOTE: peers that the handler adds are watched from the next step on.
  void step(WatchHandler& handler, int extra = -1);
  //! Ends a wait. Thread-safe.
  void wake() noexcept;

 private:
  void wait(int extra);
  void handle(Peer& peer, WatchHandler& handler);
  std::optional<Message> next_message(Peer& peer, WatchHandler& handler, bool ended);
  void lose(Peer& peer, Loss loss, WatchHandler& handler, const std::string& detail = {});

  std::chrono::duration<double> timeout_;
  std::chrono::duration<double> beat_;
  Deadline stepped_;
  Deadline beaten_{};
  FileDescriptor wake_;
  std::list<Peer> peers_;
};

}  // namespace engram
