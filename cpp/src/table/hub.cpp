// SPDX-License-Identifier: Apache-2.0
// Rank 0: all others' connections, and every decision.
#include <algorithm>

#include "table/points.h"
#include "table/star.h"

namespace engram {
namespace {

using std::chrono::steady_clock;

constexpr double kVerdictSeconds = 2;  // for a verdict to be with the kernel

Failure came_twice(pid_t first, pid_t second) {
  return {ENGRAM_INVALID_ARGUMENT,
          concat("came twice (pids ", first, " and ", second,
                 "): expected each rank once; two jobs need two group names")};
}

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

  void on_message(Peer& peer, Message message) override;
  void on_loss(Peer& peer, Loss loss, const std::string& detail) override;
  void on_beat() override;
  void on_hello(Peer& peer, const nlohmann::json& hello);

  std::unique_ptr<Listener> listen();
  void accept(Listener& listener);
  void meet(Listener& listener);
  void fail_missing(const Listener& listener);
  //! A rank's first failure counts.
  void fail(int32_t rank, Failure failure);
  bool grace_is_over() const { return !failures_.empty() && steady_clock::now() >= grace_; }
  void hear_worker(Worker& worker);
  bool is_decided();
  std::vector<Group::Part> share_parts();
  [[noreturn]] void end_group();
  void queue_all(const nlohmann::json& data);
  //! Until all is with the kernel or its receiver lost.
  void flush(double seconds);
  nlohmann::json beat();

  Watch watch_;
  Deadline deadline_;  // of the meeting
  pid_t died_early_ = 0;
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

Hub::Hub(const StarSetup& setup)
    : Star(setup),
      watch_(setup.options.timeout_s),
      deadline_(deadline_after(setup.options.timeout_s)),
      pids_(static_cast<size_t>(setup.options.size)),
      others_done_(pids_.size()),
      said_(pids_.size()) {
  pids_[0] = getpid();
  {
    const std::unique_ptr<Listener> listener = listen();
    ENGRAM_POINT("group.listen");
    meet(*listener);
  }
  if (!failures_.empty()) end_group();
  watch_.peers().remove_if([](const Peer& peer) { return peer.rank < 0; });
  queue_all({{"type", "met"}});
  flush(options().timeout_s);
}

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

void Hub::meet(Listener& listener) {
  const auto all_came = [this] {
    return std::all_of(pids_.begin(), pids_.end(), [](const auto& pid) { return pid.has_value(); });
  };
  while (!all_came() || !failures_.empty()) {
    if (setup_.interrupted) return fail(0, interrupted_failure());
    // Who comes now is told why there will be no group.
    if (grace_is_over() || (!failures_.empty() && all_came())) return;
    if (steady_clock::now() >= deadline_) return fail_missing(listener);
    watch_.step(*this, listener.fd());
    accept(listener);
  }
}

void Hub::fail_missing(const Listener& listener) {
  std::string text = concat("never came within ", options().timeout_s, " s");
  if (died_early_ != 0) text = concat("did not come; pid ", died_early_, " died as it came");
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
    return watch_.queue(peer, {{"type", "refused"},
                               {"status", ENGRAM_INVALID_ARGUMENT},
                               {"text", concat(address_text(setup_.address()), ": expected group '",
                                               group, "', found '", options().name, "'")}});
  }
  const int32_t rank = hello.at("rank");
  const int version = hello.at("version");
  const int32_t size = hello.at("size");
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
    watch_.queue(peer, {{"type", "welcome"}});
  }
}

void Hub::on_message(Peer& peer, Message message) {
  const nlohmann::json& data = message.data;
  const std::string type = data.at("type");
  if (peer.rank < 0) {
    if (type == "hello") on_hello(peer, data);
    return;
  }
  const auto rank = static_cast<size_t>(peer.rank);
  if (type == "beat" || type == "part") others_done_[rank] = data.at("done").get<int64_t>();
  if (type == "part") {
    said_[rank] = {true, data.at("phase"), {data.at("data"), std::move(message.fds)}};
  } else if (type == "failed") {
    said_[rank].all = true;
    fail(peer.rank, {data.at("status").get<engram_status>(), data.at("text")});
  }
}

void Hub::on_loss(Peer& peer, Loss loss, const std::string& detail) {
  if (peer.rank < 0) {
    // Most likely one of those that are missing. Or one of a job before ours: then they come.
    if (loss != Loss::kDied || phase_ != kMeeting) return;
    died_early_ = peer.connection.peer_pid();
    deadline_ = std::min(deadline_, deadline_after(Group::kGraceSeconds));
    return;
  }
  said_[static_cast<size_t>(peer.rank)].all = true;
  fail(peer.rank, loss_failure(peer, loss, detail, phase_, options().timeout_s));
  // Who is only stopped finds the verdict when it goes on.
  if (loss == Loss::kSilent) peer.lost = false;
}

