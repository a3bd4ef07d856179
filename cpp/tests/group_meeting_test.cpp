// SPDX-License-Identifier: Apache-2.0
// How ranks meet, and what becomes of those who do not.
#include <sys/socket.h>
#include <sys/un.h>

#include "groups.h"
#include "sockets.h"

namespace engram {
namespace {

TEST_CASE("kill -9 in the meeting") {
  for (const int victim : {0, 1}) {
    for (const bool by_path : {false, true}) {
      CAPTURE(victim);
      CAPTURE(by_path);
      const Folder folder;
      const std::string name = new_name();
      const auto start_rank = [&](int32_t rank, double timeout = kNever) {
        GroupOptions options = options_of(name, rank, 4, timeout);
        if (by_path) options.socket = folder.path() + "/group";
        return start(options, [](Group& group) {
          group.exchange("vote", nothing);
          return std::string("no error");
        });
      };
      std::vector<Process> ranks;
      for (const int32_t rank : {0, 1, 2}) ranks.push_back(start_rank(rank));
      for (const Process& rank : ranks) REQUIRE(rank.connects(&rank == &ranks[0] ? 2 : 1));
      sleep_s(0.5);  // the first word of each is read
      ranks[static_cast<size_t>(victim)].signal(SIGKILL);
      CHECK(ranks[static_cast<size_t>(victim)].result().empty());
      const std::string pid = concat(" (pid ", ranks[static_cast<size_t>(victim)].pid(), ")");
      const std::string text = concat("rank ", victim, ": died in the meeting", pid);
      if (victim == 0) {
        check_all(ranks, text, 0);
        const std::string where = by_path ? concat("to ", folder.path(), "/group ") : "";
        CHECK(start_rank(3, 3).result() == concat("rank 0: never came ", where, "within 3 s"));
      } else {
        // Who comes soon after hears of it, unless the meeting has ended before the death is seen.
        const std::string found = start_rank(3).result();
        CAPTURE(found);
        CHECK((found == text || found == concat("rank 1: died in vote", pid)));
        check_all(ranks, found, 1);
      }
      CHECK(!has_socket(name));
      CHECK(folder.names().empty());
    }
  }
}

//! A process that connects to rank 0, and says nothing.
Process silent(const Address& address, const std::string& word) {
  return Process([=] {
    const Connection made = connect(address, word);
    sleep_s(kNever);
    return std::string();
  });
}

TEST_CASE("kill -9 before the first word is an error soon, not only after the timeout") {
  const std::string name = new_name();
  const Address address{"group/" + name, ""};
  const auto met = [](Group&) { return std::string("met"); };
  const Signal there;
  {
    // Rank 0 listens, and says nothing.
    const Process hub([&] {
      const Listener listener(address);
      there.set();
      sleep_s(kNever);
      return std::string();
    });
    REQUIRE(there.wait());
    Process spoke = start(options_of(name, 1, 3), met);
    REQUIRE(spoke.connects(1));
    hub.signal(SIGKILL);
    CHECK(spoke.result() == concat("rank 0: died in the meeting (pid ", hub.pid(), ")"));
  }
  // A rank that has connected, and said nothing.
  std::vector<Process> ranks;
  for (const int32_t rank : {0, 1}) ranks.push_back(start(options_of(name, rank, 3), met));
  const Process rank = silent(address, "rank2");
  REQUIRE(ranks[0].connects(2));
  rank.signal(SIGKILL);
  check_all(ranks, concat("rank 2: did not come; pid ", rank.pid(), " died as it came"));
}

TEST_CASE("kill -9 of who comes again, or is no rank, shortens nobody's wait") {
  const auto met = [](Group&) { return std::string("met"); };
  for (const char* const word : {"rank2", "", "rank7"}) {
    CAPTURE(word);
    const std::string name = new_name();
    const Address address{"group/" + name, ""};
    const bool comes_again = word == std::string("rank2");
    const double timeout_s = comes_again ? kPatience : Group::kGraceSeconds + 2;
    std::vector<Process> ranks;
    ranks.push_back(start(options_of(name, 0, 3, timeout_s), met));
    const Process stranger = silent(address, word);
    REQUIRE(ranks[0].connects(1));
    stranger.signal(SIGKILL);
    REQUIRE(ranks[0].connects(0));
    ranks.push_back(start(options_of(name, 1, 3, timeout_s), met));
    if (comes_again) ranks.push_back(start(options_of(name, 2, 3, timeout_s), met));
    check_all(ranks, comes_again ? "met" : concat("rank 2: never came within ", timeout_s, " s"));
  }
}

TEST_CASE("a rank that never comes is named by all who came, after the timeout") {
  const std::string name = new_name();
  const auto met = [](Group&) { return std::string("met"); };
  std::vector<Process> ranks;
  const double begin = now_s();
  for (const int32_t rank : {0, 2}) ranks.push_back(start(options_of(name, rank, 4, 4), met));
  check_all(ranks, "ranks 1, 3: never came within 4 s");
  CHECK(now_s() - begin > 3.9);
  CHECK(start(options_of(name, 1, 2, 1), met).result() == "rank 0: never came within 1 s");
}

TEST_CASE("a rank that came twice is an error of all, with both pids") {
  for (const int twice : {0, 1}) {
    const std::string name = new_name();
    const auto start_rank = [&](int32_t rank) {
      return start(options_of(name, rank, 4), [](Group&) { return std::string("met"); });
    };
    std::vector<Process> ranks;
    for (const int32_t rank : {0, 1, 2}) ranks.push_back(start_rank(rank));
    REQUIRE(ranks[0].connects(2));
    ranks.push_back(start_rank(twice));
    // A second rank 0 ends once the first is told; else that may wait for this one.
    if (twice == 0) ranks[3].result();
    if (twice != 0) REQUIRE(ranks[0].connects(3));
    sleep_s(0.5);  // its first word is read
    ranks.push_back(start_rank(3));
    const std::string text = concat(
        "rank ", twice, ": came twice (pids ", ranks[static_cast<size_t>(twice)].pid(), " and ",
        ranks[3].pid(), "): expected each rank once; two jobs need two group names");
    check_all(ranks, text);
  }
}

TEST_CASE("who came for a group of another size has come: nobody waits for more") {
  const auto met = [](Group&) { return std::string("met"); };
  const auto text = [](int32_t rank, int32_t expected, int32_t found, const Process& process) {
    return concat("rank ", rank, ": expected a group of ", expected, ", as on rank 0, got ", found,
                  " (pid ", process.pid(), ")");
  };
  for (const int32_t other : {2, 4}) {
    const double seconds = least_seconds(Group::kGraceSeconds, [&] {
      const std::string name = new_name();
      std::vector<Process> ranks;
      for (const int32_t rank : {0, 1, 2}) {
        ranks.push_back(start(options_of(name, rank, rank == 1 ? other : 3), met));
      }
      std::string texts = text(1, 3, other, ranks[1]);
      if (other == 4) {
        ranks.push_back(start(options_of(name, 3, other), met));
        texts += "; " + text(3, 3, other, ranks[3]);
      }
      check_all(ranks, texts);
    });
    CHECK(seconds < Group::kGraceSeconds);
  }
}

TEST_CASE("sizes and phases that differ are an error of all") {
  const std::string name = new_name();
  const auto met = [](Group&) { return std::string("met"); };
  std::vector<Process> ranks;
  for (const int32_t rank : {0, 1}) ranks.push_back(start(options_of(name, rank, 3), met));
  sleep_s(0.3);
  ranks.push_back(start(options_of(name, 2, 4), met));
  check_all(ranks, concat("rank 2: expected a group of 3, as on rank 0, got 4 (pid ",
                          ranks[2].pid(), ")"));

  auto others = start_all(new_name(), 3, [](Group& group) {
    group.exchange(group.rank() == 1 ? "map" : "load", nothing);
    return std::string("no error");
  });
  check_all(others, "rank 1: expected to be in load, found in map");
}

TEST_CASE("another group at the same path refuses, and goes on") {
  const Folder folder;
  const auto start_rank = [&](const std::string& name, int32_t rank) {
    GroupOptions options = options_of(name, rank, 2);
    options.socket = folder.path() + "/group";
    return start(options, [](Group&) { return std::string("met"); });
  };
  std::vector<Process> ranks;
  ranks.push_back(start_rank("mine", 0));
  const std::string refused = start_rank("other", 1).result();
  CHECK(refused == folder.path() + "/group: expected group 'other', found 'mine'");
  ranks.push_back(start_rank("mine", 1));
  check_all(ranks, "met");
  CHECK(folder.names().empty());
}

TEST_CASE("other users' sockets in the way neither capture nor block a rank") {
  if (skip_without_root()) return;
  const std::string name = new_name();
  const Signal ready;
  Process foreign([&] {
    if (setuid(kNobody) != 0) return std::string("no");
    // A listener of that user under root's name.
    std::vector<FileDescriptor> taken;
    for (int k = 0; k < 3; ++k) {
      taken.emplace_back(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
      const std::string full = concat("trtllm-engram/0/group/", name, "/", k);
      sockaddr_un address{};
      address.sun_family = AF_UNIX;
      std::memcpy(address.sun_path + 1, full.data(), full.size());
      const auto size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + full.size());
      if (bind(taken.back().get(), reinterpret_cast<const sockaddr*>(&address), size) != 0) abort();
      listen(taken.back().get(), 8);
    }
    ready.set();
    sleep_s(kNever);
    return std::string();
  });
  REQUIRE(ready.wait());
  const auto body = [](Group& group) { return exchange_files(group, 0, 1); };
  CHECK(start(options_of(name, 1, 3, 1), body).result() ==
        concat("rank 0: never came within 1 s; where it should listen is pid ", foreign.pid(),
               " of user 65534"));
  auto ranks = start_all(name, 3, body);
  check_all(ranks, "ok");
}

}  // namespace
}  // namespace engram
