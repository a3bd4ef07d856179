// SPDX-License-Identifier: Apache-2.0
#include "table/sealed_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "engram/error.h"

namespace engram {

FileDescriptor make_sealed_file(const char* name, std::string_view bytes,
                                const std::string& label) {
  FileDescriptor file(memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING));
  const auto check = [&](bool done, const char* what) {
    if (done) return;
    throw Error(ENGRAM_INTERNAL_ERROR,
                concat(label, ": cannot ", what, ": ", std::strerror(errno)));
  };
  check(static_cast<bool>(file), "make a memfd");
  check(fchmod(file.get(), 0400) == 0, "set its mode");
  const ssize_t count = write(file.get(), bytes.data(), bytes.size());
  check(count == static_cast<ssize_t>(bytes.size()), "write it");
  const int seals = F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE;
  check(fcntl(file.get(), F_ADD_SEALS, seals) == 0, "seal it");
  return file;
}

}  // namespace engram
