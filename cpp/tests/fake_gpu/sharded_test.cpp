// SPDX-License-Identifier: Apache-2.0
// device_sharded with ranks as processes, on GPUs that are made of host memory.
#include "bound.h"
#include "table/upload.h"

namespace engram {
namespace {

//! Each rank says what body returns, or its Error.
std::vector<std::string> run_ranks(int count, const std::function<std::string(int)>& body) {
  Ranks ranks(count, [&](int rank, const Channel& channel) { channel.say(body(rank)); });
  std::vector<std::string> lines;
  for (int rank = 0; rank < count; ++rank) lines.push_back(ranks.line(rank));
  return lines;
}

TEST_CASE("every rank reads every part, each on a GPU that no other rank sees") {
  const ArrayFile file;
  for (const bool by_formula : {false, true}) {
    const Source source = by_formula ? formula_source() : file.source();
    const auto lines = run_ranks(3, [&](int rank) {
      see_only(kGpus[static_cast<size_t>(rank)]);
      Bound bound(rank, 3, source);
      const int64_t granule = 1;  // of the trial
      const bool own_alone =
          machine().created_bytes == bound.parts.part_bytes(rank) + granule * kGranuleBytes;
      return concat(bound.read(), own_alone ? "" : ", other memory than its part");
    });
    CHECK(lines == std::vector<std::string>(3, "0 wrong"));
  }
}

TEST_CASE("ranks may share a GPU, and be more than the granules") {
  const ArrayFile file;
  for (const int count : {1, 2, 8}) {
    const auto lines = run_ranks(count, [&](int rank) {
      see_only(kGpus[0]);
      return Bound(rank, count, file.source(), rank % 2 == 0).read();
    });
    CHECK(lines == std::vector<std::string>(static_cast<size_t>(count), "0 wrong"));
  }
}

TEST_CASE("nothing is left, and who is killed takes nothing along") {
  Ranks ranks(3, [&](int rank, const Channel& channel) {
    see_only(kGpus[static_cast<size_t>(rank)]);
    {
      Bound bound(rank, 3, formula_source());
      channel.say(bound.read());
      channel.wait();
      channel.say(bound.read());
    }
    channel.say(concat(machine().num_handles, " handles, ", machine().num_mapped, " mapped, ",
                       machine().num_reserved, " reserved"));
  });
  for (int rank = 0; rank < 3; ++rank) CHECK(ranks.line(rank) == "0 wrong");
  ranks.kill(1);
  for (const int rank : {0, 2}) {
    ranks.go_on(rank);
    CHECK(ranks.line(rank) == "0 wrong");
    CHECK(ranks.line(rank) == "0 handles, 0 mapped, 0 reserved");
  }
}

TEST_CASE("a forked child's end unmaps nothing of its parent's") {
  see_only(kGpus[0]);
  auto bound = std::make_unique<Bound>(0, 1, formula_source());
  const pid_t child = fork();
  if (child == 0) {
    bound.reset();
    _exit(machine().num_mapped > 0 ? 0 : 1);
  }
  int status = -1;
  waitpid(child, &status, 0);
  CHECK(status == 0);
  CHECK(bound->read() == "0 wrong");
}

TEST_CASE("a pair of GPUs without peer access is named before anything is loaded") {
  for (const bool silent : {false, true}) {
    const auto lines = run_ranks(3, [&](int rank) {
      see_only(kGpus[static_cast<size_t>(rank)]);
      auto& pairs = silent ? machine().garbled : machine().refused;
      pairs = {{kGpus[0], kGpus[2]}, {kGpus[2], kGpus[0]}};
      return Bound(rank, 3, formula_source()).read();
    });
    const std::string why = silent ? concat(kGranuleBytes, " wrong bytes of ", kGranuleBytes)
                                   : "granule: access for GPU ";
    for (const std::string& line : lines) {
      CAPTURE(line);
      CHECK(line.find(concat("rank 0: GPU ", kGpus[0], " cannot read the memory of ", kGpus[2],
                             " of rank 2 (")) != std::string::npos);
      CHECK(line.find(concat("rank 2: GPU ", kGpus[2], " cannot read the memory of ", kGpus[0],
                             " of rank 0 (")) != std::string::npos);
      CHECK(line.find(kGpus[1]) == std::string::npos);
      if (!silent) CHECK(line.find(why) != std::string::npos);
    }
  }
}

TEST_CASE("what one rank cannot do is every rank's error") {
  const auto blind = run_ranks(2, [&](int rank) {
    see_only(kGpus[0]);
    machine().shares = rank == 0;
    return Bound(rank, 2, formula_source()).read();
  });
  const std::string cannot =
      concat("error: rank 1: GPU ", kGpus[0],
             ": expected memory that is mapped in steps (cuMemMap), found none");
  CHECK(blind == std::vector<std::string>(2, cannot));

  const ArrayFile spoilt(true);
  const auto bad = run_ranks(2, [&](int rank) {
    see_only(kGpus[static_cast<size_t>(rank)]);
    return Bound(rank, 2, spoilt.source(), rank == 1).read();
  });
  for (const std::string& line : bad) {
    CAPTURE(line);
    CHECK(line.find("error: rank 1: ") == 0);
    CHECK(line.find(": block 0 of engram.1.values (bytes 1003 to ") != std::string::npos);
  }
}

TEST_CASE("verifying needs sums") {
  see_only(kGpus[0]);
  const ArrayFile file;
  Source source = file.source();
  source.file.block_sums.clear();
  CHECK_THROWS_WITH_AS(
      Bound(0, 1, source),
      concat(source.file.file, ": engram.1.values: expected 1 block sums to verify, found 0")
          .c_str(),
      Error);
  CHECK(Bound(0, 1, source, false).read() == "0 wrong");
}

TEST_CASE("tables of more columns than descriptors may travel at a time") {
  const std::vector<int64_t> columns(130, 2 * kGranuleBytes / kRowBytes);
  const auto lines = run_ranks(2, [&](int rank) {
    see_only(kGpus[static_cast<size_t>(rank)]);
    std::atomic<bool> cancelled{false};
    Group group(group_options(rank, 2), cancelled);
    const Parts parts(columns, kRowBytes, 2);
    const PeerGpus gpus(group, 0);
    ShardedArray array(group, gpus, parts, "wide");
    // Each rank writes a word into each of its runs.
    auto* const bytes = const_cast<uint8_t*>(array.on_device(0));
    group.exchange("load", [&](Group::Work&) {
      for (const Parts::Run& run : parts.runs()) {
        if (run.rank == rank) std::memcpy(bytes + run.begin, &run.begin, sizeof(run.begin));
      }
      return Group::Part{};
    });
    int wrong = 0;
    for (const Parts::Run& run : parts.runs()) {
      wrong += std::memcmp(bytes + run.begin, &run.begin, sizeof(run.begin)) != 0;
    }
    return concat(parts.runs().size(), " runs, ", wrong, " wrong");
  });
  CHECK(lines == std::vector<std::string>(2, "260 runs, 0 wrong"));
}

TEST_CASE("heads: a rank's columns alone are uploaded") {
  const ArrayFile file;
  see_only(kGpus[0]);
  for (int rank = 0; rank < 3; ++rank) {
    const HeadSplit split = split_heads(kColumns, rank, 3);
    const int64_t begin = split.first_row * kRowBytes;
    const int64_t num_bytes = split.num_rows * kRowBytes;
    for (const Source& source : {file.source(), formula_source()}) {
      std::vector<uint8_t> bytes(static_cast<size_t>(num_bytes));
      upload(SourceReader(source), {{begin, begin + num_bytes, bytes.data()}}, {.verify = true});
      CHECK(num_wrong(bytes.data(), num_bytes, begin) == 0);
    }
  }
}

TEST_CASE("sources and groups that do not fit an array are refused") {
  see_only(kGpus[0]);
  const Bound bound(0, 1, formula_source());
  Source shorter = formula_source();
  shorter.file.num_bytes -= 1;
  CHECK_THROWS_WITH_AS(bound.array->load(SourceReader(shorter), false, {}, {}),
                       concat("engram.1.values: expected ", num_bytes_of(kColumns),
                              " bytes, found ", shorter.file.num_bytes)
                           .c_str(),
                       Error);
  std::atomic<bool> cancelled{false};
  Group alone(group_options(0, 1), cancelled);
  const PeerGpus gpus(alone, 0);
  CHECK_THROWS_WITH_AS(ShardedArray(alone, gpus, Parts(kColumns, kRowBytes, 2), "x"),
                       "x: expected parts for 1 ranks, found 2", Error);
}

}  // namespace
}  // namespace engram
