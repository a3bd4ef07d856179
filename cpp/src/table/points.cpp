// SPDX-License-Identifier: Apache-2.0
// Test builds only: see points.h.
#include "table/points.h"

#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdlib>
#include <mutex>
#include <string>

#include "engram/engram.h"

namespace engram {
namespace {

std::mutex role_mutex;
std::string role;

}  // namespace

void set_stop_role(std::string_view who) {
  const std::lock_guard lock(role_mutex);
  role = who;
}

void stop_point(std::string_view name) {
  const char* const wanted = std::getenv("TRTLLM_ENGRAM_STOP_AT");
  const char* const file = std::getenv("TRTLLM_ENGRAM_STOP_FILE");
  if (wanted == nullptr || file == nullptr) return;
  const std::string_view at(wanted);
  if (at.substr(0, at.find('@')) != name) return;
  if (at.find('@') != at.npos) {
    const std::lock_guard lock(role_mutex);
    if (at.substr(at.find('@') + 1) != role) return;
  }
  static std::atomic<bool> stopped{false};
  if (stopped.exchange(true)) return;
  // The file is there only once the name is in it.
  const std::string part = std::string(file) + ".part";
  const int handle = open(part.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
  const bool written =
      handle >= 0 && write(handle, name.data(), name.size()) == static_cast<ssize_t>(name.size());
  if (handle >= 0) close(handle);
  if (!written || rename(part.c_str(), file) != 0) std::abort();
  raise(SIGSTOP);  // stops all threads, this one before it goes on
}

}  // namespace engram

//! The list as JSON, for tests.
extern "C" ENGRAM_API const char* engram_stop_points() {
  static const std::string text = [] {
    std::string names;
    for (const std::string_view name : engram::kStopPoints) {
      names += (names.empty() ? "[\"" : "\", \"") + std::string(name);
    }
    return names + "\"]";
  }();
  return text.c_str();
}
