// SPDX-License-Identifier: Apache-2.0
#include "table/record.h"

#include "ranks.h"

namespace engram {
namespace {

using nlohmann::json;

json table_of(const std::string& name) { return {{"name", name}, {"since", 7.5}}; }

//! What a process says of itself; null where it says nothing.
json record_of(pid_t pid) {
  for (json& record : read_records()) {
    if (record.at("pid") == pid) return std::move(record);
  }
  return nullptr;
}

}  // namespace

TEST_CASE("record: there as long as any table is") {
  const size_t before = count_descriptors();
  CHECK(record_of(getpid()).is_null());
  {
    const RecordEntry first("group", 1, 4, table_of("one"));
    json record = record_of(getpid());
    CHECK(record["format_version"] == 1);
    CHECK(record["role"] == "rank");
    CHECK(record["name"] == "group");
    CHECK(record["rank"] == 1);
    CHECK(record["size"] == 4);
    CHECK(record["since"] == 7.5);
    CHECK(record["tables"].size() == 1);
    {
      const RecordEntry second("group", 1, 4, table_of("t\xFFwo"));  // a name that is no UTF-8
      CHECK(record_of(getpid())["tables"].size() == 2);
      CHECK(count_descriptors() == before + 1);
    }
    record = record_of(getpid());
    REQUIRE(record["tables"].size() == 1);
    CHECK(record["tables"][0]["name"] == "one");
  }
  CHECK(record_of(getpid()).is_null());
  CHECK(count_descriptors() == before);
}

TEST_CASE("record: a keeper's") {
  {
    const KeeperRole role("tables", "/run/socket", "abc");
    json record = record_of(getpid());  // nothing to be had yet
    CHECK(record["role"] == "keeper");
    CHECK(record["tables"].empty());
    CHECK(record["since"].get<double>() > 1e9);
    const RecordEntry entry("keeper/tables", 0, 1, table_of("one"));
    record = record_of(getpid());
    CHECK(record["tables"].size() == 1);
    CHECK(record["id"] == "abc");
    CHECK(record["role"] == "keeper");
    CHECK(record["name"] == "tables");
    CHECK(record["socket"] == "/run/socket");
  }
  CHECK(record_of(getpid()).is_null());
}

TEST_CASE("record: a forked child changes its own, and a process that is killed has none") {
  auto entry = std::make_unique<RecordEntry>("group", 0, 1, table_of("one"));
  const Signal changed;
  const Process child([&]() -> std::string {
    const RecordEntry second("group", 0, 1, table_of("two"));
    entry.reset();
    changed.set();
    sleep_s(10 * kPatience);
    return "";
  });
  REQUIRE(changed.wait());
  CHECK(record_of(getpid())["tables"][0]["name"] == "one");
  CHECK(record_of(child.pid())["tables"][0]["name"] == "two");
  child.signal(SIGKILL);
  CHECK(comes_true([&] { return record_of(child.pid()).is_null(); }));
}

}  // namespace engram
