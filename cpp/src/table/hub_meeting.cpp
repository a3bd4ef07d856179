// SPDX-License-Identifier: Apache-2.0
// Rank 0 while the ranks of its group come.
#include <algorithm>

#include "table/hub.h"
#include "table/points.h"

namespace engram {
namespace {

using std::chrono::steady_clock;

Failure came_twice(pid_t first, pid_t second) {
  return {ENGRAM_INVALID_ARGUMENT,
          concat("came twice (pids ", first, " and ", second,
                 "): expected each rank once; two jobs need two group names")};
}

}  // namespace

std::unique_ptr<Listener> Hub::listen() {
  try {
    return std::make_unique<Listener>(setup_.address());
  } catch (const AddressInUse& error) {
    // The rank 0 that was first hears of the second, so that its group ends as well.
    try {
      if (std::optional<Connection> first = try_connect(setup_.address())) {
        first->queue(hello_of(options()));
        first->flush();
      }
    } catch (const Error&) {
      // It has ended meanwhile.
    }
    throw joined({{0, came_twice(error.pid(), getpid())}});
  } catch (const Error& error) {
    throw joined({{0, {error.status(), error.what()}}});
  }
}

void Hub::accept(Listener& listener) {
  try {
    while (std::optional<Connection> made = listener.accept(Deadline())) {
      ENGRAM_POINT("group.accepted");
      watch_.add(std::move(*made));
    }
  } catch (const Error& error) {
    fail(0, {error.status(), error.what()});
  }
}

//! Of the largest group that a rank has spoken of: who expects more ranks has some.
bool Hub::all_came() const {
  for (int32_t rank = 0; rank < largest_size_; ++rank) {
    const bool welcome = rank < options().size && pids_[static_cast<size_t>(rank)].has_value();
    if (!welcome && failures_.count(rank) == 0) return false;
  }
  return true;
}

void Hub::meet(Listener& listener) {
  while (!all_came() || !failures_.empty()) {
    if (setup_.interrupted) return fail(0, interrupted_failure());
    // Who comes now is told why there will be no group.
    if (grace_is_over() || (!failures_.empty() && all_came())) return;
    if (fail_dead()) return;
    if (steady_clock::now() >= deadline_) return fail_missing(listener);
    watch_.step(*this, listener.fd());
    accept(listener);
  }
}

//! A rank that died before it said so. Or one of that number of a job before ours: then ours comes.
void Hub::note_early_death(const Peer& peer) {
  const std::string word = peer.connection.peer_word();
  for (int32_t rank = 1; rank < options().size; ++rank) {
    if (word != rank_word(rank)) continue;
    died_early_[rank] = {peer.connection.peer_pid(), deadline_after(Group::kGraceSeconds)};
  }
}

//! Whether a rank has died before it said anything, and no other has come in its place.
bool Hub::fail_dead() {
  const size_t before = failures_.size();
  for (const auto& [rank, death] : died_early_) {
    if (pids_[static_cast<size_t>(rank)] || steady_clock::now() < death.deadline) continue;
    fail(rank, {.text = concat("did not come; pid ", death.pid, " died as it came")});
  }
  return failures_.size() > before;
}

void Hub::fail_missing(const Listener& listener) {
  const std::string text = concat("never came within ", options().timeout_s, " s");
  std::string note = listener.turned_away();
  if (!note.empty()) note = concat("; ", note, " was turned away");
  for (size_t rank = 0; rank < pids_.size(); ++rank) {
    if (!pids_[rank]) fail(static_cast<int32_t>(rank), {.text = text + std::exchange(note, "")});
  }
}

void Hub::on_hello(Peer& peer, const nlohmann::json& hello) {
  const pid_t pid = peer.connection.peer_pid();
  const std::string group = hello.at("group");
  if (group != options().name) {
    return peer.connection.queue(
        {{"type", "refused"},
         {"status", ENGRAM_INVALID_ARGUMENT},
         {"text", concat(address_text(setup_.address()), ": expected group '", group, "', found '",
                         options().name, "'")}});
  }
  const int32_t rank = hello.at("rank");
  const int version = hello.at("version");
  const int32_t size = hello.at("size");
  largest_size_ = std::max(largest_size_, size);
  if (version != kGroupVersion) {
    fail(rank, {ENGRAM_INVALID_ARGUMENT,
                concat("expected the group's messages of version ", kGroupVersion,
                       ", as on rank 0, found ", version, " (pid ", pid,
                       "): all ranks need the same release of this library")});
  } else if (size != options().size || rank < 0 || rank >= size) {
    fail(rank, {ENGRAM_INVALID_ARGUMENT, concat("expected a group of ", options().size,
                                                ", as on rank 0, got ", size, " (pid ", pid, ")")});
  } else if (pids_[static_cast<size_t>(rank)]) {
    fail(rank, came_twice(*pids_[static_cast<size_t>(rank)], pid));
  } else {
    peer.rank = rank;
    pids_[static_cast<size_t>(rank)] = pid;
    peer.connection.queue({{"type", "welcome"}});
  }
}

}  // namespace engram
