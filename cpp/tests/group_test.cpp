// SPDX-License-Identifier: Apache-2.0
// What ranks exchange, one call after another.
#include <sys/resource.h>

#include "groups.h"

namespace engram {
namespace {

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
