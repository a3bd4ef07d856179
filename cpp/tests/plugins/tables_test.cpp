// SPDX-License-Identifier: Apache-2.0
// A plan's plugins in a host without Python: one whose table $TRTLLM_ENGRAM_TABLES cannot bind is
// refused before there is any context, and nothing is loaded to find that out.
#include <doctest/doctest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "cases.h"

namespace harness {
namespace {

namespace fs = std::filesystem;
using nvinfer1::TensorRTPhase;

//! A store with its tables, of layer 1.
const std::string kStore =
    fs::canonical(fs::path(__FILE__).parent_path() / "../../../tests/data/store_1").string();
const std::string kFingerprint = "68953f1cd6453cc7bfab770d4ad4ffeebd20e7c40104398b694c45c91aa9bb55";

Fields fields_of_store(const Fields& changes = {}) {
  Fields fields = changes;
  fields.insert({{"table", std::string("one")},
                 {"fingerprint", kFingerprint},
                 {"layer", 1},
                 {"head_dim", 32}});
  return fields;
}

std::string table(const std::string& name, const std::string& store = kStore) {
  return "format_version = 1\n[tables." + name + "]\nstore = \"" + store + "\"\nlayer = 1\n";
}

//! The environment's tables for as long as it lives: a file of this text, or none without any.
class TablesFile {
 public:
  explicit TablesFile(const std::string& text)
      : folder_(fs::temp_directory_path() / "engramXXXXXX") {
    std::string made = folder_.string();
    REQUIRE(mkdtemp(made.data()) != nullptr);
    folder_ = made;
    if (!text.empty()) std::ofstream(path()) << text;
    setenv("TRTLLM_ENGRAM_TABLES", path().c_str(), 1);
  }
  ~TablesFile() {
    unsetenv("TRTLLM_ENGRAM_TABLES");
    fs::remove_all(folder_);
  }
  std::string path() const { return folder_ / "tables.toml"; }

 private:
  fs::path folder_;
};

Plugin load(const std::string& name, const Fields& changes = {}) {
  return Plugin(name, fields_of_store(changes), TensorRTPhase::kRUNTIME);
}

}  // namespace

TEST_CASE("a plan is refused whose table the environment's file cannot bind") {
  struct Case {
    std::string text;
    Fields changes;
    std::string said;
  };
  const std::vector<Case> cases{
      {table("another"), {}, "table 'one': expected its name in "},
      {"format_version = 1\n", {}, "(TRTLLM_ENGRAM_TABLES), found no tables"},
      {"", {}, "tables.toml: "},
      {table("one") + "colour = 1\n", {}, "table 'one': expected known keys, found 'colour'"},
      {table("one", kStore + "/absent"), {}, "store_1/absent"},
      {table("one"),
       {{"fingerprint", std::string(64, 'a')}},
       "table 'one' (" + kStore + "): expected layout fingerprint " + std::string(64, 'a') +
           ", found " + kFingerprint},
      {table("one"), {{"head_dim", 64}}, "head_dim: expected 64, found 32"},
  };
  for (const Case& each : cases) {
    const TablesFile file(each.text);
    for (const char* const name : {"EngramLookup", "EngramPrefetch"}) {
      CAPTURE(name);
      CHECK_FALSE(load(name, each.changes));
      const std::string log = take_log();
      CAPTURE(log);
      CHECK(log.find(std::string(name) + ".createPlugin: ") != std::string::npos);
      CHECK(log.find(each.said) != std::string::npos);
    }
    CHECK(Plugin("EngramLookup", fields_of_store(each.changes)));
    CHECK(Plugin("EngramGate", right_fields().at("EngramGate"), TensorRTPhase::kRUNTIME));
    CHECK(take_log().empty());
  }
}

TEST_CASE("a plan is taken whose table the environment's file names, and nothing is loaded") {
  const TablesFile file(table("one"));
  CHECK(load("EngramLookup"));
  CHECK(load("EngramPrefetch"));
  CHECK(take_log().empty());
  CHECK(described_tables() == "{}");
}

TEST_CASE("without the variable, whoever binds may do so once the plan is there") {
  CHECK(load("EngramLookup"));
  setenv("TRTLLM_ENGRAM_TABLES", "", 1);
  CHECK(load("EngramLookup"));
  unsetenv("TRTLLM_ENGRAM_TABLES");
  CHECK(take_log().empty());
}

}  // namespace harness
