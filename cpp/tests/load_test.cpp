// SPDX-License-Identifier: Apache-2.0
#include "table/load.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>

#include "doctest/doctest.h"
#include "engram/error.h"
#include "made_file.h"
#include "table/pages.h"
#include "texts.h"

namespace engram {
namespace {

constexpr int64_t kOffset = 1000;
constexpr int64_t kArrayBytes = 2 * kBlockBytes + 12345;
constexpr uint8_t kUntouched = 0xEE;

//! An array of three blocks in a file, and memory for it.
struct Loading {
  Loading() : memory(kArrayBytes, kUntouched) {
    source.name = "engram.1.values";
    source.file = {file.path(), kOffset, kArrayBytes};
    File(file.path()).read(expected.data(), kArrayBytes, kOffset);
    for (int64_t begin = 0; begin < kArrayBytes; begin += kBlockBytes) {
      const int64_t num_bytes = std::min(kBlockBytes, kArrayBytes - begin);
      source.file.block_sums.push_back(block_sum(expected.data() + begin, num_bytes));
    }
  }

  std::vector<LoadTarget> targets(bool verify = false) {
    return {{memory.data(), kArrayBytes, &source, verify}};
  }

  const MadeFile file{kOffset + kArrayBytes + 99, true};
  std::vector<uint8_t> expected = std::vector<uint8_t>(kArrayBytes);
  std::vector<uint8_t> memory;
  Source source;
};

TEST_CASE("block sums are XXH3-128 as Python's xxhash gives it") {
  std::vector<uint8_t> bytes(256);
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<uint8_t>(i);
  CHECK(block_sum(bytes.data(), 0) == "99aa06d3014798d86001c324468d497f");
  CHECK(block_sum(bytes.data(), 256) == "f1f8a93f50849ac39408a4433b952d71");
  BlockSum sum;
  sum.add(bytes.data(), 100);
  sum.add(bytes.data() + 100, 156);
  CHECK(sum.hex() == block_sum(bytes.data(), 256));
}

TEST_CASE("shares load their blocks of all arrays, and no others") {
  Loading loading;
  // A second array, which has no file.
  Source made{.name = "engram.1.scales", .file = {"/nowhere", 0, kBlockBytes + 5}};
  made.formula = FormulaKey{2, FormulaTensor::kScales, 3};
  std::vector<uint8_t> made_memory(kBlockBytes + 5, kUntouched);
  std::vector<uint8_t> made_expected(kBlockBytes + 5);
  fill_formula(*made.formula, 0, kBlockBytes + 5, made_expected.data());
  const Loader loader({&loading.source, &made});
  CHECK(loader.stamps() == std::vector{stamp_file(loading.file.path())});

  for (const bool verify : {false, true}) {
    CAPTURE(verify);
    std::fill(loading.memory.begin(), loading.memory.end(), kUntouched);
    std::fill(made_memory.begin(), made_memory.end(), kUntouched);
    std::vector<LoadTarget> targets = loading.targets(verify);
    targets.push_back({made_memory.data(), kBlockBytes + 5, &made});
    std::atomic<int64_t> done{0};
    const auto run = [&](int share) {
      loader.run(targets,
                 {.share = share, .shares = 2, .add_bytes = [&](int64_t n) { done += n; }});
    };
    run(0);  // blocks 0 and 2 of the one, 1 of the other
    CHECK(done == kBlockBytes + 12345 + 5);
    CHECK(loading.memory[kBlockBytes] == kUntouched);
    CHECK(loading.memory[2 * kBlockBytes - 1] == kUntouched);
    CHECK(made_memory[0] == kUntouched);
    run(1);
    CHECK(done == kArrayBytes + kBlockBytes + 5);
    CHECK(loading.memory == loading.expected);
    CHECK(made_memory == made_expected);
  }
  CHECK_NOTHROW(loader.check_unchanged());
}

TEST_CASE("bytes are asked for before they are written, each once") {
  Loading loading;
  const Loader loader({&loading.source});
  for (const bool verify : {false, true}) {
    CAPTURE(verify);
    std::fill(loading.memory.begin(), loading.memory.end(), kUntouched);
    std::atomic<int64_t> asked{0};
    std::atomic<bool> early{true};
    std::vector<LoadTarget> targets = loading.targets(verify);
    targets[0].prefault = [&](int64_t begin, int64_t end) {
      asked += end - begin;
      for (int64_t at = begin; at < end; ++at) {
        if (loading.memory[static_cast<size_t>(at)] != kUntouched) early = false;
      }
      if (begin % kHugePageBytes != 0) early = false;
    };
    loader.run(targets, {.share = 0, .shares = 2});
    CHECK(early);
    CHECK(asked == share_bytes(kArrayBytes, 0, 0, 2));
    loader.run(targets, {.share = 1, .shares = 2});
    CHECK(asked == kArrayBytes);
    CHECK(loading.memory == loading.expected);
  }
  std::vector<LoadTarget> full = loading.targets();
  full[0].prefault = [](int64_t, int64_t) { throw Error(ENGRAM_OUT_OF_MEMORY, "full"); };
  CHECK(message_of([&] { loader.run(full, {}); }) == "full");
}

TEST_CASE("a bad block is told with its place and both sums") {
  Loading loading;
  const std::string good = loading.source.file.block_sums[1];
  const char changed = static_cast<char>(~loading.expected[kBlockBytes + 7]);
  REQUIRE(pwrite(loading.file.handle(), &changed, 1, kOffset + kBlockBytes + 7) == 1);
  const Loader loader({&loading.source});
  CHECK_NOTHROW(loader.run(loading.targets(), {}));
  const std::string bad = block_sum(loading.memory.data() + kBlockBytes, kBlockBytes);
  CHECK(message_of([&] { loader.run(loading.targets(true), {}); }) ==
        loading.file.path() +
            ": block 1 of engram.1.values (bytes 67109864 to 134218728): expected sum " + good +
            ", found " + bad);
  CHECK_NOTHROW(loader.run(loading.targets(true), {.share = 0, .shares = 2}));

  loading.source.file.block_sums.clear();
  const Loader without({&loading.source});
  CHECK(message_of([&] { without.run(loading.targets(true), {}); }) ==
        loading.file.path() + ": engram.1.values: expected 3 block sums to verify, found 0");
}

TEST_CASE("loading ends soon after it is cancelled") {
  Loading loading;
  std::atomic<int> calls{0};
  std::atomic<int64_t> done{0};
  const LoadOptions options{.num_threads = 3,
                            .cancelled = [&] { return ++calls > 5; },
                            .add_bytes = [&](int64_t num_bytes) { done += num_bytes; }};
  CHECK(message_of([&] { Loader({&loading.source}).run(loading.targets(), options); }) ==
        "loading was cancelled");
  CHECK(done <= 5 * StoreFile::kPieceBytes);
}

TEST_CASE("loading ends soon after any thread's error, which is the one that is told") {
  Loading loading;
  const Loader loader({&loading.source});
  REQUIRE(ftruncate(loading.file.handle(), kOffset + 2 * kBlockBytes + 5) == 0);
  std::atomic<int> threads{0};
  std::atomic<int64_t> done{0};
  const auto slowly = [&](int64_t num_bytes) {
    done += num_bytes;
    while (threads < 3) usleep(1000);  // the one that fails has begun
    usleep(500000);                    // and has its error long before a block is done
  };
  const LoadOptions options{
      .num_threads = 3, .cancelled = [&] { return ++threads < 0; }, .add_bytes = slowly};
  const std::string text = message_of([&] { loader.run(loading.targets(true), options); });
  CAPTURE(text);
  CHECK(text.find(loading.file.path()) == 0);
  CHECK(text.find(" more bytes at offset 134218733, found the end") != std::string::npos);
  CHECK(done < 2 * kBlockBytes);
  CHECK(message_of([&] {
          loader.check_unchanged();
        }).find(loading.file.path() + ": changed while it was loaded") == 0);
}

TEST_CASE("memory that is too small and shares that are none are refused") {
  Loading loading;
  const Loader loader({&loading.source});
  CHECK(message_of([&] { loader.run({{loading.memory.data(), 5, &loading.source}}, {}); }) ==
        "engram.1.values: expected memory of at least 134230073 bytes, found 5");
  CHECK(message_of([&] { loader.run(loading.targets(), {.share = 2, .shares = 2}); }) ==
        "share: expected 0 to 1, found 2");
}

}  // namespace
}  // namespace engram
