// SPDX-License-Identifier: Apache-2.0
#include "table/group.h"

#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>

#include "ranks.h"

namespace engram {
namespace {

using Body = std::function<std::string(Group&)>;

std::string new_name() {
  static std::atomic<int> count{0};
  return concat("test/", getpid(), "/", ++count);
}

//! A timeout that ends no test: who waits for it is waited for no more.
constexpr double kNever = 10 * kPatience;

GroupOptions options_of(const std::string& name, int32_t rank, int32_t size,
                        double timeout = kNever) {
  return {.name = name, .rank = rank, .size = size, .timeout_s = timeout};
}

//! Body's text or the Error's, "TIME: TEXT" apart; descriptors that it leaves are told too.
std::string run_rank(const GroupOptions& options, const Body& body,
                     const std::atomic<bool>& cancelled) {
  const size_t before = count_descriptors();
  std::string text;
  try {
    Group group(options, cancelled);
    text = body(group);
  } catch (const Error& error) {
    text = error.what();
  }
  const size_t after = count_descriptors();
  return after == before ? text : concat(text, " LEFT ", after - before, " descriptors");
}

Process start(const GroupOptions& options, const Body& body) {
  return Process([=] {
    const std::atomic<bool> cancelled{false};
    return run_rank(options, body, cancelled);
  });
}

std::vector<Process> start_all(const std::string& name, int32_t size, const Body& body,
                               double timeout = kNever) {
  std::vector<Process> ranks;
  for (int32_t rank = 0; rank < size; ++rank) {
    ranks.push_back(start(options_of(name, rank, size, timeout), body));
  }
  return ranks;
}

Group::Part nothing(Group::Work&) { return {}; }

//! Works until it is cancelled.
Group::Part endless(Group::Work& work) {
  while (!work.cancelled()) sleep_s(0.002);
  throw Error(ENGRAM_INTERNAL_ERROR, "stopped, which is no news");
}

//! All results but those of `without` are `text`.
void check_all(std::vector<Process>& ranks, const std::string& text, int without = -1) {
  for (size_t i = 0; i < ranks.size(); ++i) {
    if (static_cast<int>(i) == without) continue;
    CAPTURE(i);
    CHECK(ranks[i].result() == text);
  }
}

FileDescriptor file_of(const std::string& text) {
  FileDescriptor made(memfd_create("text", MFD_CLOEXEC));
  if (write(made.get(), text.data(), text.size()) != static_cast<ssize_t>(text.size())) abort();
  return made;
}

std::string text_in(const FileDescriptor& file) {
  char bytes[64];
  const ssize_t count = pread(file.get(), bytes, sizeof(bytes), 0);
  return count < 0 ? "unreadable" : std::string(bytes, static_cast<size_t>(count));
}

//! Exchanges `num_fds` descriptors a rank and looks at all that come.
std::string exchange_files(Group& group, int round, int num_fds) {
  const auto name = [&](int rank, int i) { return concat(round, " of ", rank, ": ", i); };
  const auto parts = group.exchange("files", [&](Group::Work&) {
    Group::Part part{{{"rank", group.rank()}, {"large", std::string(50000, 'x')}}, {}};
    for (int i = 0; i < num_fds; ++i) part.fds.push_back(file_of(name(group.rank(), i)));
    return part;
  });
  if (static_cast<int32_t>(parts.size()) != group.size()) return "another number of parts";
  for (int32_t rank = 0; rank < group.size(); ++rank) {
    const Group::Part& part = parts[static_cast<size_t>(rank)];
    if (part.data.at("rank") != rank) return "a part out of order";
    if (static_cast<int>(part.fds.size()) != num_fds) return "another number of descriptors";
    for (int i = 0; i < num_fds; ++i) {
      if (text_in(part.fds[static_cast<size_t>(i)]) != name(rank, i)) return "another file";
    }
  }
  return "ok";
}

TEST_CASE("every rank gets every rank's part and descriptors, started in any order") {
  const std::string name = new_name();
  const auto body = [](Group& group) {
    std::string text = "ok";
    for (const int num_fds : {0, 1, 150}) {
      const std::string found = exchange_files(group, num_fds, num_fds);
      if (found != "ok") text = found;
    }
    return text;
  };
  std::vector<Process> ranks;
  for (const int32_t rank : {3, 1, 0, 2}) {
    ranks.push_back(start(options_of(name, rank, 4), body));
    sleep_s(0.1);
  }
  check_all(ranks, "ok");
  CHECK(!has_socket(name));
}

TEST_CASE("more descriptors under way than a user may have open only take longer") {
  if (skip_without_root()) return;
  const std::string name = new_name();
  std::vector<Process> ranks;
  for (int32_t rank = 0; rank < 4; ++rank) {
    ranks.emplace_back([=] {
      // Root would be let through.
      const rlimit limit{220, 220};
      if (setuid(kNobody) != 0 || setrlimit(RLIMIT_NOFILE, &limit) != 0) return std::string("no");
      const std::atomic<bool> cancelled{false};
      const auto body = [](Group& group) { return exchange_files(group, 0, 45); };
      return run_rank(options_of(name, rank, 4), body, cancelled);
    });
  }
  check_all(ranks, "ok");
}

TEST_CASE("groups of one name follow one another") {
  const std::string name = new_name();
  std::vector<Process> ranks;
  for (int32_t rank = 0; rank < 3; ++rank) {
    ranks.emplace_back([=] {
      const std::atomic<bool> cancelled{false};
      std::string text;
      for (int round = 0; round < 30; ++round) {
        text = run_rank(
            options_of(name, rank, 3),
            [&](Group& group) { return exchange_files(group, round, 2); }, cancelled);
        if (text != "ok") break;
      }
      return text;
    });
  }
  check_all(ranks, "ok");
}

TEST_CASE("a group of one needs no socket and no thread") {
  std::atomic<bool> cancelled{false};
  Progress progress;
  const size_t before = count_descriptors();
  Group group({}, cancelled, &progress);
  CHECK(count_descriptors() == before);
  const auto caller = std::this_thread::get_id();
  const auto parts = group.exchange("work", [&](Group::Work& work) {
    CHECK(std::this_thread::get_id() == caller);
    work.add_bytes(7);
    return Group::Part{"mine", {}};
  });
  REQUIRE(parts.size() == 1);
  CHECK(parts[0].data == "mine");
  CHECK(progress.done == 7);
  const auto fail = [](Group::Work&) -> Group::Part {
    throw Error(ENGRAM_INVALID_ARGUMENT, "FILE: cannot be read");
  };
  CHECK_THROWS_WITH_AS(group.exchange("work", fail), "FILE: cannot be read", Error);
  CHECK_THROWS_WITH_AS(group.exchange("work", nothing), "FILE: cannot be read", Error);
  Group other({}, cancelled);
  cancelled = true;
  CHECK_THROWS_WITH_AS(other.exchange("work", nothing), "cancelled", Error);
  CHECK_THROWS_WITH_AS(Group({}, cancelled), "cancelled", Error);
}

TEST_CASE("options that are no group's are refused") {
  const std::atomic<bool> cancelled{false};
  const auto make = [&](GroupOptions options) { Group group(options, cancelled); };
  CHECK_THROWS_WITH_AS(make({.rank = 2, .size = 2}), "group: rank: expected 0 to 1, got 2", Error);
  CHECK_THROWS_WITH_AS(make({.size = 0}), "group: size: expected 1 to 4096, got 0", Error);
  CHECK_THROWS_AS(make({.name = "", .size = 2}), Error);
  CHECK_THROWS_AS(make({.timeout_s = 0}), Error);
}

TEST_CASE("texts of all ranks that fail are joined, and thrown again") {
  const std::string name = new_name();
  const Signal both;
  auto ranks = start_all(name, 5, [&](Group& group) {
    group.exchange("plan", nothing);
    std::string texts;
    for (int i = 0; i < 2; ++i) {
      try {
        group.exchange("load", [&](Group::Work& work) -> Group::Part {
          // Neither looks whether another has failed, so both texts count.
          if (group.rank() == 1) {
            both.set();
            throw Error(ENGRAM_INVALID_ARGUMENT, "bad block");
          }
          if (group.rank() == 3) {
            both.wait();
            sleep_s(0.3);
            throw std::bad_alloc();
          }
          return endless(work);
        });
      } catch (const Error& error) {
        texts += concat(error.status(), " ", error.what(), "|");
      }
    }
    return texts;
  });
  const std::string once = "1 rank 1: bad block; rank 3: out of host memory|";
  check_all(ranks, once + once);
}

TEST_CASE("a rank that goes on after a failure is waited for, for a bounded time") {
  const Signal end;
  auto ranks = start_all(new_name(), 3, [&](Group& group) {
    group.exchange("load", [&](Group::Work& work) -> Group::Part {
      if (group.rank() == 1) throw Error(ENGRAM_INTERNAL_ERROR, "broken");
      if (group.rank() == 2) end.wait(kNever);
      return endless(work);
    });
    return std::string("no error");
  });
  CHECK(ranks[0].result() == "rank 1: broken");
  CHECK(ranks[1].result() == "rank 1: broken");
  end.set();
  CHECK(ranks[2].result() == "rank 1: broken");
}

TEST_CASE("kill -9 of any rank in any phase is every survivor's error, at once") {
  // Where the victim ends itself.
  enum Place { kMet, kInWork, kBetween, kSecondWork, kAfterPart };
  for (int victim = 0; victim < 3; ++victim) {
    for (const Place place : {kMet, kInWork, kBetween, kSecondWork, kAfterPart}) {
      CAPTURE(victim);
      CAPTURE(static_cast<int>(place));
      const double seconds = least_seconds(Group::kGraceSeconds, [&] {
        const std::string name = new_name();
        auto ranks = start_all(name, 3, [=](Group& group) {
          const auto die_at = [&](Place here) {
            if (place == here && group.rank() == victim) kill(getpid(), SIGKILL);
          };
          die_at(kMet);
          group.exchange("vote", [&](Group::Work&) {
            die_at(kInWork);
            return Group::Part{};
          });
          die_at(kBetween);
          std::thread late;
          if (place == kAfterPart && group.rank() == victim) {
            late = std::thread([] {
              sleep_s(0.3);
              kill(getpid(), SIGKILL);
            });
          }
          group.exchange("load", [&](Group::Work& work) {
            die_at(kSecondWork);
            if (group.rank() == victim) return Group::Part{};
            return endless(work);
          });
          return std::string("no error");
        });
        const pid_t pid = ranks[static_cast<size_t>(victim)].pid();
        for (int rank = 0; rank < 3; ++rank) {
          if (rank == victim) continue;
          const std::string text = ranks[static_cast<size_t>(rank)].result();
          CAPTURE(text);
          CHECK(text.find(concat("rank ", victim, ": died in ")) == 0);
          CHECK(text.find(concat("(pid ", pid, ")")) != text.npos);
          CHECK(text.find("LEFT") == text.npos);
        }
        CHECK(!has_socket(name));
      });
      CHECK(seconds < Group::kGraceSeconds);
    }
  }
}

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
  // A rank that has connected, and not said which it is.
  std::vector<Process> ranks;
  for (const int32_t rank : {0, 1}) ranks.push_back(start(options_of(name, rank, 3), met));
  const Process rank([&] {
    const Connection made = connect(address, deadline_after(kPatience));
    sleep_s(kNever);
    return std::string();
  });
  REQUIRE(ranks[0].connects(2));
  rank.signal(SIGKILL);
  check_all(ranks, concat("rank 2: did not come; pid ", rank.pid(), " died as it came"));
}

TEST_CASE("a death is noticed though a forked child keeps the socket open") {
  for (const int victim : {0, 1}) {
    const double seconds = least_seconds(Group::kGraceSeconds, [&] {
      const Signal end;
      auto ranks = start_all(new_name(), 3, [&](Group& group) {
        group.exchange("load", [&](Group::Work& work) {
          if (group.rank() == victim) {
            if (fork() == 0) {
              end.wait(kNever);
              _exit(0);
            }
            kill(getpid(), SIGKILL);
          }
          return endless(work);
        });
        return std::string("no error");
      });
      check_all(ranks,
                concat("rank ", victim, ": died in load (pid ",
                       ranks[static_cast<size_t>(victim)].pid(), ")"),
                victim);
      end.set();
    });
    CHECK(seconds < Group::kGraceSeconds);
  }
}

TEST_CASE("a rank that leaves the group is not one that died") {
  const std::string name = new_name();
  const Signal end;
  std::vector<Process> ranks;
  for (int32_t rank = 0; rank < 3; ++rank) {
    ranks.emplace_back([&, rank] {
      const std::atomic<bool> cancelled{false};
      const auto body = [](Group& group) {
        group.exchange("vote", nothing);
        if (group.rank() != 1) group.exchange("load", endless);
        return std::string("left");
      };
      const std::string text = run_rank(options_of(name, rank, 3), body, cancelled);
      if (rank == 1) end.wait();
      return text;
    });
  }
  const std::string text = ranks[0].result();
  CAPTURE(text);
  // Rank 0 may hear of it before its next phase.
  const std::string pid = concat(" (pid ", ranks[1].pid(), ")");
  const bool early = text == "rank 1: left the group in vote" + pid;
  CHECK((early || text == "rank 1: left the group in load" + pid));
  CHECK(ranks[2].result() == text);
  end.set();
  CHECK(ranks[1].result() == "left");
}

TEST_CASE("a stopped rank counts as dead after the timeout, and hears of it") {
  for (const int victim : {0, 1}) {
    auto ranks = start_all(
        new_name(), 3,
        [=](Group& group) {
          group.exchange("load", [&](Group::Work& work) {
            if (group.rank() == victim) kill(getpid(), SIGSTOP);
            return endless(work);
          });
          return std::string("no error");
        },
        5);
    const double begin = now_s();
    const Process& stopped = ranks[static_cast<size_t>(victim)];
    const std::string text =
        concat("rank ", victim, ": silent for 5 s in load (pid ", stopped.pid(), ")");
    check_all(ranks, text, victim);
    CHECK(now_s() - begin > 3);
    stopped.signal(SIGCONT);
    const std::string own = ranks[static_cast<size_t>(victim)].result();
    // Rank 0 hears nobody when it goes on: the others have left.
    if (victim != 0) CHECK(own == text);
    if (victim == 0) CHECK(own.find("rank 1: died in load") == 0);
  }
}

TEST_CASE("ranks that were all stopped for longer than the timeout go on") {
  const Signal at_work;
  const Signal go_on;
  auto ranks = start_all(
      new_name(), 3,
      [&](Group& group) {
        group.exchange("load", [&](Group::Work&) {
          at_work.set();
          go_on.wait();
          return Group::Part{};
        });
        return std::string("ok");
      },
      5);
  REQUIRE(at_work.wait_times(3));
  for (const Process& rank : ranks) rank.signal(SIGSTOP);
  sleep_s(7);
  for (const Process& rank : ranks) rank.signal(SIGCONT);
  go_on.set();
  check_all(ranks, "ok");
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

TEST_CASE("an interrupt on one rank ends all") {
  for (const int interrupted : {0, 1}) {
    for (const bool in_meeting : {false, true}) {
      CAPTURE(interrupted);
      CAPTURE(in_meeting);
      // In the meeting the missing rank is waited for: it would be told.
      const double most = in_meeting ? kPatience : Group::kGraceSeconds;
      const double seconds = least_seconds(most, [&] {
        const std::string name = new_name();
        const Signal interrupt;
        const int32_t num_there = in_meeting ? 2 : 3;
        std::vector<Process> ranks;
        for (int32_t rank = 0; rank < num_there; ++rank) {
          ranks.emplace_back([&, rank] {
            std::atomic<bool> cancelled{false};
            std::thread user;
            if (rank == interrupted) {
              user = std::thread([&] {
                interrupt.wait();
                cancelled = true;
              });
            }
            const std::string text = run_rank(
                options_of(name, rank, 3),
                [](Group& group) {
                  group.exchange("load", endless);
                  return std::string("no error");
                },
                cancelled);
            if (user.joinable()) user.join();
            return text;
          });
        }
        REQUIRE(ranks[0].connects(num_there - 1));
        sleep_s(0.4);  // and they work, where all are there
        interrupt.set();
        check_all(ranks, concat("rank ", interrupted, ": cancelled"));
      });
      CHECK(seconds < most);
    }
  }
}

TEST_CASE("progress is the sum of all ranks', on all ranks, while they work") {
  const std::string name = new_name();
  const Signal seen;
  const Signal all_have_seen;
  std::vector<Process> ranks;
  for (int32_t rank = 0; rank < 3; ++rank) {
    ranks.emplace_back([&, rank] {
      const std::atomic<bool> cancelled{false};
      Progress progress;
      Group group(options_of(name, rank, 3), cancelled, &progress);
      group.set_total_bytes(600);
      std::string text;
      group.exchange("load", [&](Group::Work& work) {
        work.add_bytes(100);
        comes_true([&] { return progress.done == 300; });
        text = concat(progress.done, " of ", progress.total);
        seen.set();
        all_have_seen.wait();
        work.add_bytes(100);
        return Group::Part{};
      });
      return concat(text, ", ", progress.done);
    });
  }
  CHECK(seen.wait_times(3));
  all_have_seen.set();
  check_all(ranks, "300 of 600, 600");
}

}  // namespace
}  // namespace engram
