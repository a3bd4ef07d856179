// SPDX-License-Identifier: Apache-2.0
#include "table/socket.h"

#include <linux/sockios.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <algorithm>
#include <thread>

#include "table/peer.h"

namespace engram {
namespace {

using std::chrono::steady_clock;

// A message travels as packets: one byte that says whether more follow, and a part of its bytes
// and of its descriptors. Packets fit into the smallest send buffers that machines are set to; the
// kernel takes at most 253 descriptors at once.
constexpr size_t kPacketBytes = 16 << 10;
constexpr size_t kPacketFds = 128;
constexpr size_t kMaxMessageBytes = 64 << 20;
constexpr char kMore = '+';
constexpr char kLast = '.';

//! Waits until the socket can be read or written; false at the deadline.
bool wait_for(int socket, short events, Deadline deadline) {
  for (;;) {
    pollfd entry{.fd = socket, .events = events};
    if (poll(&entry, 1, milliseconds_until(deadline)) > 0) return true;
    if (steady_clock::now() >= deadline) return false;
  }
}

//! The descriptors that came with a packet; they are closed where nobody takes them.
std::vector<FileDescriptor> descriptors_of(msghdr& packet) {
  std::vector<FileDescriptor> fds;
  for (cmsghdr* part = CMSG_FIRSTHDR(&packet); part != nullptr; part = CMSG_NXTHDR(&packet, part)) {
    if (part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS) continue;
    const size_t count = (part->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < count; ++i) {
      int handle;
      std::memcpy(&handle, CMSG_DATA(part) + i * sizeof(int), sizeof(handle));
      fds.emplace_back(handle);
    }
  }
  return fds;
}

uint64_t most_descriptors() {
  rlimit limit{};
  getrlimit(RLIMIT_NOFILE, &limit);
  return limit.rlim_cur;
}

}  // namespace

Deadline deadline_after(double seconds) {
  // A century stands for ever: no sum overflows.
  const std::chrono::duration<double> wait(std::clamp(seconds, 0.0, 3e9));
  return steady_clock::now() + std::chrono::duration_cast<steady_clock::duration>(wait);
}

int milliseconds_until(Deadline deadline) {
  const auto left =
      std::chrono::ceil<std::chrono::milliseconds>(deadline - steady_clock::now()).count();
  return static_cast<int>(std::clamp<int64_t>(left, 0, 1 << 30));
}

std::vector<int> handles_of(const Message& message) {
  std::vector<int> handles;
  for (const FileDescriptor& each : message.fds) handles.push_back(each.get());
  return handles;
}

PeerUser peer_user(int socket) {
  ucred user{};
  socklen_t size = sizeof(user);
  if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &user, &size) != 0) return {};
  return {user.uid, user.pid};
}

std::string PeerUser::text() const { return concat("pid ", pid, " of user ", uid); }

Connection::Connection(FileDescriptor socket, std::string where)
    : socket_(std::move(socket)), where_(std::move(where)) {
  const PeerUser peer = peer_user(fd());
  ENGRAM_CHECK(peer.uid == geteuid(), where_, ": expected a process of user ", geteuid(),
               ", found ", peer.text());
  peer_pid_ = peer.pid;
  if (fcntl(fd(), F_SETFL, O_NONBLOCK) != 0) {
    throw Error(ENGRAM_INTERNAL_ERROR,
                concat(where_, ": cannot be set up: ", std::strerror(errno)));
  }
}

void Connection::queue(const nlohmann::json& data, const std::vector<int>& fds) {
  // NOTE: CBOR takes texts as they are; JSON's would have to be UTF-8.
  std::string bytes;
  nlohmann::json::to_cbor(nlohmann::json::array({data, fds.size()}), bytes);
  ENGRAM_CHECK(bytes.size() <= kMaxMessageBytes, where_, ": expected messages of at most ",
               kMaxMessageBytes, " bytes, got one of ", bytes.size());
  size_t from = 0;
  size_t from_fd = 0;
  do {
    const size_t count = std::min(kPacketBytes, bytes.size() - from);
    const size_t count_fds = std::min(kPacketFds, fds.size() - from_fd);
    const auto first = fds.begin() + static_cast<ptrdiff_t>(from_fd);
    const bool last = from + count == bytes.size() && from_fd + count_fds == fds.size();
    queued_.push_back({(last ? kLast : kMore) + bytes.substr(from, count),
                       {first, first + static_cast<ptrdiff_t>(count_fds)}});
    from += count;
    from_fd += count_fds;
  } while (from < bytes.size() || from_fd < fds.size());
}

