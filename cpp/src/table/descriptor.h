// SPDX-License-Identifier: Apache-2.0
//! \file descriptor.h
//! A file descriptor with one owner.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "engram/error.h"

namespace engram {

//! Closes the descriptor at its end. None (-1) where it was made without one or moved from.
class FileDescriptor {
 public:
  FileDescriptor() = default;
  //! Takes over `handle`; a negative one is none.
  explicit FileDescriptor(int handle) : handle_(handle) {}
  FileDescriptor(FileDescriptor&& other) noexcept : handle_(other.release()) {}
  FileDescriptor& operator=(FileDescriptor&& other) noexcept {
    if (this != &other) reset(other.release());
    return *this;
  }
  ~FileDescriptor() { reset(); }

  //! -1 for none.
  int get() const { return handle_; }
  explicit operator bool() const { return handle_ >= 0; }
  //! The caller closes it from here on.
  int release() { return std::exchange(handle_, -1); }
  void reset(int handle = -1) {
    if (handle_ >= 0) close(handle_);  // NOTE: never again after EINTR: on Linux it is closed then
    handle_ = handle;
  }
  //! Another descriptor of the same file, closed on exec. Throws Error.
  FileDescriptor duplicate() const {
    const int copy = fcntl(handle_, F_DUPFD_CLOEXEC, 0);
    if (copy < 0) {
      throw Error(ENGRAM_INTERNAL_ERROR,
                  concat("descriptor ", handle_, ": cannot be duplicated: ", std::strerror(errno)));
    }
    return FileDescriptor(copy);
  }

 private:
  int handle_ = -1;
};

}  // namespace engram
