// SPDX-License-Identifier: Apache-2.0
//! \file log.h
//! Messages of the plugins: to TensorRT's logger where one can be found, else to standard error.
#pragma once

#include <NvInferRuntime.h>

#include <exception>
#include <string>

#include "engram/error.h"

namespace engram::plugins {

using Severity = nvinfer1::ILogger::Severity;

//! The finder that TensorRT hands to a library it loads; null: none.
void set_logger_finder(nvinfer1::ILoggerFinder* finder) noexcept;

void log(Severity severity, const char* message) noexcept;

//! Address of a symbol of the TensorRT in this process, or null. Never loads TensorRT.
void* tensorrt_symbol(const char* name) noexcept;

//! TensorRT 11 dropped methods from its interfaces, which moved others.
constexpr int kFirstVersion11 = 110000;

//! major*10000 + minor*100 + patch of the TensorRT in this process; 0 where none is loaded.
int tensorrt_version() noexcept;

//! Runs one override of a TensorRT interface: what it throws is logged as "<where>: <text>" and
//! becomes `failed`.
template <typename Result, typename Body>
Result guarded(const char* plugin, const char* method, Result failed, Body&& body) noexcept {
  try {
    return body();
  } catch (const std::exception& error) {
    try {
      log(Severity::kERROR, concat(plugin, ".", method, ": ", error.what()).c_str());
    } catch (...) {
      log(Severity::kERROR, "engram plugin: out of memory");
    }
  } catch (...) {
    log(Severity::kERROR, "engram plugin: unknown exception");
  }
  return failed;
}

//! The same for overrides that return a code: 0, or nonzero after an exception.
template <typename Body>
int32_t guarded(const char* plugin, const char* method, Body&& body) noexcept {
  return guarded(plugin, method, int32_t{1}, [&body] {
    body();
    return int32_t{0};
  });
}

}  // namespace engram::plugins
