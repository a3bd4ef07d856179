// SPDX-License-Identifier: Apache-2.0
// What this library was built from, as JSON. CMakeLists.txt defines the ENGRAM_* strings for this
// file alone, so that a new commit recompiles nothing else.
#include "engram/engram.h"

#define ENGRAM_QUOTE(token) #token
#define ENGRAM_TEXT(macro) ENGRAM_QUOTE(macro)

const char* engram_build_info() {
  return "{\"version\": \"" ENGRAM_VERSION "\", \"abi\": " ENGRAM_TEXT(
      ENGRAM_ABI_VERSION) ", \"git\": \"" ENGRAM_GIT "\", \"compiler\": \"" ENGRAM_COMPILER
                          "\", \"cuda\": \"" ENGRAM_CUDA_VERSION
                          "\", \"architectures\": \"" ENGRAM_ARCHITECTURES
                          "\", \"tensorrt_headers\": \"" ENGRAM_TENSORRT_VERSION
                          "\", \"minimum_driver\": \"" ENGRAM_MINIMUM_DRIVER "\"}";
}
