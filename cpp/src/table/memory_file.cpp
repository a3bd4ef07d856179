// SPDX-License-Identifier: Apache-2.0
#include "table/memory_file.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "engram/error.h"

namespace engram {
namespace {

// Of <linux/memfd.h>, whose older versions lack some.
constexpr unsigned kNoExecSeal = 0x0008;    // Linux 6.3, which may insist on it
constexpr unsigned kHugetlb2M = 21U << 26;  // MFD_HUGE_2MB
constexpr int kSizeSeals = F_SEAL_SHRINK | F_SEAL_GROW;
constexpr char kShmFolder[] = "/dev/shm";

FileDescriptor open_memfd(const std::string& label, PageKind pages) {
  // It stands in /proc/PID/maps; the kernel takes 249 bytes.
  const std::string name = "trtllm-engram:" + label.substr(0, 200);
  unsigned flags = MFD_CLOEXEC | MFD_ALLOW_SEALING;
  if (pages == PageKind::k2M) flags |= MFD_HUGETLB | kHugetlb2M;
  int handle = memfd_create(name.c_str(), flags | kNoExecSeal);
  if (handle < 0 && errno == EINVAL) handle = memfd_create(name.c_str(), flags);
  if (handle < 0) {
    throw Error(ENGRAM_OUT_OF_MEMORY,
                concat(label, ": memory \"memfd\" with pages \"", page_kind_name(pages),
                       "\": the kernel has none: ", std::strerror(errno)));
  }
  return FileDescriptor(handle);
}

//! tmpfs has had nameless files since Linux 3.11: there is no moment at which a kill would leave a
//! name behind.
FileDescriptor open_shm(const std::string& label) {
  const int handle = open(kShmFolder, O_TMPFILE | O_RDWR | O_CLOEXEC | O_EXCL, 0600);
  if (handle < 0) {
    throw Error(ENGRAM_OUT_OF_MEMORY,
                concat(label, ": memory \"shm\": cannot make a nameless file in ", kShmFolder, ": ",
                       std::strerror(errno)));
  }
  FileDescriptor file(handle);
  struct statfs status{};
  ENGRAM_CHECK(fstatfs(handle, &status) == 0 && status.f_type == TMPFS_MAGIC, label,
               ": memory \"shm\": expected a tmpfs at ", kShmFolder,
               ", found another file system (type ", status.f_type, ")");
  return file;
}

void set_size(const FileDescriptor& file, const std::string& label, int64_t num_bytes) {
  std::string found;
  // Beyond it, ftruncate would end the process (SIGXFSZ).
  struct rlimit limit{};
  if (getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur < static_cast<rlim_t>(num_bytes)) {
    found = concat("a limit on file sizes (ulimit -f) of ", limit.rlim_cur);
  } else if (ftruncate(file.get(), num_bytes) != 0) {
    found = std::strerror(errno);
  } else {
    return;
  }
  throw Error(ENGRAM_OUT_OF_MEMORY,
              concat(label, ": expected ", num_bytes, " bytes of memory, found ", found));
}

}  // namespace

FileDescriptor make_memory_file(const HostMemoryOptions& options, int64_t num_bytes,
                                const std::string& label) {
  const bool memfd = options.kind == MemoryKind::kMemfd;
  FileDescriptor file = memfd ? open_memfd(label, options.pages) : open_shm(label);
  set_size(file, label, num_bytes);
  // A memfd is made with everybody's rights; /proc/PID/fd goes by them.
  if (fchmod(file.get(), 0600) != 0 || (memfd && fcntl(file.get(), F_ADD_SEALS, kSizeSeals) != 0)) {
    throw Error(ENGRAM_INTERNAL_ERROR, concat(label, ": cannot be sealed: ", std::strerror(errno)));
  }
  return file;
}

void forbid_writers(const FileDescriptor& file) {
  constexpr int kFutureWriteSeal = 0x0010;  // F_SEAL_FUTURE_WRITE, Linux 5.1
  // NOTE: not F_SEAL_WRITE, which no file gets that a mapping could still write to.
  if (fcntl(file.get(), F_ADD_SEALS, kFutureWriteSeal | F_SEAL_SEAL) == 0) return;
  fcntl(file.get(), F_ADD_SEALS, F_SEAL_SEAL);  // an older kernel's
}

void check_memory_file(const HostMemoryOptions& options, const FileDescriptor& file,
                       int64_t num_bytes, const std::string& label) {
  struct stat status{};
  struct statfs system{};
  if (fstat(file.get(), &status) != 0 || fstatfs(file.get(), &system) != 0) {
    throw Error(ENGRAM_INVALID_ARGUMENT,
                concat(label, ": descriptor ", file.get(), ": ", std::strerror(errno)));
  }
  const bool huge = options.pages == PageKind::k2M;
  ENGRAM_CHECK(S_ISREG(status.st_mode) && status.st_size == num_bytes, label,
               ": expected shared memory of ", num_bytes, " bytes, found ", status.st_size);
  ENGRAM_CHECK(huge ? system.f_type == HUGETLBFS_MAGIC && system.f_bsize == kHugePageBytes
                    : system.f_type == TMPFS_MAGIC,
               label, ": expected shared memory on ", huge ? "hugetlb pages of 2 MiB" : "a tmpfs",
               ", found file system type ", system.f_type, " with blocks of ", system.f_bsize);
  const int seals = fcntl(file.get(), F_GET_SEALS);
  ENGRAM_CHECK(
      options.kind == MemoryKind::kShm || (seals >= 0 && (seals & kSizeSeals) == kSizeSeals), label,
      ": expected a memfd that is sealed against another size, found seals ", seals);
}

}  // namespace engram
