// SPDX-License-Identifier: Apache-2.0
// Where listeners are found: abstract names, and sockets in the file system.
#include <fcntl.h>
#include <poll.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include <atomic>
#include <cstddef>
#include <thread>

#include "table/files.h"
#include "table/log.h"
#include "table/peer.h"

namespace engram {
namespace {

using std::chrono::steady_clock;

constexpr int kNumNames = 8;  // K of the abstract names
constexpr int kBacklog = 1024;
constexpr double kLockSeconds = 10;
constexpr std::chrono::milliseconds kRetry{20};

[[noreturn]] void fail(const std::string& where, const char* what) {
  throw Error(ENGRAM_INTERNAL_ERROR, concat(where, ": cannot ", what, ": ", std::strerror(errno)));
}

struct SocketAddress {
  sockaddr_un value{};
  socklen_t size = 0;
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&value); }
};

//! Names that are too long for a socket keep their beginning and get a hash (FNV-1a).
std::string short_name(const std::string& name) {
  constexpr size_t kMost = 64;
  constexpr size_t kKept = 40;
  if (name.size() <= kMost) return name;
  uint64_t hash = 0xCBF29CE484222325;
  for (const char each : name) hash = (hash ^ static_cast<unsigned char>(each)) * 0x100000001B3;
  return concat(name.substr(0, kKept), "-", std::hex, hash);
}

SocketAddress abstract_address(const std::string& name) {
  SocketAddress made;
  made.value.sun_family = AF_UNIX;
  std::memcpy(made.value.sun_path + 1, name.data(), name.size());  // a first byte of 0: abstract
  made.size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return made;
}

SocketAddress abstract_address(const Address& address, int k) {
  return abstract_address(
      concat("trtllm-engram/", geteuid(), "/", short_name(address.name), "/", k));
}

//! Before the word of who connects; after it come a slash and what makes the name the only one.
std::string word_prefix() { return concat("trtllm-engram/", geteuid(), "/as/"); }

SocketAddress path_address(const Address& address) {
  SocketAddress made;
  ENGRAM_CHECK(address.path.size() < sizeof(made.value.sun_path), address.path,
               ": expected a socket's path of at most ", sizeof(made.value.sun_path) - 1,
               " bytes, got ", address.path.size());
  made.value.sun_family = AF_UNIX;
  std::memcpy(made.value.sun_path, address.path.data(), address.path.size());
  made.size = sizeof(made.value);
  return made;
}

FileDescriptor new_socket(const std::string& where) {
  FileDescriptor made(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!made) fail(where, "make a socket");
  return made;
}

//! A connection, or why there is none in errno.
FileDescriptor connected(const SocketAddress& to, const std::string& where,
                         const std::string& word = "") {
  FileDescriptor made = new_socket(where);
  if (!word.empty()) {
    static std::atomic<int> count{0};
    const SocketAddress from =
        abstract_address(concat(word_prefix(), word, "/", getpid(), "/", ++count));
    // One of another PID namespace may have the name: then it goes without.
    static_cast<void>(!bind(made.get(), from.get(), from.size));
  }
  int result;
  do {
    result = ::connect(made.get(), to.get(), to.size);
  } while (result != 0 && errno == EINTR);
  if (result != 0) {
    const int error = errno;
    made.reset();
    errno = error;
  }
  return made;
}

//! Who changes a path socket's file holds its folder's lock; the folder is one to trust.
class FolderLock {
 public:
  explicit FolderLock(const std::string& path) {
    const std::string folder = folder_of(path);
    check_trusted_folder(folder);
    folder_.reset(open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    if (!folder_) fail(folder, "open");
    const Deadline deadline = deadline_after(kLockSeconds);
    while (flock(folder_.get(), LOCK_EX | LOCK_NB) != 0) {
      if (errno != EWOULDBLOCK && errno != EINTR) fail(folder, "lock");
      ENGRAM_CHECK(steady_clock::now() < deadline, folder, ": expected to lock it within ",
                   kLockSeconds, " s, found that another process keeps it locked");
      std::this_thread::sleep_for(kRetry);
    }
  }

 private:
  FileDescriptor folder_;
};

//! Whether a socket of this user is at the path; refuses anything else that is.
bool has_socket(const std::string& path) {
  struct stat status{};
  if (lstat(path.c_str(), &status) != 0) {
    if (errno != ENOENT) fail(path, "look for a socket");
    return false;
  }
  ENGRAM_CHECK(S_ISSOCK(status.st_mode), path,
               ": expected a socket or nothing, found another file");
  ENGRAM_CHECK(status.st_uid == geteuid(), path, ": expected nothing or a socket of this user (",
               geteuid(), "), found one of user ", status.st_uid);
  return true;
}

//! By who holds the lock: makes sure that there is no file at the path.
void clear_path(const std::string& path, const SocketAddress& address) {
  if (!has_socket(path)) return;
  const FileDescriptor there = connected(address, path);
  if (there || errno == EAGAIN) {
    const pid_t pid = there ? peer_user(there.get()).pid : 0;
    throw AddressInUse(concat(path, ": expected nobody to listen there, found pid ", pid), pid);
  }
  if (errno != ECONNREFUSED && errno != ENOENT) fail(path, "tell whether it is in use");
  if (unlink(path.c_str()) != 0 && errno != ENOENT) fail(path, "remove the stale socket");
}

}  // namespace

std::string address_text(const Address& address) {
  return address.path.empty() ? concat("socket '", address.name, "'") : address.path;
}

