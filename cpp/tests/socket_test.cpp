// SPDX-License-Identifier: Apache-2.0
#include "table/socket.h"

#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include <atomic>

#include "sockets.h"
#include "texts.h"

namespace engram {
namespace {

Address new_address() {
  static std::atomic<int> count{0};
  return {concat("test/", getpid(), "/", ++count), ""};
}

std::pair<Connection, Connection> new_pair() {
  int ends[2];
  REQUIRE(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) == 0);
  return {Connection(FileDescriptor(ends[0]), "here"), Connection(FileDescriptor(ends[1]), "here")};
}

//! A memfd that holds a number.
FileDescriptor numbered_file(int number) {
  FileDescriptor made(memfd_create("numbered", MFD_CLOEXEC));
  REQUIRE(write(made.get(), &number, sizeof(number)) == sizeof(number));
  return made;
}

int number_of(const FileDescriptor& file) {
  int number = -1;
  REQUIRE(pread(file.get(), &number, sizeof(number), 0) == sizeof(number));
  return number;
}

template <typename Fn>
std::string text_of(const Fn& fn) {
  try {
    fn();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "nothing was thrown";
}

//! A listening socket at an abstract name or a path, as another program would make it.
FileDescriptor raw_listener(const std::string& name, bool abstract = true) {
  FileDescriptor made(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path + (abstract ? 1 : 0), name.data(), name.size());
  const auto size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  if (bind(made.get(), reinterpret_cast<const sockaddr*>(&address), size) != 0) return {};
  listen(made.get(), 8);
  return made;
}

TEST_CASE("a message's bytes and descriptors arrive, however many") {
  auto [here, there] = new_pair();
  std::thread receiver;
  for (const size_t num_fds : {size_t{0}, size_t{1}, size_t{128}, size_t{300}}) {
    for (const size_t num_bytes : {size_t{0}, size_t{1} << 14, size_t{3} << 20}) {
      Message message{{{"text", std::string(num_bytes, 'x')}, {"name", "not UTF-8: \xFF\xFE"}}, {}};
      for (size_t i = 0; i < num_fds; ++i) {
        message.fds.push_back(numbered_file(static_cast<int>(i)));
      }
      std::thread sender([&, &from = here] { from.send(message, deadline_after(kPatience)); });
      const Message got = receive(there);
      sender.join();
      CHECK(got.data == message.data);
      REQUIRE(got.fds.size() == num_fds);
      for (size_t i = 0; i < num_fds; ++i) {
        REQUIRE(number_of(got.fds[i]) == static_cast<int>(i));
        REQUIRE((fcntl(got.fds[i].get(), F_GETFD) & FD_CLOEXEC) != 0);
      }
    }
  }
}

TEST_CASE("what the other end has not read is known") {
  auto [here, there] = new_pair();
  CHECK(here.unread_bytes() <= 1);
  here.send({std::string(5000, 'x'), {}}, deadline_after(kPatience));
  CHECK(here.unread_bytes() >= 5000);
  receive(there);
  CHECK(here.unread_bytes() <= 1);
}

TEST_CASE("waiting ends at the deadline") {
  auto [here, there] = new_pair();
  const double start = now_s();
  const Message large{std::string(8 << 20, 'x'), {}};
  const auto send = [&, &to = here] { to.send(large, deadline_after(0.2)); };
  CHECK(has(text_of(send), "found that it does not read"));
  CHECK(now_s() - start > 0.15);
  CHECK(now_s() - start < kPatience);
}

TEST_CASE("what was sent before the other end closed is received") {
  auto [here, there] = new_pair();
  here.send({"unread", {}}, deadline_after(kPatience));
  {
    const Connection closing = std::move(there);
    Connection& sender = const_cast<Connection&>(closing);
    sender.send({"last words", {}}, deadline_after(kPatience));
  }
  CHECK(receive(here).data == "last words");
  CHECK_THROWS_AS(receive(here), Disconnected);
  CHECK_THROWS_AS(here.send({"more", {}}, deadline_after(kPatience)), Disconnected);
}

TEST_CASE("bytes that are no message are refused") {
  for (const std::string& bytes : {std::string("hello"), std::string(".\x82"), std::string("."),
                                   std::string(".\x82\x01\x05"), std::string(40000, '+')}) {
    int ends[2];
    REQUIRE(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) == 0);
    const FileDescriptor raw(ends[0]);
    Connection there(FileDescriptor(ends[1]), "here");
    REQUIRE(write(raw.get(), bytes.data(), bytes.size()) == static_cast<ssize_t>(bytes.size()));
    CHECK(has(text_of([&] { receive(there); }), "here: expected "));
  }
}

TEST_CASE("descriptors beyond the limit of open files are an error with the limit") {
  Process process([] {
    auto [here, there] = new_pair();
    const size_t before = count_descriptors();
    Message message;
    for (int i = 0; i < 50; ++i) message.fds.push_back(numbered_file(i));
    here.send(message, deadline_after(kPatience));
    message.fds.clear();
    const rlimit limit{20, 20};
    setrlimit(RLIMIT_NOFILE, &limit);
    const std::string text = text_of([&, &to = there] { receive(to); });
    return concat(text, ", ", count_descriptors() - before, " left");
  });
  const std::string text = process.result();
  CHECK(has(text, "at its limit of 20 open files"));
  CHECK(has(text, ", 0 left"));
}

TEST_CASE("a listener and who connects, by name and by path") {
  const Folder folder;
  for (const bool by_path : {false, true}) {
    Address address = new_address();
    if (by_path) address.path = folder.path() + "/listener";
    CHECK(!try_connect(address));
    {
      Listener listener(address);
      CHECK(!listener.accept(deadline_after(0.05)));
      Process process([&] {
        Connection made = connect(address);
        made.send({"from there", {}}, deadline_after(kPatience));
        return concat(made.peer_pid() == getppid());
      });
      std::optional<Connection> made = listener.accept(deadline_after(kPatience));
      REQUIRE(made);
      CHECK(made->peer_pid() == process.pid());
      CHECK(receive(*made).data == "from there");
      CHECK(process.result() == "1");
      CHECK(has(text_of([&] { Listener second(address); }),
                concat("expected nobody to listen there, found pid ", getpid())));
      if (by_path) {
        struct stat status{};
        REQUIRE(lstat(address.path.c_str(), &status) == 0);
        CHECK((status.st_mode & 07777) == 0600);
      }
    }
    CHECK(!has_socket(address.name));
    CHECK(folder.names().empty());
  }
}

TEST_CASE("a listener's forked child leaves its path alone") {
  const Folder folder;
  Address address = new_address();
  address.path = folder.path() + "/listener";
  auto listener = std::make_unique<Listener>(address);
  CHECK(Process([&] {
          listener.reset();
          return std::string("closed");
        }).result() == "closed");
  CHECK(try_connect(address));
  listener.reset();
  CHECK(folder.names().empty());
}

TEST_CASE("a path of a process that was killed is replaced, by one of many") {
  const Folder folder;
  Address address = new_address();
  address.path = folder.path() + "/listener";
  for (int round = 0; round < 5; ++round) {
    const Signal listens;
    Process killed([&] {
      const Listener listener(address);
      listens.set();
      sleep_s(10 * kPatience);
      return std::string();
    });
    REQUIRE(listens.wait());
    killed.signal(SIGKILL);
    CHECK(killed.result().empty());
    CHECK(folder.names().size() == 1);
    std::vector<Process> rivals;
    const Signal tried;
    const Signal end;
    for (int i = 0; i < 4; ++i) {
      rivals.emplace_back([&] {
        try {
          const Listener listener(address);
          tried.set();
          end.wait();
          return std::string("won");
        } catch (const Error& error) {
          tried.set();
          return std::string(error.what());
        }
      });
    }
    CHECK(connect(address).peer_pid() > 0);
    CHECK(tried.wait_times(4));
    end.set();
    int won = 0;
    for (Process& rival : rivals) {
      const std::string text = rival.result();
      won += text == "won" ? 1 : 0;
      if (text != "won") CHECK(has(text, "expected nobody to listen there"));
    }
    CHECK(won == 1);
    CHECK(folder.names().empty());
  }
}

TEST_CASE("remove_stale removes what nobody listens at, and nothing else") {
  const Folder folder;
  Address address = new_address();
  address.path = folder.path() + "/listener";
  remove_stale(address);
  raw_listener(address.path, false).reset();
  CHECK(folder.names().size() == 1);
  remove_stale(address);
  CHECK(folder.names().empty());
  const Listener listener(address);
  remove_stale(address);
  CHECK(folder.names().size() == 1);
}

TEST_CASE("paths that are not safe are refused by name") {
  const Folder folder;
  Address address = new_address();
  address.path = folder.path() + "/listener";
  const auto refusal = [&] {
    const std::string refused = text_of([&] { Listener listener(address); });
    // Who waits for a listener there is told the same, once there is a folder.
    const std::string waiting = text_of([&] { check_address(address); });
    const bool missing = refused.find("No such file") != refused.npos;
    CHECK(waiting == (missing ? "nothing was thrown" : refused));
    return refused;
  };
  check_address(address);
  std::ofstream(address.path).put('x');
  CHECK(has(refusal(), address.path + ": expected a socket or nothing, found another file"));
  unlink(address.path.c_str());
  chmod(folder.path().c_str(), 0777);
  CHECK(has(refusal(), folder.path() + ": expected nobody but the owner"));
  chmod(folder.path().c_str(), 0700);
  if (is_root()) {
    raw_listener(address.path, false).reset();
    REQUIRE(chown(address.path.c_str(), kNobody, kNobody) == 0);
    CHECK(has(refusal(), "found one of user 65534"));
    unlink(address.path.c_str());
  }
  raw_listener(address.path, false).reset();
  check_address(address);  // a stale one of this user's is rank 0's to replace
  address.path = folder.path() + "/" + std::string(120, 'x');
  CHECK(has(refusal(), "expected a socket's path of at most 107 bytes"));
  address.path = folder.path() + "/missing/listener";
  CHECK(has(refusal(), "/missing: cannot read: No such file"));
}

//! Another user's process, at the first names where a listener of this user would be.
std::string take_names(const Address& address, int num_names, const Signal& ready) {
  REQUIRE(setuid(kNobody) == 0);
  std::vector<FileDescriptor> taken;
  for (int k = 0; k < num_names; ++k) {
    taken.push_back(raw_listener(concat("trtllm-engram/0/", address.name, "/", k)));
  }
  ready.set();
  sleep_s(10 * kPatience);
  return "";
}

TEST_CASE("other users' sockets are passed over, and they are turned away") {
  if (skip_without_root()) return;
  const Address address = new_address();
  const Signal ready;
  Process foreign([&] { return take_names(address, 2, ready); });
  REQUIRE(ready.wait());
  std::string passed_over;
  CHECK(!try_connect(address, &passed_over));
  CHECK(passed_over == concat("pid ", foreign.pid(), " of user 65534"));
  Listener listener(address);
  std::optional<Connection> made = try_connect(address);
  REQUIRE(made);
  CHECK(made->peer_pid() == getpid());
  CHECK(listener.accept(deadline_after(kPatience)));
  Process intruder([&] {
    FileDescriptor raw(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
    const std::string name = concat("trtllm-engram/0/", address.name, "/2");
    sockaddr_un to{};
    to.sun_family = AF_UNIX;
    std::memcpy(to.sun_path + 1, name.data(), name.size());
    REQUIRE(setuid(kNobody) == 0);
    const auto size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
    if (connect(raw.get(), reinterpret_cast<const sockaddr*>(&to), size) != 0) return "not there";
    char byte;
    return read(raw.get(), &byte, 1) == 0 ? "closed" : "heard something";
  });
  CHECK(!listener.accept(deadline_after(0.5)));
  CHECK(intruder.result() == "closed");
  CHECK(listener.turned_away() == concat("pid ", intruder.pid(), " of user 65534"));
}

TEST_CASE("a name that others have taken whole is an error with a way out") {
  if (skip_without_root()) return;
  const Address address = new_address();
  const Signal ready;
  Process foreign([&] { return take_names(address, 8, ready); });
  REQUIRE(ready.wait());
  CHECK(has(text_of([&] { Listener listener(address); }),
            concat("found all taken by others (pid ", foreign.pid(), " of user 65534)")));
}

}  // namespace
}  // namespace engram
