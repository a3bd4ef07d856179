// SPDX-License-Identifier: Apache-2.0
#include "table/host_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "engram/error.h"
#include "table/cumem.h"
#include "table/memory_file.h"

namespace engram {
namespace {

constexpr int kMapHugetlb2M = 21 << 26;  // MAP_HUGE_2MB, which older headers lack

[[noreturn]] void fail(const std::string& what, int64_t num_bytes, const std::string& found) {
  throw Error(ENGRAM_OUT_OF_MEMORY,
              concat(what, ": expected ", num_bytes, " bytes of memory, found ", found));
}

void check_combination(const HostMemoryOptions& options) {
  const char* why = nullptr;
  if (options.kind == MemoryKind::kShm && options.pages == PageKind::k2M) {
    why = "/dev/shm has no hugetlb pages, expected memory \"memfd\" or \"private\"";
  } else if (options.kind == MemoryKind::kCumem && options.pages != PageKind::kAuto) {
    why = "the driver chooses its pages, expected pages \"auto\"";
  }
  ENGRAM_CHECK(why == nullptr, "memory \"", memory_kind_name(options.kind), "\" with pages \"",
               page_kind_name(options.pages), "\": ", why);
}

}  // namespace

const char* memory_kind_name(MemoryKind kind) {
  switch (kind) {
    case MemoryKind::kPrivate:
      return "private";
    case MemoryKind::kMemfd:
      return "memfd";
    case MemoryKind::kShm:
      return "shm";
    case MemoryKind::kCumem:
      return "cumem";
  }
  return "?";
}

MemoryKind parse_memory_kind(const std::string& name) {
  for (const MemoryKind kind :
       {MemoryKind::kPrivate, MemoryKind::kMemfd, MemoryKind::kShm, MemoryKind::kCumem}) {
    if (name == memory_kind_name(kind)) return kind;
  }
  throw Error(ENGRAM_INVALID_ARGUMENT,
              concat("memory: expected \"private\", \"memfd\", \"shm\" or \"cumem\", found \"",
                     name, "\""));
}

void check_host_memory(const HostMemoryOptions& options) {
  check_combination(options);
  check_numa_policy(options.numa);
}

HostMemory::HostMemory() = default;

HostMemory HostMemory::create(const HostMemoryOptions& options, int64_t num_bytes,
                              const std::string& label) {
  check_host_memory(options);
  HostMemory memory = prepare(options, num_bytes, label);
  if (options.kind == MemoryKind::kCumem) {
    memory.take(CumemMemory::create(options.device, options.numa, num_bytes, label));
    memory.descriptors_ = memory.cumem_->export_descriptors();
    return memory;
  }
  if (options.kind != MemoryKind::kPrivate) {
    memory.descriptors_.push_back(make_memory_file(options, memory.mapped_bytes_, label));
  }
  memory.map();
  set_numa_policy(memory.data_, memory.mapped_bytes_, options.numa);
  return memory;
}

HostMemory HostMemory::attach(const HostMemoryOptions& options,
                              std::vector<FileDescriptor> descriptors, int64_t num_bytes,
                              const std::string& label, Access access) {
  ENGRAM_CHECK(options.kind != MemoryKind::kPrivate, label,
               ": memory \"private\" belongs to one process, expected a kind that is shared");
  check_combination(options);  // its pages are where they are, whatever this process may use
  HostMemory memory = prepare(options, num_bytes, label);
  if (options.kind == MemoryKind::kCumem) {
    memory.take(CumemMemory::attach(options.device, descriptors, num_bytes, label));
    memory.descriptors_ = std::move(descriptors);  // an imported handle cannot be exported again
    return memory;
  }
  ENGRAM_CHECK(descriptors.size() == 1, label, ": expected 1 descriptor of memory \"",
               memory_kind_name(options.kind), "\", found ", descriptors.size());
  check_memory_file(options, descriptors[0], memory.mapped_bytes_, label);
  memory.access_ = access;
  memory.may_write_ = access == Access::kReadWrite;
  memory.descriptors_ = std::move(descriptors);
  memory.map();
  return memory;
}

HostMemory HostMemory::prepare(const HostMemoryOptions& options, int64_t num_bytes,
                               const std::string& label) {
  ENGRAM_CHECK(num_bytes > 0, label, ": expected some bytes of memory, found ", num_bytes);
  HostMemory memory;
  memory.options_ = options;
  memory.label_ = label;
  memory.num_bytes_ = num_bytes;
  memory.mapped_bytes_ = whole_pages(num_bytes, options.pages);
  memory.owner_ = getpid();
  return memory;
}

void HostMemory::take(CumemMemory&& cumem) {
  cumem_ = std::make_unique<CumemMemory>(std::move(cumem));
  data_ = cumem_->data();
  mapped_bytes_ = cumem_->mapped_bytes();
}

void HostMemory::map() {
  const int file = descriptors_.empty() ? -1 : descriptors_[0].get();
  const int protection = access_ == Access::kReadWrite ? PROT_READ | PROT_WRITE : PROT_READ;
  const int flags = file >= 0 ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS;
  if (options_.pages == PageKind::k2M) {
    // Its addresses are on the boundary by themselves, and its pages are reserved here and now.
    const int huge = file >= 0 ? 0 : MAP_HUGETLB | kMapHugetlb2M;
    data_ = reserve(mapped_bytes_, protection, flags | huge, file);
    return;
  }
  // A wider range, for the boundary, and for a page on both sides that nothing is on: the kernel
  // would merge a neighbour that is alike, and count the two as one (page_shares).
  const int64_t page = small_page_bytes();
  uint8_t* const range = reserve(mapped_bytes_ + kHugePageBytes + 2 * page, PROT_NONE,
                                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1);
  const auto address = reinterpret_cast<uintptr_t>(range);
  constexpr uintptr_t kMask = kHugePageBytes - 1;
  const uintptr_t aligned = (address + static_cast<uintptr_t>(page) + kMask) & ~kMask;
  uint8_t* const data = range + (aligned - address);
  if (mmap(data, static_cast<size_t>(mapped_bytes_), protection, flags | MAP_FIXED | MAP_NORESERVE,
           file, 0) == MAP_FAILED) {
    fail(label_, mapped_bytes_, std::strerror(errno));
  }
  data_ = data;
  advise_pages(data_, mapped_bytes_, options_.pages);
}

uint8_t* HostMemory::reserve(int64_t num_bytes, int protection, int flags, int file) {
  void* const range = mmap(nullptr, static_cast<size_t>(num_bytes), protection, flags, file, 0);
  if (range == MAP_FAILED) {
    const int code = errno;
    fail(label_, mapped_bytes_,
         options_.pages == PageKind::k2M
             ? concat(free_hugetlb_bytes(), " on hugetlb pages of 2 MiB (", std::strerror(code),
                      "; vm.nr_hugepages sets them aside)")
             : std::strerror(code));
  }
  reserved_ = static_cast<uint8_t*>(range);
  reserved_bytes_ = num_bytes;
  return reserved_;
}

HostMemory::HostMemory(HostMemory&& other) noexcept { swap(other); }

HostMemory& HostMemory::operator=(HostMemory&& other) noexcept {
  HostMemory taken(std::move(other));
  swap(taken);
  return *this;
}

void HostMemory::swap(HostMemory& other) noexcept {
  std::swap(options_, other.options_);
  std::swap(label_, other.label_);
  std::swap(access_, other.access_);
  std::swap(may_write_, other.may_write_);
  std::swap(data_, other.data_);
  std::swap(num_bytes_, other.num_bytes_);
  std::swap(mapped_bytes_, other.mapped_bytes_);
  std::swap(reserved_, other.reserved_);
  std::swap(reserved_bytes_, other.reserved_bytes_);
  std::swap(inherited_, other.inherited_);
  std::swap(owner_, other.owner_);
  std::swap(descriptors_, other.descriptors_);
  std::swap(cumem_, other.cumem_);
}

HostMemory::~HostMemory() {
  if (reserved_ == nullptr) return;
  if (inherited_ || getpid() == owner_) {
    munmap(reserved_, static_cast<size_t>(reserved_bytes_));
    return;
  }
  // A forked child that did not get the memory: other mappings may have taken its place by now.
}

std::vector<FileDescriptor> HostMemory::read_only_descriptors() const {
  std::vector<FileDescriptor> copies;
  for (const FileDescriptor& descriptor : descriptors_) {
    if (options_.kind == MemoryKind::kCumem) {
      copies.push_back(descriptor.duplicate());
      continue;
    }
    const std::string path = concat("/proc/self/fd/", descriptor.get());
    FileDescriptor copy(open(path.c_str(), O_RDONLY | O_CLOEXEC));
    if (!copy) {
      throw Error(ENGRAM_INTERNAL_ERROR,
                  concat(label_, ": cannot open ", path, " for reading: ", std::strerror(errno)));
    }
    copies.push_back(std::move(copy));
  }
  return copies;
}

void HostMemory::prefault(int64_t begin, int64_t end, const std::function<bool()>& cancelled) {
  ENGRAM_CHECK(begin >= 0 && begin <= end && end <= num_bytes_, label_,
               ": expected a range of bytes within ", num_bytes_, ", found ", begin, " to ", end);
  ENGRAM_CHECK(access_ == Access::kReadWrite, label_,
               ": expected memory that this process may write, found a read-only mapping");
  if (options_.kind == MemoryKind::kCumem || begin == end) return;
  const int64_t page = whole_pages(1, options_.pages);
  begin = begin / page * page;
  end = whole_pages(end, options_.pages);
  const std::string what = concat(label_, ": memory \"", memory_kind_name(options_.kind),
                                  "\" with pages \"", page_kind_name(options_.pages), "\"");
  populate_pages(data_ + begin, end - begin, options_.pages,
                 descriptors_.empty() ? -1 : descriptors_[0].get(), begin, what, cancelled);
}

void HostMemory::protect() { set_access(Access::kReadOnly); }

void HostMemory::unprotect() {
  if (may_write_) set_access(Access::kReadWrite);
}

void HostMemory::set_access(Access access) {
  if (options_.kind == MemoryKind::kCumem || access_ == access) return;
  const bool writes = access == Access::kReadWrite;
  if (mprotect(data_, static_cast<size_t>(mapped_bytes_),
               writes ? PROT_READ | PROT_WRITE : PROT_READ) != 0) {
    throw Error(ENGRAM_INTERNAL_ERROR,
                concat(label_, ": cannot be made ",
                       writes ? "writable: " : "read-only: ", std::strerror(errno)));
  }
  access_ = access;
}

void HostMemory::seal() const {
  if (options_.kind == MemoryKind::kMemfd) forbid_writers(descriptors_.at(0));
}

void HostMemory::set_inherited(bool inherited) {
  if (options_.kind == MemoryKind::kCumem || inherited == inherited_) return;
  if (madvise(reserved_, static_cast<size_t>(reserved_bytes_),
              inherited ? MADV_DOFORK : MADV_DONTFORK) != 0) {
    throw Error(ENGRAM_INTERNAL_ERROR,
                concat(label_, ": forks and this memory: ", std::strerror(errno)));
  }
  inherited_ = inherited;
}

}  // namespace engram
