// SPDX-License-Identifier: Apache-2.0
//! \file record.h
//! What this process holds, for `tables status` and for who looks for a keeper: a memfd named
//! "trtllm-engram.tables" with one JSON document, there as long as any table is. Others of the user
//! find it in /proc/PID/fd. It ends with the process, whatever ends that, so it is always true.
//!
//!     {"format_version": 1, "pid": 7, "role": "rank", "name": "default", "rank": 0, "size": 8,
//!      "since": 1764450000.5, "socket": "",
//!      "tables": [{"name", "store", "layer", "content_id", "fingerprint", "kind", "placement",
//!                  "bytes", "huge_bytes", "since", "keeper"}],
//!      "id": ""}
//!
//! role is "rank" or "keeper"; name is the group's or the keeper's; socket a keeper's path, if it
//! listens at one; id tells a keeper from all others, and a table's keeper is the id of the one
//! whose memory it is, or "". A keeper that is loading has no tables yet. A changed document is
//! another memfd, so readers never see half of one.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>

#include "nlohmann/json.hpp"

namespace engram {

//! Now, as "since" has it.
double seconds_since_1970();

//! One table of this process, from its beginning to its end. Thread-safe.
class RecordEntry {
 public:
  //! `table` as above. Throws Error where no record can be written.
  RecordEntry(const std::string& group, int32_t rank, int32_t size, nlohmann::json table);
  ~RecordEntry();
  RecordEntry(const RecordEntry&) = delete;
  RecordEntry& operator=(const RecordEntry&) = delete;

 private:
  int64_t id_ = 0;
};

//! While it lives, this process is a keeper, of tables that it loads or that are there for others.
class KeeperRole {
 public:
  KeeperRole(const std::string& name, const std::string& socket, const std::string& id);
  ~KeeperRole();
  KeeperRole(const KeeperRole&) = delete;
  KeeperRole& operator=(const KeeperRole&) = delete;
};

//! The records of this user's processes that can be seen here, or of one of them; "pid" is the
//! number by which it is seen. What ends meanwhile or cannot be read is left out.
nlohmann::json read_records(pid_t of = 0);

}  // namespace engram
