// SPDX-License-Identifier: Apache-2.0
//! \file groups.h
//! Ranks of a group as processes, which say what became of them.
#pragma once

#include <sys/mman.h>

#include "ranks.h"
#include "table/group.h"

namespace engram {

using Body = std::function<std::string(Group&)>;

inline std::string new_name() {
  static std::atomic<int> count{0};
  return concat("test/", getpid(), "/", ++count);
}

//! A timeout that ends no test: who waits for it is waited for no more.
constexpr double kNever = 10 * kPatience;

inline GroupOptions options_of(const std::string& name, int32_t rank, int32_t size,
                               double timeout = kNever) {
  return {.name = name, .rank = rank, .size = size, .timeout_s = timeout};
}

//! Body's text or the Error's, "TIME: TEXT" apart; descriptors that it leaves are told too.
inline std::string run_rank(const GroupOptions& options, const Body& body,
                            const std::atomic<bool>& cancelled) {
  const size_t before = count_descriptors();
  std::string text;
  try {
    Group group(options, cancelled);
    text = body(group);
  } catch (const Error& error) {
    text = error.what();
  }
  const size_t after = count_descriptors();
  return after == before ? text : concat(text, " LEFT ", after - before, " descriptors");
}

inline Process start(const GroupOptions& options, const Body& body) {
  return Process([=] {
    const std::atomic<bool> cancelled{false};
    return run_rank(options, body, cancelled);
  });
}

inline std::vector<Process> start_all(const std::string& name, int32_t size, const Body& body,
                                      double timeout = kNever) {
  std::vector<Process> ranks;
  for (int32_t rank = 0; rank < size; ++rank) {
    ranks.push_back(start(options_of(name, rank, size, timeout), body));
  }
  return ranks;
}

inline Group::Part nothing(Group::Work&) { return {}; }

//! All results but those of `without` are `text`.
inline void check_all(std::vector<Process>& ranks, const std::string& text, int without = -1) {
  for (size_t i = 0; i < ranks.size(); ++i) {
    if (static_cast<int>(i) == without) continue;
    CAPTURE(i);
    CHECK(ranks[i].result() == text);
  }
}

inline FileDescriptor file_of(const std::string& text) {
  FileDescriptor made(memfd_create("text", MFD_CLOEXEC));
  if (write(made.get(), text.data(), text.size()) != static_cast<ssize_t>(text.size())) abort();
  return made;
}

inline std::string text_in(const FileDescriptor& file) {
  char bytes[64];
  const ssize_t count = pread(file.get(), bytes, sizeof(bytes), 0);
  return count < 0 ? "unreadable" : std::string(bytes, static_cast<size_t>(count));
}

//! Exchanges `num_fds` descriptors a rank and looks at all that come.
inline std::string exchange_files(Group& group, int round, int num_fds) {
  const auto name = [&](int rank, int i) { return concat(round, " of ", rank, ": ", i); };
  const auto parts = group.exchange("files", [&](Group::Work&) {
    Group::Part part{{{"rank", group.rank()}, {"large", std::string(50000, 'x')}}, {}};
    for (int i = 0; i < num_fds; ++i) part.fds.push_back(file_of(name(group.rank(), i)));
    return part;
  });
  if (static_cast<int32_t>(parts.size()) != group.size()) return "another number of parts";
  for (int32_t rank = 0; rank < group.size(); ++rank) {
    const Group::Part& part = parts[static_cast<size_t>(rank)];
    if (part.data.at("rank") != rank) return "a part out of order";
    if (static_cast<int>(part.fds.size()) != num_fds) return "another number of descriptors";
    for (int i = 0; i < num_fds; ++i) {
      if (text_in(part.fds[static_cast<size_t>(i)]) != name(rank, i)) return "another file";
    }
  }
  return "ok";
}

}  // namespace engram