void check_address(const Address& address) {
  if (address.path.empty()) return;
  path_address(address);
  const std::string folder = folder_of(address.path);
  struct stat status{};
  if (stat(folder.c_str(), &status) != 0 && errno == ENOENT) return;
  check_trusted_folder(folder);
  has_socket(address.path);
}

Listener::Listener(const Address& address) : address_(address), owner_(getpid()) {
  if (address.path.empty()) {
    listen_at_name();
  } else {
    listen_at_path();
  }
}

void Listener::listen_at_name() {
  const std::string where = address_text(address_);
  std::string taken;
  int own = -1;
  for (int k = 0; k < kNumNames && own < 0; ++k) {
    const SocketAddress name = abstract_address(address_, k);
    FileDescriptor made = new_socket(where);
    if (bind(made.get(), name.get(), name.size) == 0) {
      own = k;
      socket_ = std::move(made);
      if (listen(socket_.get(), kBacklog) != 0) fail(where, "listen");
    } else if (errno != EADDRINUSE) {
      fail(where, "take the name");
    }
  }
  // NOTE: after listen(): of two who start at once at least one sees the other.
  for (int k = 0; k < kNumNames; ++k) {
    if (k == own) continue;
    const FileDescriptor there = connected(abstract_address(address_, k), where);
    if (!there) continue;
    const PeerUser peer = peer_user(there.get());
    if (peer.uid == geteuid()) {
      throw AddressInUse(concat(where, ": expected nobody to listen there, found pid ", peer.pid),
                         peer.pid);
    }
    taken = peer.text();
  }
  ENGRAM_CHECK(own >= 0, where, ": expected a free name among ", kNumNames,
               ", found all taken by others (", taken.empty() ? "they do not answer" : taken,
               "); a path for the socket helps");
}

void Listener::listen_at_path() {
  const std::string& path = address_.path;
  const SocketAddress address = path_address(address_);
  const FolderLock lock(path);
  clear_path(path, address);
  socket_ = new_socket(path);
  // NOTE: before bind(), which gives the file the socket's mode: it never has another.
  if (fchmod(socket_.get(), 0600) != 0) fail(path, "restrict the socket to its user");
  if (bind(socket_.get(), address.get(), address.size) != 0) fail(path, "make the socket");
  struct stat status{};
  const bool listens = listen(socket_.get(), kBacklog) == 0;
  if (!listens || lstat(path.c_str(), &status) != 0) {
    const int error = errno;
    unlink(path.c_str());
    errno = error;
    fail(path, "listen");
  }
  path_file_ = status.st_ino;
}

// NOTE: unlinked while it listens: nobody takes it for stale and replaces it meanwhile.
Listener::~Listener() {
  if (address_.path.empty() || path_file_ == 0 || getpid() != owner_) return;
  struct stat status{};
  if (lstat(address_.path.c_str(), &status) == 0 && status.st_ino == path_file_) {
    unlink(address_.path.c_str());
  }
}

std::optional<Connection> Listener::accept(Deadline deadline) {
  const std::string where = address_text(address_);
  for (;;) {
    FileDescriptor made(accept4(fd(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (made) {
      const PeerUser peer = peer_user(made.get());
      if (peer.uid == geteuid()) return Connection(std::move(made), where);
      // Once: others can connect as often as they like.
      if (turned_away_.empty()) {
        log(LogLevel::kWarning, concat(where, ": turned away ", peer.text()));
      }
      turned_away_ = peer.text();
      if (steady_clock::now() < deadline) continue;
      return std::nullopt;
    }
    if (errno == EINTR || errno == ECONNABORTED) continue;
    if (errno != EAGAIN && errno != EWOULDBLOCK) fail(where, "accept connections");
    pollfd entry{.fd = fd(), .events = POLLIN};
    if (poll(&entry, 1, milliseconds_until(deadline)) <= 0 && steady_clock::now() >= deadline) {
      return std::nullopt;
    }
  }
}

std::string Connection::peer_word() const {
  SocketAddress from;
  from.size = sizeof(from.value);
  auto* const address = reinterpret_cast<sockaddr*>(&from.value);
  constexpr size_t kBegin = offsetof(sockaddr_un, sun_path) + 1;
  if (getpeername(fd(), address, &from.size) != 0 || from.size <= kBegin) return "";
  const std::string name(from.value.sun_path + 1, from.size - kBegin);
  const std::string prefix = word_prefix();
  if (!name.starts_with(prefix)) return "";
  return name.substr(prefix.size(), name.find('/', prefix.size()) - prefix.size());
}

std::optional<Connection> try_connect(const Address& address, std::string* passed_over,
                                      const std::string& word) {
  const std::string where = address_text(address);
  if (!address.path.empty()) {
    FileDescriptor made = connected(path_address(address), where, word);
    if (made) return Connection(std::move(made), where);
    if (errno == ENOENT || errno == ECONNREFUSED || errno == EAGAIN) return std::nullopt;
    fail(where, "connect");
  }
  for (int k = 0; k < kNumNames; ++k) {
    FileDescriptor made = connected(abstract_address(address, k), where, word);
    if (!made) continue;
    const PeerUser peer = peer_user(made.get());
    if (peer.uid == geteuid()) return Connection(std::move(made), where);
    if (passed_over != nullptr) *passed_over = peer.text();
  }
  return std::nullopt;
}

void remove_stale(const Address& address) noexcept {
  if (address.path.empty()) return;
  try {
    const FolderLock lock(address.path);
    clear_path(address.path, path_address(address));
  } catch (const std::exception&) {
    // Not stale, or not ours: it stays.
  }
}

}  // namespace engram
