# SPDX-License-Identifier: Apache-2.0
# engram_tensorrt: what sources of plugins need. Headers alone, nothing to link.
find_package(Python3 REQUIRED COMPONENTS Interpreter)
execute_process(
  COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_LIST_DIR}/tensorrt_headers.py
  OUTPUT_VARIABLE headers
  COMMAND_ERROR_IS_FATAL ANY)
list(GET headers 0 include_directory)
list(GET headers 1 ENGRAM_TENSORRT_VERSION)

add_library(engram_tensorrt INTERFACE)
target_include_directories(engram_tensorrt SYSTEM INTERFACE ${include_directory})
