// SPDX-License-Identifier: Apache-2.0
// device_sharded with ranks as processes, on GPUs that are made of host memory.
#include <algorithm>
#include <filesystem>
#include <fstream>

#include "fake_gpus.h"
#include "ranks.h"
#include "table/block_sums.h"
#include "table/group.h"
#include "table/load.h"
#include "table/sharded_table.h"
#include "table/upload.h"

namespace engram {
namespace {

using fake::machine;

const std::vector<std::string> kGpus{"0000:1B:00.0", "0000:3B:00.0", "0000:9C:00.0"};
constexpr int64_t kRowBytes = 256;
constexpr uint64_t kSeed = 5;
const std::vector<int64_t> kColumns{30000, 41000, 52003};  // 7 to 13 MB

FormulaKey formula_key() { return {1, FormulaTensor::kValues, kSeed}; }

int64_t num_bytes_of(const std::vector<int64_t>& columns) {
  int64_t rows = 0;
  for (const int64_t count : columns) rows += count;
  return rows * kRowBytes;
}

//! An array's file, which begins at an odd place.
class File {
 public:
  static constexpr int64_t kOffset = 1003;

  explicit File(bool spoilt = false)
      : path_(std::filesystem::temp_directory_path() /
              ("engram-sharded-" + std::to_string(getpid()))) {
    const int64_t num_bytes = num_bytes_of(kColumns);
    std::vector<uint8_t> bytes(static_cast<size_t>(num_bytes));
    fill_formula(formula_key(), 0, num_bytes, bytes.data());
    source_ = {"engram.1.values", {path_.string(), kOffset, num_bytes, {}}, std::nullopt};
    for (int64_t begin = 0; begin < num_bytes; begin += kBlockBytes) {
      const int64_t count = std::min(kBlockBytes, num_bytes - begin);
      source_.file.block_sums.push_back(block_sum(bytes.data() + begin, count));
    }
    if (spoilt) bytes.back() ^= 1;
    std::ofstream file(path_, std::ios::binary);
    file << std::string(kOffset, 'x');
    file.write(reinterpret_cast<const char*>(bytes.data()), num_bytes);
  }
  ~File() { std::filesystem::remove(path_); }
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  const Source& source() const { return source_; }

 private:
  std::filesystem::path path_;
  Source source_;
};

Source formula_source() {
  return {"engram.1.values", {"no file", 0, num_bytes_of(kColumns), {}}, formula_key()};
}

GroupOptions group_options(int rank, int size) {
  GroupOptions options;
  options.name = "sharded-test-" + std::to_string(size == 1 ? getpid() : getppid());
  options.rank = rank;
  options.size = size;
  options.timeout_s = 60;
  return options;
}

//! Bytes that are not the formula's from `first_byte` on.
int64_t num_wrong(const uint8_t* bytes, int64_t num_bytes, int64_t first_byte = 0) {
  std::vector<uint8_t> right(static_cast<size_t>(num_bytes));
  fill_formula(formula_key(), first_byte, num_bytes, right.data());
  int64_t wrong = 0;
  for (int64_t i = 0; i < num_bytes; ++i) wrong += bytes[i] != right[static_cast<size_t>(i)];
  return wrong;
}

void load(Group& group, ShardedArray& array, const Source& source, bool verify) {
  group.exchange("load", [&](Group::Work& work) {
    const SourceReader reader(source);
    int64_t done = 0;
    std::mutex mutex;
    array.load(
        reader, verify, [&] { return work.cancelled(); },
        [&](int64_t count) {
          const std::lock_guard lock(mutex);
          done += count;
        });
    const int64_t expected = array.parts().filled_bytes(group.rank());
    if (done != expected) throw Error(ENGRAM_INTERNAL_ERROR, concat("told of ", done, " bytes"));
    return Group::Part{};
  });
}

//! Binds an array on this rank; what is thrown is every rank's Error.
struct Bound {
  Bound(int rank, int size, const Source& source, bool verify = true)
      : parts(kColumns, kRowBytes, size), group(group_options(rank, size), cancelled) {
    const PeerGpus gpus(group, 0, parts.part_bytes(rank));
    array = std::make_unique<ShardedArray>(group, gpus, parts, "engram.1.values");
    load(group, *array, source, verify);
  }
  std::string read() {
    return concat(num_wrong(array->on_device(0), array->parts().num_bytes()), " wrong");
  }

  std::atomic<bool> cancelled{false};
  Parts parts;
  Group group;
  std::unique_ptr<ShardedArray> array;
};

//! Each rank says what body returns, or its Error.
std::vector<std::string> run_ranks(int count, const std::function<std::string(int)>& body) {
  Ranks ranks(count, [&](int rank, const Channel& channel) { channel.say(body(rank)); });
  std::vector<std::string> lines;
  for (int rank = 0; rank < count; ++rank) lines.push_back(ranks.line(rank));
  return lines;
}

void see_only(const std::string& gpu) { machine().visible = {gpu}; }

TEST_CASE("every rank reads every part, each on a GPU that no other rank sees") {
  const File file;
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
  const File file;
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

TEST_CASE("a GPU too small for its ranks' parts is told with the numbers, before it is filled") {
  const Parts parts(kColumns, kRowBytes, 3);
  const int64_t needed = parts.part_bytes(0) + parts.part_bytes(2);
  for (const bool enough : {true, false}) {
    const auto lines = run_ranks(3, [&](int rank) {
      see_only(kGpus[rank == 1 ? 1 : 0]);
      machine().free_bytes[kGpus[0]] = enough ? needed : needed - 1;
      return Bound(rank, 3, formula_source()).read();
    });
    const std::string expected =
        enough ? "0 wrong"
               : concat("error: GPU ", kGpus[0], ": expected ", needed,
                        " bytes of free memory for the parts of 2 ranks, found ", needed - 1);
    CHECK(lines == std::vector<std::string>(3, expected));
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

  const File spoilt(true);
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
  const File file;
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
    const PeerGpus gpus(group, 0, parts.part_bytes(rank));
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
  const File file;
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
  const PeerGpus gpus(alone, 0, 0);
  CHECK_THROWS_WITH_AS(ShardedArray(alone, gpus, Parts(kColumns, kRowBytes, 2), "x"),
                       "x: expected parts for 1 ranks, found 2", Error);
}

}  // namespace
}  // namespace engram
