// SPDX-License-Identifier: Apache-2.0
//! \file group.h
//! The processes of one machine that share tables, for the time of one bind.
//!
//! Rank 0 listens on a Unix socket while the others meet it; from then on each has one connection
//! to rank 0 until the Group's end. There is one operation, exchange(), and no rank goes on from it
//! unless all do: an Error, a death (kill -9 too), silence (a stopped process) or an interrupt on
//! any rank is every rank's Error, noticed at once except for silence. Nothing named outlives the
//! meeting, and nothing at all the Group.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "table/socket.h"

namespace engram {

struct GroupOptions {
  //! The same for all ranks of one job, another for another job. Groups of the same name may follow
  //! one another, each from the end of a rank's last.
  std::string name = "default";
  int32_t rank = 0;  //!< 0 to size - 1
  int32_t size = 1;  //!< ranks of this machine
  //! Path of a socket, for ranks in separate network namespaces; empty: an abstract name.
  std::string socket;
  //! Seconds to wait for ranks that do not come, and until a rank that says nothing counts as dead.
  double timeout_s = 120;
};

//! Bytes that all ranks have done, and will have. May be read by any thread at any time.
struct Progress {
  std::atomic<int64_t> done{0};
  std::atomic<int64_t> total{0};
};

class Star;  // this rank's side of the meeting: star.h

class Group {
 public:
  //! What a rank adds to an exchange.
  using Part = Message;

  //! What work sees of the group while it runs. Thread-safe.
  class Work {
   public:
    //! Both outlive it.
    Work(const std::atomic<bool>& interrupted, std::atomic<int64_t>& done)
        : interrupted_(interrupted), done_(done) {}
    Work(const Work&) = delete;
    Work& operator=(const Work&) = delete;

    //! True once any rank has failed or the user interrupts: then work ends soon, by returning or
    //! throwing. All ranks wait for it up to kGraceSeconds, this one until it ends. What work
    //! throws after it has been told is taken for its consequence, and is in nobody's Error.
    bool cancelled() const {
      if (!stopped_ && !interrupted_) return false;
      told_ = true;
      return true;
    }
    //! Bytes done since the last call, for Progress.
    void add_bytes(int64_t num_bytes) { done_ += num_bytes; }

    //! For the group: cancelled() is true from here on; whether it has said so.
    void stop() { stopped_ = true; }
    bool told() const { return told_; }

   private:
    const std::atomic<bool>& interrupted_;
    std::atomic<int64_t>& done_;
    std::atomic<bool> stopped_{false};
    mutable std::atomic<bool> told_{false};
  };

  //! Ranks that work on after another has failed are waited for this long; then their texts are
  //! missing in the others' Error.
  static constexpr double kGraceSeconds = 5;

  //! Meets the others. Throws Error, one line and the same on all ranks that came: who did not come
  //! by timeout_s, a rank that came twice (with both pids), sizes or versions that differ, a death,
  //! and that `cancelled` was set. `cancelled` is looked at ten times a second from here on, on
  //! each rank by itself. `progress` is kept up to date where it is not null. Both outlive the
  //! Group. A group of one opens no socket and starts no thread.
  //! NOTE: between two calls of a rank the others wait, and no more than timeout_s.
  explicit Group(const GroupOptions& options, const std::atomic<bool>& cancelled,
                 Progress* progress = nullptr);
  ~Group();
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  int32_t rank() const;
  int32_t size() const;

  //! Runs `work` on a thread of its own while this one watches the others. Every rank gets every
  //! rank's part, by rank; each rank's descriptors are its own. Throws Error on all ranks unless
  //! all work succeeded, once the work here has ended: "ranks 2, 3: TEXT; rank 5: died in load (pid
  //! 123)", its status that of the first of these; after that, always the same one again.
  //! `phase`, a word for errors, must be the same on all ranks.
  //! NOTE: a new thread's current CUDA device is 0. In a group of one it is the caller's thread.
  std::vector<Part> exchange(const std::string& phase, const std::function<Part(Work&)>& work);

  //! Of all ranks together; sets Progress::total here.
  void set_total_bytes(int64_t num_bytes);

 private:
  std::unique_ptr<Progress> own_progress_;  // where the caller has none
  std::unique_ptr<Star> star_;
};

}  // namespace engram
