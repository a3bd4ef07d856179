// SPDX-License-Identifier: Apache-2.0
#include "table/registration.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "cuda_support.h"
#include "engram/error.h"

#if ENGRAM_CUDA
#include "cuda_handles.h"
#include "parallel.h"
#include "table/gpu_memory.h"
#endif

// What the driver does (open-gpu-kernel-modules, kernel-open/nvidia/os-mlock.c):
// os_lock_user_pages() pins with pin_user_pages() under the lock for reading of the address space,
// so that threads do it side by side, and counts nothing against RLIMIT_MEMLOCK, which mlock() and
// verbs do. It needs 16 bytes of kernel memory for each 4 KiB page in one piece of at most 2 GiB:
// 580 and later refuse 512 GiB in one call (pull request 1234 there).

namespace engram {
#if ENGRAM_CUDA
namespace {

//! More only wait for one another in the driver.
int num_threads() { return std::min(16, usable_threads()); }

int attribute(cudaDeviceAttr name, int device) {
  int value = 0;
  check_cuda(cudaDeviceGetAttribute(&value, name, device), "what a CUDA device can do");
  return value;
}

}  // namespace

bool can_register_read_only(int device) {
  const OnGpu gpu(device, std::nothrow);  // a thread without a GPU might be given the first one
  int value = 0;
  const cudaError_t code =
      cudaDeviceGetAttribute(&value, cudaDevAttrHostRegisterReadOnlySupported, device);
  forget_error(code);  // answered here
  return code == cudaSuccess && value != 0;
}

Registration::Registration(HostMemory& memory, int device, const std::function<bool()>& cancelled)
    : data_(memory.data()), device_(device), owner_(getpid()) {
  require_cuda(device);
  if (memory.options().kind == MemoryKind::kCumem) {
    ends_ = {memory.mapped_bytes()};
    device_ = memory.options().device;
    return;
  }
  const OnGpu gpu(device);
  if (attribute(cudaDevAttrHostRegisterSupported, device) == 0) {
    throw Error(ENGRAM_CUDA_ERROR, concat(memory.label(), ": CUDA device ", device,
                                          ": expected one that reads registered host memory"));
  }
  const bool read_only = memory.access() == Access::kReadOnly;
  if (read_only && !can_register_read_only(device)) {
    throw Error(ENGRAM_CUDA_ERROR,
                concat(memory.label(), ": CUDA device ", device,
                       ": expected a mapping for writing, for it registers no other"));
  }
  const int64_t total = memory.mapped_bytes();
  // Where a device has addresses of its own, those of two pieces need not be neighbours.
  const bool one_piece = attribute(cudaDevAttrCanUseHostPointerForRegisteredMem, device) == 0;
  const int64_t piece_bytes = one_piece ? total : kPieceBytes;
  const auto num_pieces = static_cast<size_t>((total + piece_bytes - 1) / piece_bytes);
  for (size_t i = 0; i < num_pieces; ++i) {
    ends_.push_back(std::min(total, static_cast<int64_t>(i + 1) * piece_bytes));
  }
  registered_.assign(num_pieces, 0);
  const unsigned flags = cudaHostRegisterPortable | cudaHostRegisterMapped |
                         (read_only ? cudaHostRegisterReadOnly : 0U);
  // A fork copies every pinned page of private memory, at once.
  const bool inherited = memory.options().kind != MemoryKind::kPrivate;
  const auto begin = std::chrono::steady_clock::now();
  try {
    memory.set_inherited(inherited);
    parallel_for(total, piece_bytes, num_threads(), [&](int64_t from, int64_t to) {
      if (cancelled && cancelled()) {
        throw Error(ENGRAM_INVALID_ARGUMENT, concat(memory.label(), ": registration cancelled"));
      }
      const OnGpu here(device);
      const std::string what = concat(memory.label(), ": registration of bytes ", from, " to ", to,
                                      " of ", total, " with CUDA device ", device);
      check_cuda(cudaHostRegister(data_ + from, static_cast<size_t>(to - from), flags),
                 what.c_str());
      registered_[static_cast<size_t>(from / piece_bytes)] = 1;
    });
    on_device(device);  // refuses what kernels could not read as one array
  } catch (...) {
    release();
    memory.set_inherited(true);
    throw;
  }
  seconds_ = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

const uint8_t* Registration::on_device(int device) const {
  if (registered_.empty()) {
    ENGRAM_CHECK(device == device_, "CUDA device ", device,
                 ": memory \"cumem\" is mapped for device ", device_, " alone");
    return data_;
  }
  const OnGpu gpu(device);
  const uint8_t* first = nullptr;
  int64_t begin = 0;
  for (const int64_t end : ends_) {
    void* mapped = nullptr;
    check_cuda(cudaHostGetDevicePointer(&mapped, data_ + begin, 0), "map a table in host memory");
    const auto* const piece = static_cast<const uint8_t*>(mapped);
    if (begin == 0) first = piece;
    if (piece != first + begin) {
      throw Error(ENGRAM_CUDA_ERROR,
                  concat("CUDA device ", device, ": expected one range of addresses for ",
                         ends_.back(), " registered bytes, found a gap at byte ", begin));
    }
    begin = end;
  }
  return first;
}

void Registration::release() noexcept {
  if (registered_.empty() || getpid() != owner_) return;  // a forked child has no CUDA
  const auto num_pieces = static_cast<int64_t>(registered_.size());
  parallel_for(num_pieces, 1, num_threads(), [&](int64_t i, int64_t) {
    const auto piece = static_cast<size_t>(i);
    if (registered_[piece] == 0) return;
    const OnGpu gpu(device_, std::nothrow);
    const int64_t begin = i == 0 ? 0 : ends_[piece - 1];
    forget_error(cudaHostUnregister(data_ + begin));  // the other pieces have their turn
  });
  registered_.clear();
}

#else

bool can_register_read_only(int /*device*/) { return false; }

Registration::Registration(HostMemory& /*memory*/, int device,
                           const std::function<bool()>& /*cancelled*/) {
  require_cuda(device);
}

const uint8_t* Registration::on_device(int device) const {
  require_cuda(device);
  return nullptr;
}

void Registration::release() noexcept {}

#endif

Registration::Registration(Registration&& other) noexcept { swap(other); }

Registration& Registration::operator=(Registration&& other) noexcept {
  Registration taken(std::move(other));
  swap(taken);
  return *this;
}

Registration::~Registration() { release(); }

void Registration::swap(Registration& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(ends_, other.ends_);
  std::swap(registered_, other.registered_);
  std::swap(device_, other.device_);
  std::swap(seconds_, other.seconds_);
  std::swap(owner_, other.owner_);
}

}  // namespace engram
