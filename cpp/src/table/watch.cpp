// SPDX-License-Identifier: Apache-2.0
#include "table/watch.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>

#include <algorithm>
#include <fstream>
#include <sstream>

namespace engram {
namespace {

using std::chrono::steady_clock;

constexpr int kLongestWaitMs = 100;
constexpr std::chrono::milliseconds kLongestBeat{250};
constexpr std::chrono::seconds kLookAfter{1};

void open_process(Peer& peer) {
#ifdef SYS_pidfd_open
  const pid_t pid = peer.connection.peer_pid();
  if (pid <= 0) return;  // of another PID namespace
  peer.process = FileDescriptor(static_cast<int>(syscall(SYS_pidfd_open, pid, 0)));
  peer.gone = !peer.process && errno == ESRCH;
#else
  static_cast<void>(peer);
#endif
}

bool has_ended(const Peer& peer) {
  pollfd entry{.fd = peer.process.get(), .events = POLLIN};
  return peer.gone || (peer.process && poll(&entry, 1, 0) > 0);
}

//! Whether a process is on its way to its end, or writes a core on it.
bool is_ending(pid_t pid) {
  if (pid <= 0) return false;
  const std::string folder = concat("/proc/", pid);
  std::string text;
  std::getline(std::ifstream(folder + "/stat"), text, '\0');
  // "PID (NAME) STATE" and numbers; the name may hold anything. The flags are PF_*.
  std::istringstream after(text.substr(std::min(text.size(), text.rfind(')') + 1)));
  char state = 0;
  int64_t skipped;
  uint64_t flags = 0;
  after >> state >> skipped >> skipped >> skipped >> skipped >> skipped >> flags;
  constexpr uint64_t kExiting = 0x4;
  if (state == 'Z' || state == 'X' || (after && (flags & kExiting) != 0)) return true;
  std::getline(std::ifstream(folder + "/status"), text, '\0');
  return text.find("\nCoreDumping:\t1") != text.npos;
}

}  // namespace

Watch::Watch(double timeout_s)
    : timeout_(timeout_s),
      beat_(std::min(std::chrono::duration<double>(kLongestBeat), timeout_ / 8)),
      stepped_(steady_clock::now()),
      wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (!wake_) {
    throw Error(ENGRAM_INTERNAL_ERROR,
                concat("a group's connections: cannot be watched: ", std::strerror(errno)));
  }
}

void Watch::add(Connection connection) {
  const Deadline now = steady_clock::now();
  open_process(peers_.emplace_back(
      Peer{.connection = std::move(connection), .process = {}, .heard = now, .looked = now}));
}

bool Watch::has_queued() const {
  return std::any_of(peers_.begin(), peers_.end(),
                     [](const Peer& peer) { return peer.connection.has_queued(); });
}

bool Watch::wants_beat(const Peer& peer) const {
  constexpr int64_t kUnread = 16 << 10;
  return !peer.connection.has_queued() && peer.connection.unread_bytes() < kUnread;
}

void Watch::refresh() {
  stepped_ = steady_clock::now();
  for (Peer& peer : peers_) peer.heard = peer.looked = stepped_;
}

void Watch::wake() noexcept {
  const uint64_t one = 1;
  static_cast<void>(!write(wake_.get(), &one, sizeof(one)));  // full: it wakes as well
}

void Watch::wait(int extra) {
  std::vector<pollfd> entries{{.fd = wake_.get(), .events = POLLIN},
                              {.fd = extra, .events = POLLIN}};
  for (const Peer& peer : peers_) {
    const int events = POLLIN | (peer.connection.has_queued() ? POLLOUT : 0);
    entries.push_back({.fd = peer.connection.fd(), .events = static_cast<short>(events)});
    entries.push_back({.fd = peer.process.get(), .events = POLLIN});  // a negative one is skipped
  }
  const int wait_ms = static_cast<int>(beat_ / std::chrono::milliseconds(1));
  poll(entries.data(), entries.size(), std::clamp(wait_ms, 1, kLongestWaitMs));
  uint64_t count;
  static_cast<void>(!read(wake_.get(), &count, sizeof(count)));
}

void Watch::step(WatchHandler& handler, int extra) {
  if (steady_clock::now() - beaten_ >= beat_) {
    beaten_ = steady_clock::now();
    handler.on_beat();
  }
  wait(extra);
  // Peers that are added while the others are handled come last: they are for the next step.
  const auto end = peers_.size();
  auto peer = peers_.begin();
  for (size_t i = 0; i < end; ++i, ++peer) {
    if (!peer->lost) handle(*peer, handler);
  }
  const Deadline now = steady_clock::now();
  // Who was stopped itself has not heard the others, but they may have spoken.
  if (now - stepped_ > timeout_ / 2) refresh();
  stepped_ = now;
  for (Peer& each : peers_) {
    if (!each.lost && now - each.heard > timeout_) lose(each, Loss::kSilent, handler);
  }
  peers_.remove_if([](const Peer& each) { return each.lost; });
}

std::optional<Message> Watch::next_message(Peer& peer, WatchHandler& handler, bool ended) {
  try {
    std::optional<Message> message = peer.connection.take();
    if (message) peer.heard = peer.looked = steady_clock::now();
    return message;
  } catch (const Disconnected&) {
    // It may end between two looks, and be gone for the second.
    const bool died =
        ended || has_ended(peer) || is_ending(peer.connection.peer_pid()) || has_ended(peer);
    lose(peer, died ? Loss::kDied : Loss::kLeft, handler);
  } catch (const Error& error) {
    lose(peer, Loss::kBroken, handler, error.what());
  }
  return std::nullopt;
}

void Watch::handle(Peer& peer, WatchHandler& handler) {
  // NOTE: asked before the socket is read: all that the process sent is there by then.
  const bool ended = has_ended(peer);
  try {
    peer.connection.flush();
  } catch (const Disconnected&) {
    // Its last messages are still to be read; then that says so.
  } catch (const Error& error) {
    return lose(peer, Loss::kBroken, handler, error.what());
  }
  while (!peer.lost) {
    std::optional<Message> message = next_message(peer, handler, ended);
    if (!message) break;
    try {
      handler.on_message(peer, std::move(*message));
    } catch (const nlohmann::json::exception& error) {
      lose(peer, Loss::kBroken, handler, concat("a message that is not known: ", error.what()));
    }
  }
  if (peer.lost) return;
  const Deadline now = steady_clock::now();
  if (now - peer.heard > kLookAfter && now - peer.looked > kLookAfter) {
    peer.looked = now;
    if (is_ending(peer.connection.peer_pid())) return lose(peer, Loss::kDied, handler);
  }
  if (ended) lose(peer, Loss::kDied, handler);
}

void Watch::lose(Peer& peer, Loss loss, WatchHandler& handler, const std::string& detail) {
  peer.lost = true;
  handler.on_loss(peer, loss, detail);
}

}  // namespace engram
