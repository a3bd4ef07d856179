// SPDX-License-Identifier: Apache-2.0
//! \file refusal.h
//! What every parser of files from outside promises.
#pragma once

#include <cstdlib>
#include <cstring>

#include "engram/error.h"

//! Runs a parser; any exception but an Error, or one of several lines, ends the fuzzer.
template <typename Parse>
void accepted_or_refused(const Parse& parse) {
  try {
    parse();
  } catch (const engram::Error& error) {
    if (strchr(error.what(), '\n') != nullptr) std::abort();
  }
}
