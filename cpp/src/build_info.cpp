// SPDX-License-Identifier: Apache-2.0
// What this library was built from, as JSON. cmake/build_info.cmake defines the strings for this
// file alone, so that a new commit recompiles nothing else.
#include "engram/engram.h"

#define ENGRAM_QUOTE(token) #token
#define ENGRAM_TEXT(macro) ENGRAM_QUOTE(macro)
#define ENGRAM_FIELD(name, text) "\"" name "\": \"" text "\""

const char* engram_build_info() {
  return "{" ENGRAM_FIELD("version", ENGRAM_VERSION) ", "
         "\"abi\": " ENGRAM_TEXT(ENGRAM_ABI_VERSION) ", "
         ENGRAM_FIELD("git", ENGRAM_GIT) ", "
         ENGRAM_FIELD("compiler", ENGRAM_COMPILER) ", "
         ENGRAM_FIELD("cuda", ENGRAM_CUDA_VERSION) ", "
         ENGRAM_FIELD("architectures", ENGRAM_ARCHITECTURES) ", "
         ENGRAM_FIELD("tensorrt_headers", ENGRAM_TENSORRT_VERSION) ", "
         ENGRAM_FIELD("minimum_driver", ENGRAM_MINIMUM_DRIVER) "}";
}
