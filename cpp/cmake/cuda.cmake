# SPDX-License-Identifier: Apache-2.0
# The CUDA language, and engram_cuda: what sources that call CUDA need.

if(NOT CMAKE_CUDA_COMPILER)
  find_program(CMAKE_CUDA_COMPILER nvcc HINTS $ENV{CUDA_HOME}/bin /usr/local/cuda/bin REQUIRED)
endif()
cmake_path(GET CMAKE_CUDA_COMPILER PARENT_PATH cuda_bin)
cmake_path(GET cuda_bin PARENT_PATH cuda_root)
if(EXISTS ${cuda_root}/lib/libcudart_static.a) # PyPI's toolkit, which does not look there itself
  set(CMAKE_CUDA_FLAGS_INIT "-L${cuda_root}/lib")
endif()

set(CMAKE_CUDA_STANDARD 20)
set(CMAKE_CUDA_RUNTIME_LIBRARY None) # engram_cuda below links it, for C++ sources too
set(CMAKE_CUDA_ARCHITECTURES 80-virtual) # for the compiler's own check
enable_language(CUDA)
if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 12.8)
  message(FATAL_ERROR "nvcc: expected 12.8 or newer, found ${CMAKE_CUDA_COMPILER_VERSION}")
endif()

if(NOT ENGRAM_CUDA_ARCHITECTURES)
  if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 12.9)
    set(blackwell 100a-real)
  else()
    set(blackwell 100f-real)
  endif()
  # One build for each architecture, and PTX for any other.
  set(ENGRAM_CUDA_ARCHITECTURES 80-real 86-real 89-real 90a-real ${blackwell} 120-real 80-virtual)
endif()
set(CMAKE_CUDA_ARCHITECTURES ${ENGRAM_CUDA_ARCHITECTURES})

# A driver of this release runs what this nvcc's major version builds.
if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 13)
  set(ENGRAM_MINIMUM_DRIVER "525.60")
else()
  set(ENGRAM_MINIMUM_DRIVER "580.0")
endif()

find_library(ENGRAM_CUDART cudart_static REQUIRED HINTS ${cuda_root}/lib ${cuda_root}/lib64
             PATHS ${CMAKE_CUDA_IMPLICIT_LINK_DIRECTORIES})
add_library(engram_cuda INTERFACE)
target_link_libraries(engram_cuda INTERFACE ${ENGRAM_CUDART} rt ${CMAKE_DL_LIBS})
target_include_directories(engram_cuda SYSTEM INTERFACE ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
