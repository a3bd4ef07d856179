# SPDX-License-Identifier: Apache-2.0
# The strings of src/build_info.cpp. GIT_CEILING_DIRECTORIES: a source archive that lies inside
# another repository has no revision.
cmake_path(GET CMAKE_CURRENT_SOURCE_DIR PARENT_PATH root)
cmake_path(GET root PARENT_PATH ceiling)
execute_process(
  COMMAND ${CMAKE_COMMAND} -E env GIT_CEILING_DIRECTORIES=${ceiling} git describe --always --dirty
          --abbrev=12 --exclude=*
  WORKING_DIRECTORY ${root}
  OUTPUT_VARIABLE revision
  OUTPUT_STRIP_TRAILING_WHITESPACE
  ERROR_QUIET)
string(REPLACE ";" "," architectures "${ENGRAM_CUDA_ARCHITECTURES}")
string(REPLACE "-real" "" architectures "${architectures}")
if(NOT ENGRAM_CUDA)
  set(architectures "")
endif()
set_source_files_properties(
  src/build_info.cpp
  PROPERTIES
    COMPILE_DEFINITIONS
    "ENGRAM_VERSION=\"${PROJECT_VERSION}\";ENGRAM_GIT=\"${revision}\";ENGRAM_COMPILER=\"${CMAKE_CXX_COMPILER_ID} ${CMAKE_CXX_COMPILER_VERSION}\";ENGRAM_CUDA_VERSION=\"${CMAKE_CUDA_COMPILER_VERSION}\";ENGRAM_ARCHITECTURES=\"${architectures}\";ENGRAM_TENSORRT_VERSION=\"${ENGRAM_TENSORRT_VERSION}\";ENGRAM_MINIMUM_DRIVER=\"${ENGRAM_MINIMUM_DRIVER}\""
)
