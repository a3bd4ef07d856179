// SPDX-License-Identifier: Apache-2.0
//! \file hub.h
//! Rank 0 of a group: all others' connections, and every decision. How the ranks meet is in
//! hub_meeting.cpp.
#pragma once

#include "table/star.h"

namespace engram {

class Hub : public Star, private WatchHandler {
 public:
  explicit Hub(const StarSetup& setup);
  std::vector<Group::Part> exchange(const std::string& phase, const WorkFunction& work) override;

 private:
  //! What a rank has said since the last decision.
  struct Said {
    bool all = false;  // its work has ended, or it is lost
    std::string phase;
    Group::Part part;
  };
  //! Of a process that had connected as a rank, and not said hello.
  struct EarlyDeath {
    pid_t pid;
    Deadline deadline;  // for another in its place
  };

  void on_message(Peer& peer, Message message) override;
  void on_loss(Peer& peer, Loss loss, const std::string& detail) override;
  void on_beat() override;
  void on_hello(Peer& peer, const nlohmann::json& hello);

  std::unique_ptr<Listener> listen();
  void accept(Listener& listener);
  bool all_came() const;
  void meet(Listener& listener);
  void note_early_death(const Peer& peer);
  bool fail_dead();
  void fail_missing(const Listener& listener);
  //! A rank's first failure counts.
  void fail(int32_t rank, Failure failure);
  bool grace_is_over() const {
    return !failures_.empty() && std::chrono::steady_clock::now() >= grace_;
  }
  void hear_worker(Worker& worker);
  bool is_decided();
  std::vector<Group::Part> share_parts();
  [[noreturn]] void end_group();
  void queue_all(const nlohmann::json& data);
  //! Until all is with the kernel or its receiver lost.
  void flush(double seconds);
  nlohmann::json beat();

  Watch watch_;
  Deadline deadline_;                         // of the meeting
  int32_t largest_size_;                      // of groups that ranks came for
  std::map<int32_t, EarlyDeath> died_early_;  // by rank
  std::string phase_ = kMeeting;
  std::vector<std::optional<pid_t>> pids_;  // by rank; none: it has not come
  std::vector<int64_t> others_done_;        // by rank
  std::vector<Said> said_;                  // by rank
  Failures failures_;
  Deadline grace_;
  Worker* worker_ = nullptr;  // while an exchange runs
  std::optional<Error> failure_;
  std::atomic<int64_t> done_{0};
};

}  // namespace engram
