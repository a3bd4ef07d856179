// SPDX-License-Identifier: Apache-2.0
//! \file guard.h
//! The edge between exceptions inside the library and status codes of the C ABI.
#pragma once

#include <new>

#include "engram/error.h"

namespace engram {

//! Keeps the text for engram_last_error() of this thread; returns the status.
engram_status fail(engram_status status, const char* text) noexcept;

//! Runs the body of a C function.
template <typename Fn>
engram_status guard(const Fn& fn) noexcept {
  try {
    fn();
    return ENGRAM_OK;
  } catch (const Error& error) {
    return fail(error.status(), error.what());
  } catch (const std::bad_alloc&) {
    return fail(ENGRAM_OUT_OF_MEMORY, "out of host memory");
  } catch (const std::exception& error) {
    return fail(ENGRAM_INTERNAL_ERROR, error.what());
  } catch (...) {
    return fail(ENGRAM_INTERNAL_ERROR, "unknown exception");
  }
}

}  // namespace engram
