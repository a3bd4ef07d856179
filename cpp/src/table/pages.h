// SPDX-License-Identifier: Apache-2.0
//! \file pages.h
//! What pages host memory lies on: the wish, how it is carried out, and what came of it.
#pragma once

#include <unistd.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace engram {

//! Pages of host memory.
enum class PageKind {
  kAuto,  //!< transparent huge pages as far as the kernel gives them, the rest on 4 KiB
  k4K,    //!< no huge page
  k2M,    //!< hugetlb: pages that the administrator set aside (vm.nr_hugepages)
};

constexpr int64_t kHugePageBytes = 2 << 20;

//! "auto", "4k" or "2m".
const char* page_kind_name(PageKind kind);
//! The inverse. Throws Error, naming what there is.
PageKind parse_page_kind(const std::string& name);

//! Bytes of this machine's smallest page.
inline int64_t small_page_bytes() {
  static const int64_t bytes = sysconf(_SC_PAGESIZE);
  return bytes;
}
//! num_bytes in whole pages of the kind, in bytes: what memory of that many bytes takes up.
int64_t whole_pages(int64_t num_bytes, PageKind kind);

//! Bytes on hugetlb pages of 2 MiB that are still to be had; -1 where the kernel does not say.
//! `root` is another one in tests alone.
int64_t free_hugetlb_bytes(const std::string& root = "/");

//! Tells the kernel which pages a mapping wants. A kernel that knows none of it says no, which is
//! no error: page_shares() shows what came of it.
void advise_pages(uint8_t* begin, int64_t num_bytes, PageKind kind);

//! Gives every page of a writable mapping its memory (a file mapping: its file, at `offset`), on
//! several threads, without changing a byte, then collapses small pages into huge ones where the
//! kind wants them. Never ends in a signal: memory that is not to be had (a full tmpfs, hugetlb
//! pages on other nodes) is an Error (ENGRAM_OUT_OF_MEMORY) that begins with `what` and gives the
//! bytes done. `begin` and `offset` are multiples of the page. `file` is -1 for anonymous memory.
//! NOTE: a memory cgroup that runs full kills instead; check_room() (limits.h) comes first.
//! `cancelled` is asked between pieces of 64 MiB, on any thread; once it says yes, pages are left
//! out and nothing is thrown. May be empty.
void populate_pages(uint8_t* begin, int64_t num_bytes, PageKind kind, int file, int64_t offset,
                    const std::string& what, const std::function<bool()>& cancelled);

//! How much of a range this process has mapped, and how much of that on pages of 2 MiB or more.
struct PageShare {
  int64_t huge_bytes = 0;
  int64_t resident_bytes = 0;
};

struct AddressRange {
  const void* begin = nullptr;
  int64_t num_bytes = 0;
};

//! From the kernel's own count (smaps), for mappings of HostMemory, whose borders are those of the
//! kernel's count. The kernel walks the page tables of all that this process has mapped below the
//! end of the last range, about 20 ms a GiB on small pages and nothing to speak of on huge ones:
//! so ask for all ranges at once, and seldom. Pages that this process neither touched nor
//! registered with a GPU are not resident. Zeros where there is no /proc.
std::vector<PageShare> page_shares(const std::vector<AddressRange>& ranges);

}  // namespace engram
