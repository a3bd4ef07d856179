// SPDX-License-Identifier: Apache-2.0
//! \file log.h
//! Messages of the table code, for the host process's log.
#pragma once

#include <string>

#include "engram/engram.h"

namespace engram {

//! Python's numbers.
enum class LogLevel : int32_t { kDebug = 10, kInfo = 20, kWarning = 30, kError = 40 };

//! One line to who engram_set_log named, else warnings and errors to stderr. Thread-safe; never
//! throws.
void log(LogLevel level, const std::string& text) noexcept;

//! See engram_set_log.
void set_log(engram_log_function function) noexcept;

}  // namespace engram
