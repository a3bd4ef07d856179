// SPDX-License-Identifier: Apache-2.0
// Any text as the TOML file that binds tables: it parses, or is refused by an engram::Error of one
// line.
#include <cstdint>
#include <string>

#include "engram/table.h"
#include "refusal.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string text(reinterpret_cast<const char*>(data), size);
  accepted_or_refused([&] { engram::parse_tables(text, "/nowhere", "fuzz.toml"); });
  return 0;
}