bool Connection::flush() {
  for (; !queued_.empty(); queued_.pop_front()) {
    Packet& packet = queued_.front();
    iovec part{packet.bytes.data(), packet.bytes.size()};
    msghdr header{};
    header.msg_iov = &part;
    header.msg_iovlen = 1;
    alignas(cmsghdr) char control[CMSG_SPACE(kPacketFds * sizeof(int))] = {};
    if (!packet.fds.empty()) {
      const size_t size = packet.fds.size() * sizeof(int);
      header.msg_control = control;
      header.msg_controllen = CMSG_SPACE(size);
      cmsghdr* const rights = CMSG_FIRSTHDR(&header);
      rights->cmsg_level = SOL_SOCKET;
      rights->cmsg_type = SCM_RIGHTS;
      rights->cmsg_len = CMSG_LEN(size);
      std::memcpy(CMSG_DATA(rights), packet.fds.data(), size);
    }
    ssize_t sent;
    do {
      sent = sendmsg(fd(), &header, MSG_NOSIGNAL | MSG_DONTWAIT);
    } while (sent < 0 && errno == EINTR);
    if (sent >= 0) continue;
    if (errno == EAGAIN || errno == EWOULDBLOCK) return false;
    if (errno == ETOOMANYREFS) {
      // As many descriptors of this user are under way as it may have open: until some arrive.
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      return false;
    }
    const int error = errno;
    queued_.clear();
    if (error == EPIPE || error == ECONNRESET || error == ECONNREFUSED || error == ENOTCONN) {
      throw Disconnected(
          concat(where_, ": expected to send, found that pid ", peer_pid_, " has closed its end"));
    }
    throw Error(ENGRAM_INTERNAL_ERROR,
                concat(where_, ": cannot send to pid ", peer_pid_, ": ", std::strerror(error)));
  }
  return true;
}

int64_t Connection::unread_bytes() const {
  int count = 0;
  return ioctl(fd(), SIOCOUTQ, &count) == 0 ? count : 0;
}

std::optional<bool> Connection::take_packet() {
  char bytes[1 + kPacketBytes];
  alignas(cmsghdr) char control[CMSG_SPACE(kPacketFds * sizeof(int))];
  iovec part{bytes, sizeof(bytes)};
  msghdr header{};
  header.msg_iov = &part;
  header.msg_iovlen = 1;
  header.msg_control = control;
  header.msg_controllen = sizeof(control);
  ssize_t count;
  do {
    count = recvmsg(fd(), &header, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    // ECONNRESET: the other end closed without reading all; once told, what it sent is read.
  } while (count < 0 && (errno == EINTR || errno == ECONNRESET));
  if (count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return std::nullopt;
  if (count < 0) {
    throw Error(ENGRAM_INTERNAL_ERROR, concat(where_, ": cannot receive from pid ", peer_pid_, ": ",
                                              std::strerror(errno)));
  }
  if (count == 0) {
    throw Disconnected(
        concat(where_, ": expected a message, found that pid ", peer_pid_, " has closed its end"));
  }
  std::vector<FileDescriptor> fds = descriptors_of(header);
  if ((header.msg_flags & MSG_CTRUNC) != 0) {
    throw Error(ENGRAM_INTERNAL_ERROR, concat(where_, ": expected room for descriptors from pid ",
                                              peer_pid_, ", found the process at its limit of ",
                                              most_descriptors(), " open files (ulimit -n)"));
  }
  const bool last = bytes[0] == kLast;
  ENGRAM_CHECK((last || bytes[0] == kMore) && (header.msg_flags & MSG_TRUNC) == 0 &&
                   received_.size() <= kMaxMessageBytes,
               where_, ": expected a message of this library, got other bytes from pid ",
               peer_pid_);
  received_.append(bytes + 1, static_cast<size_t>(count) - 1);
  std::move(fds.begin(), fds.end(), std::back_inserter(received_fds_));
  return last;
}

Message Connection::finish_message() {
  const std::string bytes = std::exchange(received_, {});
  Message message{nullptr, std::exchange(received_fds_, {})};
  nlohmann::json parsed = nlohmann::json::from_cbor(bytes, true, false);
  ENGRAM_CHECK(parsed.is_array() && parsed.size() == 2 && parsed[1].is_number_unsigned(), where_,
               ": expected a message of this library, got other bytes from pid ", peer_pid_);
  ENGRAM_CHECK(parsed[1] == message.fds.size(), where_, ": expected ", parsed[1].get<uint64_t>(),
               " descriptors from pid ", peer_pid_, ", got ", message.fds.size());
  message.data = std::move(parsed[0]);
  return message;
}

std::optional<Message> Connection::take() {
  while (const std::optional<bool> last = take_packet()) {
    if (*last) return finish_message();
  }
  return std::nullopt;
}

void Connection::send(const Message& message, Deadline deadline) {
  queue(message.data, handles_of(message));
  while (!flush()) {
    if (wait_for(fd(), POLLOUT, deadline) && steady_clock::now() < deadline) continue;
    queued_.clear();
    throw Error(ENGRAM_INTERNAL_ERROR, concat(where_, ": expected pid ", peer_pid_,
                                              " to receive in time, found that it does not read"));
  }
}

}  // namespace engram
