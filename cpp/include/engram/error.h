// SPDX-License-Identifier: Apache-2.0
//! \file error.h
//! Errors inside the library: exceptions that carry an engram_status, turned into codes at the C
//! ABI.
#pragma once

#include <locale>
#include <sstream>
#include <stdexcept>
#include <string>

#include "engram/engram.h"

namespace engram {

//! Text on one line, whatever names of users it holds: control characters become spaces.
inline std::string one_line(std::string text) {
  for (char& character : text) {
    if (static_cast<unsigned char>(character) < 0x20 || character == 0x7F) character = ' ';
  }
  return text;
}

class Error : public std::runtime_error {
 public:
  Error(engram_status status, const std::string& message)
      : std::runtime_error(one_line(message)), status_(status) {}
  engram_status status() const { return status_; }

 private:
  engram_status status_;
};

//! The parts side by side; numbers without the groups that the process's locale may want.
template <typename... Parts>
std::string concat(const Parts&... parts) {
  std::ostringstream text;
  text.imbue(std::locale::classic());
  (text << ... << parts);
  return text.str();
}

}  // namespace engram

//! Refuses what the caller passed. The message says what was expected and what was given.
#define ENGRAM_CHECK(condition, ...)                                                 \
  do {                                                                               \
    if (!(condition))                                                                \
      throw ::engram::Error(ENGRAM_INVALID_ARGUMENT, ::engram::concat(__VA_ARGS__)); \
  } while (false)
