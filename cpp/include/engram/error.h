// SPDX-License-Identifier: Apache-2.0
//! \file error.h
//! Errors inside the library: exceptions that carry an engram_status, turned into codes at the C
//! ABI.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

#include "engram/engram.h"

namespace engram {

class Error : public std::runtime_error {
 public:
  Error(engram_status status, const std::string& message)
      : std::runtime_error(message), status_(status) {}
  engram_status status() const { return status_; }

 private:
  engram_status status_;
};

template <typename... Parts>
std::string concat(const Parts&... parts) {
  std::ostringstream text;
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
