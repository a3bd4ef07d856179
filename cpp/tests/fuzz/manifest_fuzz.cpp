// SPDX-License-Identifier: Apache-2.0
// Any bytes as a store's engram.json: it is read, or refused by an engram::Error of one line.
#include <sys/stat.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <string>

#include "engram/table.h"
#include "refusal.h"

namespace {

//! A store's folder of this process, in memory where there is a /dev/shm; gone with the process.
class Folder {
 public:
  Folder() {
    if (access("/dev/shm", W_OK) != 0) path_ = "/tmp/engram_fuzz_XXXXXX";
    if (mkdtemp(path_.data()) == nullptr) std::abort();
  }
  ~Folder() { rmdir(path_.c_str()); }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;

  const std::string& path() const { return path_; }

 private:
  std::string path_ = "/dev/shm/engram_fuzz_XXXXXX";
};

const std::string& store() {
  static const Folder folder;
  return folder.path();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string path = store() + "/engram.json";
  std::ofstream(path, std::ios::binary | std::ios::trunc)
      .write(reinterpret_cast<const char*>(data), static_cast<std::streamsize>(size));
  accepted_or_refused([] { engram::read_table_info(store(), 1, ""); });
  unlink(path.c_str());
  return 0;
}
