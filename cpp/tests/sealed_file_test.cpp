// SPDX-License-Identifier: Apache-2.0
#include "table/sealed_file.h"

#include <fcntl.h>
#include <sys/stat.h>

#include "engram/error.h"
#include "groups.h"

namespace engram {

TEST_CASE("sealed file: its bytes, which nobody can change and no other user can read") {
  const FileDescriptor file = make_sealed_file("test", "text", "a file");
  CHECK(text_in(file) == "text");
  struct stat status{};
  REQUIRE(fstat(file.get(), &status) == 0);
  CHECK((status.st_mode & 07777) == 0400);
  CHECK(pwrite(file.get(), "x", 1, 0) < 0);
  CHECK(ftruncate(file.get(), 0) < 0);
  CHECK(fcntl(file.get(), F_ADD_SEALS, F_SEAL_WRITE) < 0);
  CHECK_THROWS_WITH(make_sealed_file(std::string(300, 'x').c_str(), "", "a file"),
                    "a file: cannot make a memfd: Invalid argument");
}

}  // namespace engram
