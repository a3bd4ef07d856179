// SPDX-License-Identifier: Apache-2.0
#include "table/pages.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>

#include "engram/error.h"
#include "parallel.h"
#include "table/numa.h"
#include "table/points.h"

namespace engram {
namespace {

// Of newer kernels than the headers of the machine that builds.
constexpr int kPopulateWrite = 23;  // MADV_POPULATE_WRITE, Linux 5.14
constexpr int kCollapse = 25;       // MADV_COLLAPSE, Linux 6.1

constexpr int64_t kPieceBytes = 64 << 20;  // what one thread populates at a time

int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

//! errno of an madvise, 0 where it went well.
int advise(uint8_t* begin, int64_t num_bytes, int advice) {
  for (;;) {
    if (madvise(begin, static_cast<size_t>(num_bytes), advice) == 0) return 0;
    if (errno != EINTR && errno != EAGAIN) return errno;
    if (advice == kCollapse) return errno;  // EAGAIN: the kernel has no huge page now
  }
}

//! A write to each page that leaves its bytes as they are, whoever else writes them.
void touch(uint8_t* begin, int64_t num_bytes, int64_t page_bytes) {
  for (int64_t at = 0; at < num_bytes; at += page_bytes) {
    __atomic_fetch_or(begin + at, uint8_t{0}, __ATOMIC_RELAXED);
  }
}

//! Kernels before 5.14 end a process (SIGBUS) that touches a page for which its file has no room;
//! so the file gets the room first.
int populate_older(uint8_t* begin, int64_t num_bytes, PageKind kind, int file, int64_t offset) {
  if (file >= 0 && fallocate(file, 0, offset, num_bytes) != 0) return errno;
  touch(begin, num_bytes, kind == PageKind::k2M ? kHugePageBytes : small_page_bytes());
  return 0;
}

int populate(uint8_t* begin, int64_t num_bytes, PageKind kind, int file, int64_t offset) {
  const int code = advise(begin, num_bytes, kPopulateWrite);
  return code == EINVAL ? populate_older(begin, num_bytes, kind, file, offset) : code;
}

//! Huge pages for whole 2 MiB of a range that may be empty. MADV_COLLAPSE fills in what is missing,
//! but takes no empty range, and takes its node from the pages that are there, not from the NUMA
//! policy: so each 2 MiB first gets one page, placed by the policy. Interleaving goes by the page's
//! number modulo the number of nodes: the first pages of all 2 MiB would be on one node, so the
//! n-th 2 MiB gets a page whose number is n modulo the nodes.
void collapse(uint8_t* begin, int64_t num_bytes, int64_t offset, int64_t num_nodes) {
  const int64_t num_huge = num_bytes / kHugePageBytes;
  const int64_t num_pages = kHugePageBytes / small_page_bytes();
  for (int64_t i = 0; i < num_huge; ++i) {
    const int64_t number = offset / kHugePageBytes + i;
    const int64_t excess = number * (num_pages - 1) % num_nodes;
    const int64_t page = (num_nodes - excess) % num_nodes;
    if (advise(begin + i * kHugePageBytes + page * small_page_bytes(), small_page_bytes(),
               kPopulateWrite) != 0) {
      return;  // no room, or an older kernel, which has no MADV_COLLAPSE either
    }
  }
  if (num_huge > 0) advise(begin, num_huge * kHugePageBytes, kCollapse);
}

//! What a file system says about its room, for errors; empty for those without a size.
std::string room_text(int file) {
  struct statfs status{};
  if (file < 0 || fstatfs(file, &status) != 0 || status.f_blocks == 0) return "";
  return concat("; its file system has ", status.f_bavail * static_cast<uint64_t>(status.f_bsize),
                " of ", status.f_blocks * static_cast<uint64_t>(status.f_bsize), " bytes free");
}

}  // namespace

const char* page_kind_name(PageKind kind) {
  switch (kind) {
    case PageKind::kAuto:
      return "auto";
    case PageKind::k4K:
      return "4k";
    case PageKind::k2M:
      return "2m";
  }
  return "?";
}

PageKind parse_page_kind(const std::string& name) {
  for (const PageKind kind : {PageKind::kAuto, PageKind::k4K, PageKind::k2M}) {
    if (name == page_kind_name(kind)) return kind;
  }
  throw Error(ENGRAM_INVALID_ARGUMENT,
              concat("pages: expected \"auto\", \"4k\" or \"2m\", found \"", name, "\""));
}

int64_t whole_pages(int64_t num_bytes, PageKind kind) {
  return round_up(num_bytes, kind == PageKind::k2M ? kHugePageBytes : small_page_bytes());
}

int64_t free_hugetlb_bytes(const std::string& root) {
  const auto count = [&](const char* name) {
    int64_t pages = 0;
    std::ifstream file(root + "sys/kernel/mm/hugepages/hugepages-2048kB/" + name);
    return file >> pages ? pages : -1;
  };
  const int64_t free = count("free_hugepages");
  if (free < 0) return -1;
  // Surplus pages are made when they are asked for, if the kernel finds the memory.
  const int64_t surplus = count("nr_overcommit_hugepages") - count("surplus_hugepages");
  return (free - count("resv_hugepages") + std::max<int64_t>(0, surplus)) * kHugePageBytes;
}

void advise_pages(uint8_t* begin, int64_t num_bytes, PageKind kind) {
  if (kind == PageKind::kAuto) advise(begin, num_bytes, MADV_HUGEPAGE);
  if (kind == PageKind::k4K) advise(begin, num_bytes, MADV_NOHUGEPAGE);
}

void populate_pages(uint8_t* begin, int64_t num_bytes, PageKind kind, int file, int64_t offset,
                    const std::string& what, const std::function<bool()>& cancelled) {
  std::atomic<int64_t> done{0};
  static const auto num_nodes =
      static_cast<int64_t>(allowed_nodes().size());  // read from several files
  const int64_t lead = offset % kPieceBytes;         // pieces end at multiples in the file
  parallel_for(lead + num_bytes, kPieceBytes, 0, [&](int64_t piece, int64_t piece_end) {
    if (cancelled && cancelled()) return;
    ENGRAM_POINT("prefault.touch");
    const int64_t from = std::max<int64_t>(0, piece - lead);
    const int64_t to = piece_end - lead;
    if (kind == PageKind::kAuto) {
      // The kernel maps a huge page only where address and offset agree modulo 2 MiB.
      const int64_t first = round_up(offset + from, kHugePageBytes) - offset;
      if (first < to) collapse(begin + first, to - first, offset + first, num_nodes);
    }
    const int code = populate(begin + from, to - from, kind, file, offset + from);
    if (code != 0) {
      // EFAULT: a touch would have raised SIGBUS, for its file system (or hugetlb) is full.
      const int cause = code == EFAULT ? (kind == PageKind::k2M ? ENOMEM : ENOSPC) : code;
      throw Error(
          ENGRAM_OUT_OF_MEMORY,
          concat(what, ": expected ", num_bytes, " bytes of memory from byte ", offset, ", found ",
                 done.load(), " (", std::strerror(cause), ")", room_text(file)));
    }
    done += to - from;
  });
}

std::vector<PageShare> page_shares(const std::vector<AddressRange>& ranges) {
  std::vector<PageShare> shares(ranges.size());
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> smaps(std::fopen("/proc/self/smaps", "re"),
                                                              &std::fclose);
  if (smaps == nullptr) return shares;
  uintptr_t end_of_all = 0;
  for (const AddressRange& range : ranges) {
    end_of_all = std::max(end_of_all, reinterpret_cast<uintptr_t>(range.begin) +
                                          static_cast<uintptr_t>(range.num_bytes));
  }
  struct Line {
    char* text = nullptr;
    size_t size = 0;
    ~Line() { std::free(text); }
  } line;
  PageShare* share = nullptr;
  while (getline(&line.text, &line.size, smaps.get()) > 0) {
    unsigned long begin = 0;
    unsigned long end = 0;
    if (std::sscanf(line.text, "%lx-%lx ", &begin, &end) == 2) {
      if (begin >= end_of_all) break;  // the kernel walks the pages of what is read, and no others
      share = nullptr;
      for (size_t i = 0; i < ranges.size(); ++i) {
        const auto first = reinterpret_cast<uintptr_t>(ranges[i].begin);
        const uintptr_t last = first + static_cast<uintptr_t>(ranges[i].num_bytes);
        if (begin < last && end > first) share = &shares[i];
      }
      continue;
    }
    char name[32];
    long kibibytes = 0;
    if (share == nullptr || std::sscanf(line.text, "%31[^:]: %ld kB", name, &kibibytes) != 2) {
      continue;
    }
    const std::string key = name;
    const bool hugetlb = key == "Shared_Hugetlb" || key == "Private_Hugetlb";
    const bool huge = key == "AnonHugePages" || key == "ShmemPmdMapped" || key == "FilePmdMapped";
    if (hugetlb || huge) share->huge_bytes += kibibytes * 1024;
    if (hugetlb || key == "Rss") share->resident_bytes += kibibytes * 1024;  // Rss is without it
  }
  return shares;
}

}  // namespace engram
