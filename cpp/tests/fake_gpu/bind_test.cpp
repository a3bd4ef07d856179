// SPDX-License-Identifier: Apache-2.0
// Whole binds by several processes, with GPUs that are made of host memory: what these refuse to
// register, and what they have no room for.
#include "table/bind.h"

#include <cuda_runtime_api.h>

#include <tuple>

#include "../stores.h"
#include "../texts.h"
#include "fake_gpus.h"
#include "table/parts.h"
#include "table/seat.h"

namespace engram {
namespace {

using fake::machine;

constexpr int kRanks = 3;
const std::vector<std::string> kGpus{"0000:1B:00.0", "0000:3B:00.0", "0000:9C:00.0"};

std::string new_group() {
  static int count = 0;
  return concat("fake-bind/", getpid(), "/", ++count);
}

TablesByName bind_rank(const Bindings& bindings, const std::string& group, int rank,
                       int size = kRanks) {
  BindState state;
  const GroupOptions options{.name = group, .rank = rank, .size = size, .timeout_s = kPatience};
  return bind_tables(bindings, options, state, [] {});
}

int num_mapped() {
  std::ifstream maps("/proc/self/maps");
  int count = 0;
  for (std::string line; std::getline(maps, line);) {
    count += line.find("trtllm-engram:") != line.npos;
  }
  return count;
}

//! What this process has now.
std::string held() {
  const auto& all = machine();
  return concat(count_descriptors(), " descriptors, ", num_mapped(), " mapped, ",
                all.registered.size(), " registered, ", all.num_handles, " handles, ",
                fake::num_made(), " buffers, ", fake::has_pending_error(), " errors");
}

//! What each rank says of itself, in processes of their own.
std::vector<std::string> run_ranks(const std::function<std::string(int)>& body) {
  std::vector<Process> ranks;
  for (int rank = 0; rank < kRanks; ++rank) ranks.emplace_back([&, rank] { return body(rank); });
  std::vector<std::string> said;
  for (Process& rank : ranks) said.push_back(rank.result());
  return said;
}

TEST_CASE("a registration refused on one rank is every rank's error, and nothing stays") {
  const Folder store;
  write_store(store);
  const Bindings bindings = bindings_of(store);
  for (int victim = 0; victim < kRanks; ++victim) {
    CAPTURE(victim);
    const std::string group = new_group();
    const auto said = run_ranks([&](int rank) -> std::string {
      machine().visible = {kGpus[static_cast<size_t>(rank)]};
      bind_rank(bindings, group, rank);  // what is opened once
      const std::string before = held();
      machine().registers = rank != victim;
      const std::string text = message_of([&] { bind_rank(bindings, group, rank); });
      const std::string after = held();
      machine().registers = true;
      const TablesByName tables = bind_rank(bindings, group, rank);
      return concat(text, after == before ? "" : concat(" and a leak: ", before, "; ", after),
                    "; then ", look_at(tables), ", ", machine().registered.size(), " registered");
    });
    CAPTURE(said[0]);
    CHECK(said == std::vector<std::string>(kRanks, said[0]));
    CHECK(
        said[0].starts_with(concat("rank ", victim, ": one.values: registration of bytes 0 to ")));
    CHECK(has(said[0], " with CUDA device 0: an error"));
    CHECK(said[0].ends_with("; then right, 4 registered"));
    CHECK(said[0].find("leak") == std::string::npos);
    CHECK(!has_socket(group));
  }
}

//! What of a store's two tables a rank's GPU holds.
int64_t bytes_of(Placement placement, Placement scales, int rank) {
  const std::vector<int64_t> columns(4, kStoreRows / 4);
  int64_t bytes = 0;
  for (const auto& [where, row_bytes] :
       {std::pair(placement, kStoreHeadDim), std::pair(scales, kStoreHeadDim / 32)}) {
    if (where == Placement::kDevice) bytes += kStoreRows * row_bytes;
    if (where == Placement::kDeviceSharded) {
      bytes += Parts(columns, row_bytes, kRanks).part_bytes(rank);
    }
  }
  return 2 * bytes;
}

//! What the hot rows of two host tables take where all are adaptive: buckets of 4 for twice as many
//! rows as there are, each with its scales and a word.
int64_t hot_bytes() {
  const int row_bytes = kStoreHeadDim + kStoreHeadDim / 32;
  return 2 * ((2 * kStoreRows + 3) / 4) * 4 * (row_bytes + int64_t{sizeof(uint64_t)});
}

TEST_CASE("a GPU too small for its ranks' tables is told with the numbers, before any is taken") {
  const Folder store;
  write_store(store);
  for (const auto& [placement, scales, hot] :
       {std::tuple(Placement::kDevice, Placement::kDevice, false),
        std::tuple(Placement::kDeviceSharded, Placement::kDeviceSharded, false),
        std::tuple(Placement::kHost, Placement::kDevice, false),
        std::tuple(Placement::kHost, Placement::kHost, true)}) {
    CAPTURE(placement_name(placement));
    CAPTURE(hot);
    Bindings bindings = bindings_of(store);
    for (auto& [name, options] : bindings.tables) {
      options.placement = placement;
      options.scales = scales;
      if (hot) options.hot_adaptive = 1;
    }
    const int64_t needed = bytes_of(placement, scales, 0) + bytes_of(placement, scales, 2) +
                           (hot ? 2 * hot_bytes() : 0);
    REQUIRE(needed > 0);
    // So small a table has no granule for rank 0.
    const char* const who = placement == Placement::kDeviceSharded ? "rank 2" : "ranks 0, 2";
    for (const bool enough : {true, false}) {
      const std::string group = new_group();
      const auto said = run_ranks([&](int rank) -> std::string {
        machine().visible = {kGpus[rank == 1 ? 1 : 0]};  // ranks 0 and 2 share one
        machine().free_bytes[kGpus[0]] = enough ? needed : needed - 1;
        const std::string text = message_of([&] { bind_rank(bindings, group, rank); });
        const bool took = machine().created_bytes > 0 || fake::num_made() > 0 || num_mapped() > 0;
        return concat(text, !enough && took ? " and some was taken" : "");
      });
      const std::string refusal = concat("GPU ", kGpus[0], ": expected ", needed, " bytes (");
      const std::string found =
          concat(" of free memory for the tables of ", who, ", found ", needed - 1, " bytes (");
      for (const std::string& text : said) {
        CAPTURE(text);
        CHECK(text.starts_with(enough ? "no error" : refusal));
        CHECK((text.find(found) != text.npos) != enough);
        CHECK(text.find("taken") == text.npos);
      }
    }
  }
}

TEST_CASE("ranks take the GPUs in turn where their threads have chosen none, and then have none") {
  machine().visible = {kGpus[0], kGpus[1]};
  fake::current_context = nullptr;
  for (const int rank : {0, 1, 2, 3}) {
    CHECK(choose_device(rank) == rank % 2);
    CHECK(fake::current_context == nullptr);
  }
  REQUIRE(cudaSetDevice(0) == cudaSuccess);
  CHECK(choose_device(1) == 0);
  fake::current_context = nullptr;
}

TEST_CASE("a process alone is told where its thread has chosen a GPU") {
  const Folder store;
  write_store(store);
  Bindings bindings = bindings_of(store);
  for (auto& [name, options] : bindings.tables) {
    options.placement = options.scales = Placement::kDevice;
  }
  machine().visible = {kGpus[0], kGpus[1]};  // as this process has them in other tests
  machine().free_bytes[kGpus[0]] = 100;
  fake::current_context = nullptr;
  CHECK(message_of([&] { bind_rank(bindings, new_group(), 0, 1); }) == "no error");
  REQUIRE(cudaSetDevice(0) == cudaSuccess);
  const std::string text = message_of([&] { bind_rank(bindings, new_group(), 0, 1); });
  CHECK(text.starts_with(concat("GPU ", kGpus[0], ": expected ",
                                bytes_of(Placement::kDevice, Placement::kDevice, 0), " bytes ")));
  CHECK(has(text, " for the tables of rank 0, found 100 bytes "));
  fake::current_context = nullptr;
  machine().free_bytes.clear();
}

}  // namespace
}  // namespace engram
