// SPDX-License-Identifier: Apache-2.0
// engram_plugin_tests LIBRARY [LIBNVINFER] [doctest's options]: tests the plugins of a built
// library, with or without a TensorRT loaded.
#define DOCTEST_CONFIG_IMPLEMENT
#include <doctest/doctest.h>

#include <cstdio>
#include <exception>

#include "harness.h"

int main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr, "usage: %s LIBRARY [LIBNVINFER]\n", argv[0]);
    return 2;
  }
  try {
    harness::load(argv[1], argc > 2 && argv[2][0] != '-' ? argv[2] : nullptr);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 2;
  }
  return doctest::Context(argc, argv).run();
}
