// SPDX-License-Identifier: Apache-2.0
// What a CPU-only build has in place of plugins/entry.cpp.
#include "guard.h"

engram_status engram_register_plugins() {
  return engram::guard([] {
    throw engram::Error(ENGRAM_CUDA_UNAVAILABLE,
                        "plugins: expected a library built with CUDA, found a CPU-only build");
  });
}

const char* engram_plugin_fields() { return "{}"; }
