// SPDX-License-Identifier: Apache-2.0
#include "table/bind.h"

#include <fcntl.h>
#include <sys/mman.h>

#include <cstring>

#include "engram/engram.h"
#include "stores.h"
#include "table/block_sums.h"
#include "table/plan.h"
#include "table/record.h"
#include "table/seat.h"
#include "texts.h"

namespace engram {
namespace {

using Kinds = std::vector<std::pair<MemoryKind, std::string>>;

Vote vote_of(const Kinds& kinds, const std::string& content = "c", int node = 0,
             int gpu_node = -1) {
  Vote vote{.node = node, .gpu_node = gpu_node};
  vote.tables["t"] = {.same = {{"content id", content}}, .kinds = kinds};
  return vote;
}

std::string refusal(const std::map<std::string, TableOptions>& tables,
                    const std::vector<Vote>& votes) {
  try {
    make_plan(tables, votes);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

const Kinds kFirst{{MemoryKind::kMemfd, ""}, {MemoryKind::kShm, ""}};

std::map<std::string, TableOptions> one_table(NumaPolicy numa = {}) {
  std::map<std::string, TableOptions> tables;
  tables["t"].numa = numa;
  return tables;
}

}  // namespace

TEST_CASE("plan: the first kind of memory that all ranks can have, and why not an earlier one") {
  const Vote can = vote_of(kFirst);
  const Vote cannot = vote_of({{MemoryKind::kMemfd, "no memfd"}, {MemoryKind::kShm, ""}});
  const Plan first = make_plan(one_table(), {can, can});
  CHECK(first.tables.at("t").kind == MemoryKind::kMemfd);
  CHECK(first.warnings.empty());
  const Plan second = make_plan(one_table(), {can, cannot});
  CHECK(second.tables.at("t").kind == MemoryKind::kShm);
  REQUIRE(second.warnings.size() == 1);
  CHECK(second.warnings[0] ==
        "table 't': memory shm is taken: memfd cannot be had: rank 1: no memfd");
  const Vote shm_cannot = vote_of({{MemoryKind::kMemfd, ""}, {MemoryKind::kShm, "no shm"}});
  CHECK(refusal(one_table(), {shm_cannot, cannot}) ==
        "table 't': memory: memfd cannot be had: rank 1: no memfd; shm cannot be had: rank 0: no "
        "shm");
  const Vote no_node = vote_of({{MemoryKind::kMemfd, "no node"}, {MemoryKind::kShm, "no node"}});
  CHECK(refusal(one_table(), {can, no_node, no_node}) ==
        "table 't': memory: memfd, shm cannot be had: ranks 1, 2: no node");
  CHECK(refusal(one_table(), {no_node}) == "table 't': memory: memfd, shm cannot be had: no node");
}

TEST_CASE("plan: GPUs whose NUMA node is not known are told of where there are several nodes") {
  const auto warnings_of = [](size_t num_nodes, NumaPolicy numa) {
    Vote near = vote_of(kFirst, "c", 0, 0);
    Vote unknown = vote_of(kFirst, "c", 0, -1);
    near.limits.nodes.resize(num_nodes);
    unknown.limits.nodes.resize(num_nodes);
    return make_plan(one_table(numa), {near, unknown, unknown}).warnings;
  };
  REQUIRE(warnings_of(2, {NumaPolicy::kGpu}).size() == 1);
  CHECK(warnings_of(2, {NumaPolicy::kGpu})[0] ==
        "table 't': numa gpu: the default is taken: ranks 1, 2: no NUMA node next to its GPU is "
        "known");
  CHECK(warnings_of(2, {}).empty());
  CHECK(warnings_of(1, {NumaPolicy::kGpu}).empty());
}

TEST_CASE("check: the first fault of tables that would be bound, and nothing is") {
  const Folder store;
  write_store(store);
  const auto fault = [](const Bindings& bindings) -> std::string {
    try {
      check_tables(bindings);
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  Bindings bindings = bindings_of(store);
  CHECK(fault(bindings) == "");
  bindings.tables.at("two").layer = 7;
  CHECK(fault(bindings).starts_with("table 'two': " + store.path()));
  bindings.tables.at("one").expect_content = "another";
  CHECK(fault(bindings) == "table 'one': " + store.path() +
                               ": expected tables with content id another, found formula:0");
  bindings.failure = Error(ENGRAM_INVALID_ARGUMENT, "wrong text");
  CHECK(fault(bindings) == "wrong text");
}

TEST_CASE("plan: ranks that want different tables") {
  const Vote first = vote_of(kFirst);
  CHECK(refusal(one_table(), {first, first, vote_of(kFirst, "d"), vote_of(kFirst, "e")}) ==
        "rank 2: table 't': content id: expected c as on rank 0, found d; rank 3: table 't': "
        "content id: expected c as on rank 0, found e");
  Vote other = first;
  other.tables["u"] = {};
  CHECK(refusal(one_table(), {first, other}) ==
        "rank 1: table 'u': expected no such table, as on rank 0");
  CHECK(refusal(one_table(), {other, first}) ==
        "rank 1: table 'u': expected it to be bound as on rank 0, found that it is not");
}

TEST_CASE("plan: who shares a copy, and where it lies") {
  const auto copies_of = [](NumaPolicy numa, const Kinds& kinds, const std::vector<int>& nodes) {
    std::vector<Vote> votes;
    for (const int node : nodes) votes.push_back(vote_of(kinds, "c", node, node));
    return make_plan(one_table(numa), votes).tables.at("t").copies;
  };
  const auto shared = copies_of({}, kFirst, {0, 0, 1, 1});
  REQUIRE(shared.size() == 1);
  CHECK(shared[0].owner == 0);
  CHECK(shared[0].members == std::vector<int>{0, 1, 2, 3});
  CHECK(shared[0].share_of(2) == 2);

  const auto by_gpu = copies_of({NumaPolicy::kGpu}, kFirst, {1, 0, 1, 0});
  REQUIRE(by_gpu.size() == 2);
  CHECK(by_gpu[0].owner == 0);
  CHECK(by_gpu[0].members == std::vector<int>{0, 2});
  CHECK(by_gpu[0].numa == NumaPolicy{NumaPolicy::kNode, 1});
  CHECK(by_gpu[1].owner == 1);
  CHECK(by_gpu[1].share_of(3) == 1);
  CHECK_FALSE(by_gpu[1].share_of(2));

  const auto unknown = copies_of({NumaPolicy::kGpu}, kFirst, {-1, -1});
  REQUIRE(unknown.size() == 1);
  CHECK(unknown[0].numa == NumaPolicy{});

  const auto alone = copies_of({}, {{MemoryKind::kPrivate, ""}}, {0, 1});
  REQUIRE(alone.size() == 2);
  CHECK(alone[1].owner == 1);

  // Pages that ranks of two nodes touch are not each on a node of its own.
  CHECK(copies_of({NumaPolicy::kLocal}, kFirst, {1, 0})[0].numa ==
        NumaPolicy{NumaPolicy::kNode, 1});
  CHECK(copies_of({NumaPolicy::kLocal}, kFirst, {1, 1})[0].numa == NumaPolicy{NumaPolicy::kLocal});
}

TEST_CASE("plan: ranks touch what they load") {
  TablePlan plan{.kind = MemoryKind::kShm, .copies = {{.owner = 1, .members = {1, 2}}}};
  BlocksDealt dealt;
  const auto touched = [&](int64_t num_bytes) {
    const auto requests = room_requests("t", plan, PageKind::kAuto, num_bytes, 3, &dealt);
    REQUIRE(requests.size() == 1);
    CHECK(requests[0].creator == 1);
    return requests[0].touched;
  };
  CHECK(touched(2 * kBlockBytes + 5) == std::vector<int64_t>{0, kBlockBytes + 5, kBlockBytes});
  CHECK(touched(7) == std::vector<int64_t>{0, 0, 7});  // the fourth block of all
  CHECK(touched(0) == std::vector<int64_t>{0, 0, 0});
  CHECK(touched(7) == std::vector<int64_t>{0, 7, 0});
}

TEST_CASE("plan: a vote travels") {
  Vote vote = vote_of({{MemoryKind::kCumem, "none"}}, "c", 1, 2);
  vote.limits.assumed_bytes = 7;
  const Vote there = vote_from_json(to_json(vote));
  CHECK(there.tables.at("t").same == vote.tables.at("t").same);
  CHECK(there.tables.at("t").kinds == vote.tables.at("t").kinds);
  CHECK(there.node == 1);
  CHECK(there.gpu_node == 2);
  CHECK(there.limits.assumed_bytes == 7);
}

namespace {

//! Other processes of the user may hold tables.
bool has_record() {
  for (const auto& record : read_records()) {
    if (record.at("pid") == getpid()) return true;
  }
  return false;
}

std::string name_of_test() {
  static int count = 0;
  return concat("bind/", getpid(), "/", ++count);
}

}  // namespace

namespace {

//! NOTE: writes a zero where it can.
bool can_write(uint8_t* at) {
  const FileDescriptor zeros(open("/dev/zero", O_RDONLY | O_CLOEXEC));
  return read(zeros.get(), at, 1) == 1;
}

bool can_map_writable(const HostMemory& memory) {
  const auto size = static_cast<size_t>(memory.mapped_bytes());
  const int file = memory.descriptors().at(0).get();
  void* const mapped = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (mapped != MAP_FAILED) munmap(mapped, size);
  return mapped != MAP_FAILED || pwrite(file, "", 1, 0) == 1;
}

}  // namespace

TEST_CASE("bind: every rank reads every byte of one copy, and none can write to it") {
  const Folder store;
  write_store(store);
  for (const auto kind : {MemoryKind::kMemfd, MemoryKind::kShm, MemoryKind::kPrivate}) {
    Bindings bindings = bindings_of(store, 3);
    for (auto& [name, options] : bindings.tables) options.memory = kind;
    const std::string group = name_of_test();
    std::vector<Process> ranks;
    for (int rank = 0; rank < 3; ++rank) {
      ranks.emplace_back([&, rank]() -> std::string {
        BindState state;
        const TablesByName tables =
            bind_tables(bindings, {.name = group, .rank = rank, .size = 3, .timeout_s = kPatience},
                        state, [] {});
        if (state.progress.done != state.progress.total) return "progress is not complete";
        if (tables.at("one")->history().rank != rank) return "another rank";
        for (const auto& [name, table] : tables) {
          const HostMemory& memory = *table->values().host_memory();
          if (can_write(memory.data())) return "this rank can write";
          if (kind == MemoryKind::kMemfd && can_map_writable(memory)) return "others can write";
        }
        return look_at(tables, 3);
      });
    }
    for (Process& rank : ranks) CHECK(rank.result() == "right");
  }
}

TEST_CASE("bind: one rank's refusal is all ranks' error, and nothing is left") {
  const Folder store;
  write_store(store);
  const Bindings bindings = bindings_of(store);
  const std::string group = name_of_test();
  std::vector<Process> ranks;
  for (int rank = 0; rank < 3; ++rank) {
    ranks.emplace_back([&, rank]() -> std::string {
      const size_t before = count_descriptors();
      BindState state;
      std::string text = "no error";
      try {
        bind_tables(bindings, {.name = group, .rank = rank, .size = 3, .timeout_s = kPatience},
                    state, [&] { ENGRAM_CHECK(rank != 1, "no"); });
      } catch (const Error& error) {
        text = error.what();
      }
      return count_descriptors() == before && !has_record() ? text : text + " and a leak";
    });
  }
  for (Process& rank : ranks) CHECK(rank.result() == "rank 1: no");
}

TEST_CASE("bind: ranks that would deal out the blocks of a table otherwise are told on all") {
  const Folder store;
  write_store(store);
  const std::string group = name_of_test();
  std::vector<Process> ranks;
  for (int rank = 0; rank < 3; ++rank) {
    ranks.emplace_back([&, rank]() -> std::string {
      Bindings bindings = bindings_of(store);
      bindings.tables.at("two").verify = rank != 1;
      BindState state;
      bind_tables(bindings, {.name = group, .rank = rank, .size = 3, .timeout_s = kPatience}, state,
                  [] {});
      return "no error";
    });
  }
  for (Process& rank : ranks) {
    CHECK(rank.result() == "rank 1: table 'two': verify: expected true as on rank 0, found false");
  }
}

TEST_CASE("bind: what one rank cannot read of its file is all ranks' error") {
  const Folder store;
  write_store(store);
  // What rank 1 has in place of the others' text; what is wrong with that.
  struct Wrong {
    const char* text;
    const char* with;
    const char* error;
  };
  constexpr Wrong kWrong[] = {
      {"formula_seed", "colour", "table 'one': expected known keys, found 'colour'"},
      {"layer = 1", "layer = = 1", "line 9: expected TOML"},
      {"[tables.one]", "[tables.one", "line 7: expected TOML"},
      {"version = 1", "version = 2", "format_version: expected 1, found 2"},
      {"timeout_s = 1200", "timeout = 1200", "group: expected known keys, found 'timeout'"},
      {"timeout_s = 1200", "timeout_s = -1", "group: timeout_s: expected seconds, more than 0 and"},
      {"[tables.one]", "[table.one]", "expected known keys, found 'table'"},
      {"[tables.one]\nstore = \".\"\nlayer = 1\nformula_seed = 1\n", "",
       "table 'one': expected it to be bound as on rank 0, found that it is not"},
  };
  for (const Wrong& wrong : kWrong) {
    CAPTURE(std::string(wrong.with));
    const std::string group = name_of_test();
    std::vector<Process> ranks;
    for (int rank = 0; rank < 3; ++rank) {
      ranks.emplace_back([&, rank]() -> std::string {
        std::string text = concat(
            "format_version = 1\n[group]\nname = \"", group, "\"\nsize = 3\nrank = ", rank,
            "\ntimeout_s = 1200\n[tables.one]\nstore = \".\"\nlayer = 1\nformula_seed = 1\n");
        if (rank == 1) text.replace(text.find(wrong.text), std::strlen(wrong.text), wrong.with);
        try {
          TableRegistry::instance().bind(parse_tables(text, store.path(), "my.toml"));
        } catch (const Error& error) {
          return error.what();
        }
        return "no error";
      });
    }
    const std::string text = ranks[0].result();
    CHECK(has(text, "rank 1: "));
    CHECK(has(text, wrong.error));
    for (const size_t rank : {1, 2}) CHECK(ranks[rank].result() == text);
  }
}

TEST_CASE("bind: a rank that declines is all ranks' error, and needs no tables for it") {
  const Folder store;
  write_store(store);
  const std::string name = name_of_test();
  std::vector<Process> ranks;
  for (int rank = 0; rank < 3; ++rank) {
    ranks.emplace_back([&, rank]() -> std::string {
      const std::string group = concat("format_version = 1\n[group]\nname = \"", name,
                                       "\"\nsize = 3\ntimeout_s = 1200\nrank = ", rank, "\n");
      const std::string table = "[tables.one]\nstore = \".\"\nlayer = 1\nformula_seed = 1\n";
      const engram_status status =
          rank == 1 ? engram_table_decline(group.c_str(), "/", "", "no disk")
                    : engram_table_bind((group + table).c_str(), store.path().c_str(), "");
      return status == ENGRAM_INVALID_ARGUMENT ? engram_last_error() : "another status";
    });
  }
  for (Process& rank : ranks) CHECK(rank.result() == "rank 1: no disk");
}

TEST_CASE("bind: who has no place in a group hears of that alone, at once") {
  const Folder store;
  write_store(store);
  for (const char* const group : {"rank = 7\nsize = 2", "rank = 1", "size = = 2\nrank = 1"}) {
    CAPTURE(std::string(group));
    const Bindings bindings =
        parse_tables(concat("format_version = 1\n[group]\n", group), store.path(), "");
    REQUIRE(bindings.failure);
    CHECK(bindings.group.size == 1);
    CHECK(bindings.tables.empty());
    CHECK_THROWS_AS(TableRegistry::instance().bind(bindings), Error);
  }
  const std::string missing = store.path() + "/missing.toml";
  CHECK_THROWS_WITH(TableRegistry::instance().bind(parse_tables_file(missing)),
                    (missing + ": cannot read: No such file or directory").c_str());
}

TEST_CASE("bind: alone it meets nobody, and may be cancelled") {
  const Folder store;
  write_store(store);
  const Bindings bindings = bindings_of(store);
  BindState state;
  {
    const TablesByName tables = bind_tables(bindings, {}, state, [] {});
    CHECK(look_at(tables) == "right");
    CHECK(tables.at("one")->history().num_bytes == kStoreRows * (kStoreHeadDim + 2));
  }
  state.cancelled = true;
  CHECK_THROWS_WITH(bind_tables(bindings, {}, state, [] {}), "cancelled");
}

TEST_CASE("bind: a group as its settings say, or its launcher") {
  GroupSettings settings{.name = "mine", .rank = 1, .size = 2, .socket = "/s", .timeout_s = 3};
  const GroupOptions options = group_options(settings);
  CHECK(options.name == "mine");
  CHECK(options.rank == 1);
  CHECK(options.size == 2);
  CHECK(options.socket == "/s");
  CHECK(options.timeout_s == 3);
  settings.timeout_s.reset();
  CHECK(group_options(settings).timeout_s == 120);  // as the documents say
}

}  // namespace engram
