// SPDX-License-Identifier: Apache-2.0
#include "copies.h"

#include <dlfcn.h>
#include <link.h>

#include <vector>

#include "engram/error.h"

namespace engram {
namespace {

bool is_first = false;

struct LoadedFile {
  std::string path;
  const void* base;
};

const void* base_of(const void* address, std::string* path = nullptr) {
  Dl_info info{};
  if (dladdr(address, &info) == 0) return nullptr;
  if (path != nullptr && info.dli_fname != nullptr) *path = info.dli_fname;
  return info.dli_fbase;
}

std::vector<std::string> loaded_files() {
  std::vector<std::string> files;
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* found) {
        if (info->dlpi_name[0] != '\0')
          static_cast<std::vector<std::string>*>(found)->emplace_back(info->dlpi_name);
        return 0;
      },
      &files);
  return files;
}

std::string find_earlier_copy() {
  const void* const own_base = base_of(reinterpret_cast<const void*>(&own_path));
  for (const std::string& file : loaded_files()) {
    void* const handle = dlopen(file.c_str(), RTLD_LAZY | RTLD_NOLOAD);
    if (handle == nullptr) continue;
    void* const symbol = dlsym(handle, "engram_copy_is_first");
    std::string path;
    // dlsym also finds symbols of the file's dependencies: one of them may be this copy.
    const bool other = symbol != nullptr && base_of(symbol, &path) != own_base;
    const bool first = other && reinterpret_cast<decltype(&engram_copy_is_first)>(symbol)() != 0;
    dlclose(handle);
    if (first) return path;
  }
  return {};
}

//! Runs when the library is loaded; the loader's lock keeps two copies from doing so at once.
__attribute__((constructor)) void claim_process() {
  try {
    earlier_copy();
    // Creators, tables and CUDA's own state must not vanish under those who hold pointers to them.
    dlopen(own_path().c_str(), RTLD_LAZY | RTLD_NOLOAD | RTLD_NODELETE);
  } catch (...) {
    // NOTE: out of memory. Nothing may leave a constructor; this copy then counts as a second one.
  }
}

}  // namespace

const std::string& own_path() {
  static const std::string path = [] {
    std::string found;
    base_of(reinterpret_cast<const void*>(&own_path), &found);
    return found;
  }();
  return path;
}

const std::string& earlier_copy() {
  static const std::string path = [] {
    std::string found = find_earlier_copy();
    is_first = found.empty();
    return found;
  }();
  return path;
}

void require_first_copy() {
  if (earlier_copy().empty()) return;
  throw Error(ENGRAM_INVALID_ARGUMENT,
              concat("libtrtllm_engram.so: expected one copy in this process, found ",
                     earlier_copy(), " loaded before ", own_path()));
}

}  // namespace engram

int32_t engram_copy_is_first() { return engram::is_first ? 1 : 0; }