void Hub::fail(int32_t rank, Failure failure) {
  if (failure.text.empty()) return;  // since others failed
  if (failures_.empty()) grace_ = deadline_after(Group::kGraceSeconds);
  const bool is_first = failures_.empty();
  failures_.emplace(rank, std::move(failure));
  if (worker_ != nullptr) worker_->stop();
  if (is_first) queue_all(beat());
}

nlohmann::json Hub::beat() {
  int64_t sum = done_;
  for (const int64_t done : others_done_) sum += done;
  setup_.progress.done = sum;
  return {{"type", "beat"}, {"done", sum}, {"stop", !failures_.empty()}};
}

void Hub::on_beat() {
  const nlohmann::json message = beat();
  for (Peer& peer : watch_.peers()) {
    if (watch_.wants_beat(peer)) watch_.queue(peer, message);
  }
}

void Hub::queue_all(const nlohmann::json& data) {
  for (Peer& peer : watch_.peers()) watch_.queue(peer, data);
}

void Hub::flush(double seconds) {
  const Deadline deadline = deadline_after(seconds);
  while (watch_.has_queued() && steady_clock::now() < deadline) watch_.step(*this);
}

//! The verdict is every rank's.
void Hub::end_group() {
  failure_ = joined(failures_);
  queue_all({{"type", "verdict"}, {"status", failure_->status()}, {"text", failure_->what()}});
  flush(kVerdictSeconds);
  watch_.peers().clear();
  throw *failure_;
}

void Hub::hear_worker(Worker& worker) {
  if (setup_.interrupted) fail(0, interrupted_failure());
  if (said_[0].all || !worker.ended()) return;
  said_[0] = {true, phase_, {}};
  if (worker.failure()) {
    fail(0, *worker.failure());
  } else {
    ENGRAM_POINT("group.send_part");
    said_[0].part = std::move(worker.part());
  }
}

bool Hub::is_decided() {
  const bool all_said =
      std::all_of(said_.begin(), said_.end(), [](const Said& said) { return said.all; });
  if (!all_said || !failures_.empty()) return all_said || grace_is_over();
  for (size_t rank = 1; rank < said_.size(); ++rank) {
    if (said_[rank].phase == phase_) continue;
    fail(static_cast<int32_t>(rank),
         {.text = concat("expected to be in ", phase_, ", found in ", said_[rank].phase)});
  }
  return true;
}

std::vector<Group::Part> Hub::exchange(const std::string& phase, const WorkFunction& work) {
  if (failure_) throw *failure_;
  phase_ = phase;
  watch_.refresh();
  Worker worker(work, setup_, done_, watch_);
  worker_ = &worker;
  if (!failures_.empty()) worker.stop();  // a rank was lost since the last exchange
  for (hear_worker(worker); !is_decided(); hear_worker(worker)) watch_.step(*this);
  if (!failures_.empty()) end_group();
  worker_ = nullptr;
  ENGRAM_POINT("group.parts");
  return share_parts();
}

std::vector<Group::Part> Hub::share_parts() {
  std::vector<Group::Part> parts;
  nlohmann::json list = nlohmann::json::array();
  for (Said& said : said_) {
    list.push_back({{"data", said.part.data}, {"fds", said.part.fds.size()}});
    parts.push_back(std::move(said.part));
  }
  // What comes from here on is of the next exchange.
  said_ = std::vector<Said>(parts.size());
  const int64_t done = beat().at("done");
  for (Peer& peer : watch_.peers()) {
    std::vector<int> handles;
    for (size_t rank = 0; rank < parts.size(); ++rank) {
      const std::vector<int> more = handles_of(parts[rank]);
      if (peer.rank != static_cast<int32_t>(rank)) {
        handles.insert(handles.end(), more.begin(), more.end());
      }
    }
    watch_.queue(peer, {{"type", "parts"}, {"done", done}, {"parts", list}}, handles);
  }
  flush(options().timeout_s);
  // NOTE: what is left in a queue names descriptors that are the caller's from here on.
  for (Peer& peer : watch_.peers()) {
    if (!peer.connection.has_queued()) continue;
    said_[static_cast<size_t>(peer.rank)].all = true;
    fail(peer.rank, loss_failure(peer, Loss::kSilent, "", phase_, options().timeout_s));
    peer.lost = true;
  }
  watch_.peers().remove_if([](const Peer& peer) { return peer.lost; });
  return parts;
}

}  // namespace

std::unique_ptr<Star> make_hub(const StarSetup& setup) { return std::make_unique<Hub>(setup); }

}  // namespace engram
