// SPDX-License-Identifier: Apache-2.0
#include <cstdlib>

#include "stores.h"

namespace engram {
namespace {

//! A store, and the environment's file with both of its tables.
class FiledTables {
 public:
  explicit FiledTables(uint64_t seed) {
    write_store(store_);
    write(seed);
    setenv("TRTLLM_ENGRAM_TABLES", path().c_str(), 1);
  }
  ~FiledTables() { unsetenv("TRTLLM_ENGRAM_TABLES"); }

  void write(uint64_t seed) const {
    std::ofstream file(path());
    file << "format_version = 1\n";
    for (const auto& [name, layer] : {std::pair("one", 1), std::pair("two", 2)}) {
      file << "[tables." << name << "]\nstore = '" << store_.path() << "'\nlayer = " << layer
           << "\nformula_seed = " << seed << "\n";
    }
    file.close();
    REQUIRE(chmod(path().c_str(), 0600) == 0);
  }
  const Folder& store() const { return store_; }

 private:
  std::string path() const { return store_.path() + "/tables.toml"; }

  Folder store_;
};

TableRegistry& registry() { return TableRegistry::instance(); }

std::string bound() {
  std::string names;
  for (const auto& [name, table] : registry().tables()) names += name + " ";
  return names;
}

}  // namespace

TEST_CASE("registry: tables of the environment stay until all who acquired them have released") {
  const FiledTables filed(0);
  registry().acquire({"one"});
  CHECK(bound() == "one ");
  registry().acquire({"one", "two"});
  registry().release({"one"});
  CHECK(bound() == "one two ");
  registry().release({"one", "two"});
  CHECK(bound().empty());
}

TEST_CASE("registry: a table that somebody uses yet is bound again without a second copy") {
  const FiledTables filed(0);
  registry().acquire({"one"});
  const auto used = registry().find("one");
  registry().release({"one"});
  CHECK(bound().empty());
  registry().acquire({"one"});
  CHECK(registry().find("one") == used);
  registry().release({"one"});
}

TEST_CASE("registry: an entry that has changed is bound anew, used or not") {
  const FiledTables filed(0);
  registry().acquire({"one", "two"});
  const TablesByName used = registry().tables();
  filed.write(1);
  CHECK(registry().find("one") == used.at("one"));
  registry().acquire({"one"});
  CHECK(registry().find("one") != used.at("one"));
  CHECK(registry().find("two") == used.at("two"));
  registry().acquire({"two"});
  CHECK(look_at(registry().tables(), 1) == "right");
  CHECK(look_at(used) == "right");
  registry().release({"one", "two"});
  registry().release({"one", "two"});
  filed.write(0);
  registry().acquire({"one"});
  CHECK(registry().find("one") != used.at("one"));  // the file had another since
  registry().release({"one"});
  CHECK(bound().empty());
}

TEST_CASE("registry: names are acquired all or none, and the host's own stay its own") {
  const FiledTables filed(0);
  CHECK_THROWS_WITH_AS(registry().acquire({"one", "absent"}),
                       doctest::Contains("table 'absent': expected a bound name, found one, two; "),
                       Error);
  CHECK(bound().empty());
  registry().bind(bindings_of(filed.store(), 1));
  registry().acquire({"one"});
  CHECK(look_at(registry().tables(), 1) == "right");
  registry().release({"one"});
  CHECK(bound() == "one two ");
  registry().unbind("one");
  registry().unbind("two");
}

}  // namespace engram
