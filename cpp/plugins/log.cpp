// SPDX-License-Identifier: Apache-2.0
#include "log.h"

#include <dlfcn.h>

#include <atomic>
#include <cstdio>

namespace engram::plugins {
namespace {

std::atomic<nvinfer1::ILoggerFinder*> logger_finder{nullptr};

// The full, the lean and the dispatch runtime, for the majors these headers can meet.
constexpr const char* kTensorrtLibraries[] = {
    "libnvinfer.so.10",      "libnvinfer.so.11",          "libnvinfer_lean.so.10",
    "libnvinfer_lean.so.11", "libnvinfer_dispatch.so.10", "libnvinfer_dispatch.so.11",
};

nvinfer1::ILogger* find_logger() noexcept {
  nvinfer1::ILoggerFinder* const finder = logger_finder.load();
  // NOTE: TensorRT 11 moved the finder's methods; there, getLogger() has to do.
  if (finder != nullptr && tensorrt_version() < kFirstVersion11) {
    // NOTE: not declared noexcept by TensorRT.
    try {
      if (nvinfer1::ILogger* const logger = finder->findLogger()) return logger;
    } catch (...) {
    }
  }
  using GetLogger = nvinfer1::ILogger* (*)() noexcept;
  const auto get_logger = reinterpret_cast<GetLogger>(tensorrt_symbol("getLogger"));
  return get_logger == nullptr ? nullptr : get_logger();
}

}  // namespace

void set_logger_finder(nvinfer1::ILoggerFinder* finder) noexcept { logger_finder.store(finder); }

void log(Severity severity, const char* message) noexcept {
  if (nvinfer1::ILogger* const logger = find_logger()) {
    logger->log(severity, message);
  } else if (severity <= Severity::kWARNING) {
    std::fprintf(stderr, "trtllm-engram: %s\n", message);
  }
}

void* tensorrt_symbol(const char* name) noexcept {
  // NOTE: names such as getLogger are common; they are looked up in TensorRT's own libraries and
  // nowhere else.
  for (const char* const library : kTensorrtLibraries) {
    // RTLD_NOLOAD only raises the count of a library that is there; it is lowered again at once.
    void* const handle = dlopen(library, RTLD_LAZY | RTLD_NOLOAD);
    if (handle == nullptr) continue;
    void* const symbol = dlsym(handle, name);
    dlclose(handle);
    if (symbol != nullptr) return symbol;
  }
  return nullptr;
}

int tensorrt_version() noexcept {
  using GetVersion = int32_t (*)() noexcept;
  const auto get_version = reinterpret_cast<GetVersion>(tensorrt_symbol("getInferLibVersion"));
  return get_version == nullptr ? 0 : get_version();
}

}  // namespace engram::plugins
