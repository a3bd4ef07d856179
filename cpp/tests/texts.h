// SPDX-License-Identifier: Apache-2.0
//! \file texts.h
//! Texts of errors, and what tests look for in them.
#pragma once

#include <functional>
#include <string>

#include "doctest/doctest.h"
#include "engram/error.h"

namespace engram {

//! The text of the Error that a call ends in.
inline std::string message_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

//! Whether a part is in a text; the report has both where it is not.
inline bool has(const std::string& text, const std::string& part) {
  const bool found = text.find(part) != std::string::npos;
  if (!found) MESSAGE("not found: ", part, " in: ", text);
  return found;
}

}  // namespace engram
