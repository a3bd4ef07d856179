// SPDX-License-Identifier: Apache-2.0
//! \file star.h
//! The two sides of a group, rank 0 and the others, and what they share.
//!
//! Messages are JSON objects with "type":
//!   hello    version, group, rank, size       to rank 0; what it answers:
//!   welcome                                   the rank is one of the group's
//!   refused  text                             it is not; nobody else is told
//!   met                                       all ranks are there
//!   beat     done [, stop]                    both ways: it lives, bytes done; stop: a rank failed
//!   part     phase, done, data; descriptors   to rank 0: work succeeded
//!   failed   status, text                     to rank 0: it did not; no text: since others failed
//!   parts    done, parts: [{data, fds}];      an exchange's end: all parts, and the descriptors of
//!            descriptors                      all but the receiver's
//!   verdict  status, text                     the group's end
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "table/group.h"
#include "table/watch.h"

namespace engram {

constexpr int kGroupVersion = 1;
constexpr char kMeeting[] = "the meeting";  // its phase in errors

using WorkFunction = std::function<Group::Part(Group::Work&)>;

//! Why a rank failed.
struct Failure {
  engram_status status = ENGRAM_INTERNAL_ERROR;
  std::string text;  //!< empty: since others did
};
using Failures = std::map<int32_t, Failure>;  // by rank

//! Every rank's Error; of one failure or more, none without text.
Error joined(const Failures& failures);
Failure loss_failure(pid_t pid, Loss loss, const std::string& detail, const std::string& phase,
                     double timeout_s);
Failure interrupted_failure();

//! What all sides are made of; the references outlive them.
struct StarSetup {
  GroupOptions options;
  const std::atomic<bool>& interrupted;
  Progress& progress;
  Address address() const { return {"group/" + options.name, options.socket}; }
};

class Star {
 public:
  explicit Star(const StarSetup& setup) : setup_(setup) {}
  virtual ~Star() = default;
  virtual std::vector<Group::Part> exchange(const std::string& phase, const WorkFunction& work) = 0;
  const GroupOptions& options() const { return setup_.options; }
  Progress& progress() { return setup_.progress; }

 protected:
  const StarSetup setup_;
};

//! What a rank is known by before its first message, and that.
std::string rank_word(int32_t rank);
nlohmann::json hello_of(const GroupOptions& options);

//! These meet the other ranks; throw Error. The first is for groups of one.
std::unique_ptr<Star> make_alone(const StarSetup& setup);
std::unique_ptr<Star> make_hub(const StarSetup& setup);
std::unique_ptr<Star> make_spoke(const StarSetup& setup);

//! Work on a thread of its own, which the end of this object waits for.
class Worker {
 public:
  //! Wakes `watch` at its end.
  Worker(const WorkFunction& work, const StarSetup& setup, std::atomic<int64_t>& done,
         Watch& watch);
  ~Worker();
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  void stop() { state_.stop(); }
  //! Stops it and waits for its end.
  void finish();
  bool ended() const { return ended_; }
  //! Once it has ended: the part, unless there is a failure.
  std::optional<Failure>& failure() { return failure_; }
  Group::Part& part() { return part_; }

 private:
  void run(const WorkFunction& work) noexcept;

  const std::atomic<bool>& interrupted_;
  Watch& watch_;
  Group::Work state_;
  Group::Part part_;
  std::optional<Failure> failure_;
  std::atomic<bool> ended_{false};
  std::thread thread_;
};

}  // namespace engram
