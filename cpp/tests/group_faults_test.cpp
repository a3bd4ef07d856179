// SPDX-License-Identifier: Apache-2.0
// What ends a group once it has met: errors, deaths, silence, interrupts.
#include "groups.h"
#include "texts.h"

namespace engram {
namespace {

//! Works until it is cancelled.
Group::Part endless(Group::Work& work) {
  while (!work.cancelled()) sleep_s(0.002);
  throw Error(ENGRAM_INTERNAL_ERROR, "stopped, which is no news");
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

TEST_CASE("rank 0 that leaves after its parts is lost in the exchange that follows them") {
  const std::string name = new_name();
  Listener listener({"group/" + name, ""});
  const std::atomic<bool> cancelled{false};
  std::unique_ptr<Group> group;
  std::thread meeting([&] { group = std::make_unique<Group>(options_of(name, 1, 2), cancelled); });
  std::optional<Connection> hub = listener.accept(deadline_after(kPatience));
  REQUIRE(hub);
  for (const char* type : {"welcome", "met"}) {
    hub->send({{{"type", type}}, {}}, deadline_after(kPatience));
  }
  meeting.join();
  REQUIRE(group != nullptr);

  // Both wait for the rank, which looks only in an exchange.
  const nlohmann::json part{{"data", nullptr}, {"fds", 0}};
  hub->send({{{"type", "parts"}, {"done", 0}, {"parts", {part, part}}}, {}},
            deadline_after(kPatience));
  hub.reset();
  CHECK(group->exchange("plan", nothing).size() == 2);
  CHECK(message_of([&] { group->exchange("load", nothing); }) ==
        concat("rank 0: left the group in load (pid ", getpid(), ")"));
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

}  // namespace
}  // namespace engram
