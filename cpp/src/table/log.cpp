// SPDX-License-Identifier: Apache-2.0
#include "table/log.h"

#include <cstdio>
#include <mutex>
#include <shared_mutex>

#include "engram/error.h"

namespace engram {
namespace {

//! Never destroyed: threads may log while the process exits.
struct Sink {
  std::shared_mutex mutex;  // shared while the function runs
  engram_log_function function = nullptr;
};

Sink& sink() {
  static auto* const instance = new Sink();
  return *instance;
}

}  // namespace

void log(LogLevel level, const std::string& text) noexcept {
  try {
    const std::string line = one_line(text);
    const std::shared_lock lock(sink().mutex);
    if (sink().function != nullptr) {
      sink().function(static_cast<int32_t>(level), line.c_str());
    } else if (level >= LogLevel::kWarning) {
      std::fprintf(stderr, "trtllm-engram: %s\n", line.c_str());
    }
  } catch (...) {  // a message that cannot be told is no reason to fail
  }
}

void set_log(engram_log_function function) noexcept {
  const std::unique_lock lock(sink().mutex);
  sink().function = function;
}

}  // namespace engram
