// SPDX-License-Identifier: Apache-2.0
// Every rank but 0: one connection, to rank 0.
#include <algorithm>
#include <thread>

#include "table/points.h"
#include "table/star.h"

namespace engram {
namespace {

using std::chrono::steady_clock;

//! How rank 0 was lost.
struct LostHub {
  pid_t pid;
  Loss loss;
  std::string detail;
};

class Spoke : public Star, private WatchHandler {
 public:
  explicit Spoke(const StarSetup& setup);
  std::vector<Group::Part> exchange(const std::string& phase, const WorkFunction& work) override;

 private:
  void on_message(Peer& hub, Message message) override;
  void on_loss(Peer& hub, Loss loss, const std::string& detail) override;
  void on_beat() override;

  void check_path();
  void meet();
  Failure no_hub();
  Failure hub_failure(const LostHub& lost) {
    return loss_failure(lost.pid, lost.loss, lost.detail, phase_, options().timeout_s);
  }
  void try_hello();
  void report(Worker& worker);
  std::vector<Group::Part> unpack(Worker& worker);
  void queue(const nlohmann::json& data, const std::vector<int>& fds = {});
  void queue_failure(const Failure& failure) {
    queue({{"type", "failed"}, {"status", failure.status}, {"text", failure.text}});
  }
  //! Ends the group for this rank.
  void fail(const Error& error) {
    if (!failure_) failure_ = error;
  }
  void fail_without_hub(Worker& worker);

  Watch watch_;
  Deadline deadline_;  // of the meeting
  std::string phase_ = kMeeting;
  bool welcome_ = false;
  bool met_ = false;
  bool reported_ = false;          // to rank 0, in this exchange
  bool said_interrupted_ = false;  // ever
  Worker* worker_ = nullptr;
  std::optional<Message> parts_;
  std::optional<LostHub> lost_hub_;
  std::optional<Failure> died_before_;  // it said welcome
  std::optional<Error> failure_;
  std::atomic<int64_t> done_{0};
  std::string passed_over_;
};

Spoke::Spoke(const StarSetup& setup)
    : Star(setup),
      watch_(setup.options.timeout_s),
      deadline_(deadline_after(setup.options.timeout_s)) {
  ENGRAM_POINT("group.connect");
  check_path();
  meet();
  if (!failure_) return;
  // What a rank 0 that was killed leaves in the file system is everybody's to remove.
  if (lost_hub_ || !welcome_) remove_stale(setup_.address());
  throw *failure_;
}

//! Where rank 0 cannot listen either nobody waits for it.
void Spoke::check_path() {
  try {
    check_address(setup_.address());
  } catch (const Error& error) {
    throw joined({{options().rank, {error.status(), error.what()}}});
  }
}

void Spoke::meet() {
  while (!met_ && !failure_) {
    if (watch_.peers().empty()) {
      try_hello();
    } else {
      watch_.step(*this);
    }
    if (met_) break;  // whatever became of rank 0 since
    if (setup_.interrupted) {
      queue_failure(interrupted_failure());
      watch_.step(*this);
      fail(joined({{options().rank, interrupted_failure()}}));
    } else if (lost_hub_) {
      fail(joined({{0, hub_failure(*lost_hub_)}}));
    } else if (!welcome_ && steady_clock::now() >= deadline_) {
      fail(joined({{0, died_before_ ? *died_before_ : no_hub()}}));
    }
  }
}

Failure Spoke::no_hub() {
  std::string found = passed_over_;
  for (const Peer& peer : watch_.peers()) {
    found = concat("pid ", peer.connection.peer_pid(), ", which says nothing");
  }
  const std::string& path = options().socket;
  return {.text = concat("never came ", path.empty() ? "" : "to " + path + " ", "within ",
                         options().timeout_s, " s",
                         found.empty() ? "" : "; where it should listen is " + found)};
}

void Spoke::try_hello() {
  constexpr std::chrono::milliseconds kRetry{10};
  try {
    std::optional<Connection> made =
        try_connect(setup_.address(), &passed_over_, rank_word(options().rank));
    if (!made) return std::this_thread::sleep_for(kRetry);
    ENGRAM_POINT("group.hello");
    watch_.add(std::move(*made));
  } catch (const Error& error) {
    return fail(joined({{options().rank, {error.status(), error.what()}}}));
  }
  queue(hello_of(options()));
}

void Spoke::queue(const nlohmann::json& data, const std::vector<int>& fds) {
  for (Peer& hub : watch_.peers()) hub.connection.queue(data, fds);
}

void Spoke::on_beat() {
  for (Peer& hub : watch_.peers()) {
    if (watch_.wants_beat(hub)) hub.connection.queue({{"type", "beat"}, {"done", done_.load()}});
  }
}

void Spoke::on_message(Peer&, Message message) {
  const nlohmann::json& data = message.data;
  const std::string type = data.at("type");
  if (type == "welcome") {
    welcome_ = true;
  } else if (type == "met") {
    met_ = true;
  } else if (type == "beat") {
    setup_.progress.done = data.at("done").get<int64_t>();
    if (data.value("stop", false) && worker_ != nullptr) worker_->stop();
  } else if (type == "parts") {
    setup_.progress.done = data.at("done").get<int64_t>();
    parts_ = std::move(message);
  } else if (type == "verdict" || type == "refused") {
    welcome_ = true;
    fail(Error(data.at("status").get<engram_status>(), data.at("text").get<std::string>()));
  }
}

void Spoke::on_loss(Peer& hub, Loss loss, const std::string& detail) {
  const bool only_closed = loss == Loss::kDied || loss == Loss::kLeft;
  LostHub lost{hub.connection.peer_pid(), loss, detail};
  if (welcome_ || !only_closed) {
    lost_hub_ = std::move(lost);
  } else if (loss == Loss::kDied) {
    // Most likely our rank 0. Or that of a job before ours: then ours will come.
    died_before_ = hub_failure(lost);
    deadline_ = std::min(deadline_, deadline_after(Group::kGraceSeconds));
  }
  // A listener that is closed before it says welcome was for an earlier meeting.
}

//! How the work here went, once it has ended; that the user interrupts, at once.
void Spoke::report(Worker& worker) {
  if (setup_.interrupted && !said_interrupted_) {
    said_interrupted_ = reported_ = true;
    return queue_failure(interrupted_failure());
  }
  if (reported_ || !worker.ended()) return;
  reported_ = true;
  if (worker.failure()) return queue_failure(*worker.failure());
  ENGRAM_POINT("group.send_part");
  queue({{"type", "part"}, {"phase", phase_}, {"done", done_.load()}, {"data", worker.part().data}},
        handles_of(worker.part()));
}

//! Rank 0 is gone: each rank says what it knows.
void Spoke::fail_without_hub(Worker& worker) {
  worker.finish();
  Failures failures{{0, hub_failure(*lost_hub_)}};
  if (worker.failure() && !worker.failure()->text.empty()) {
    failures.emplace(options().rank, *worker.failure());
  }
  fail(joined(failures));
}

std::vector<Group::Part> Spoke::exchange(const std::string& phase, const WorkFunction& work) {
  if (failure_) throw *failure_;
  phase_ = phase;
  reported_ = false;
  watch_.refresh();
  Worker worker(work, setup_, done_, watch_);
  worker_ = &worker;
  while (!parts_ && !failure_) {
    report(worker);
    // It may have been lost with the last exchange's parts, which it still sent: then in this one,
    // as for ranks that read them before.
    if (lost_hub_) {
      fail_without_hub(worker);
    } else {
      watch_.step(*this);
    }
  }
  worker.finish();
  worker_ = nullptr;
  if (failure_) throw *failure_;
  ENGRAM_POINT("group.parts");
  return unpack(worker);
}

//! The parts of an exchange; this rank's own never left.
std::vector<Group::Part> Spoke::unpack(Worker& worker) {
  Message message = std::move(*parts_);
  parts_.reset();
  std::vector<Group::Part> parts;
  size_t next = 0;
  for (nlohmann::json& each : message.data.at("parts")) {
    Group::Part part{std::move(each.at("data")), {}};
    const bool own = static_cast<int32_t>(parts.size()) == options().rank;
    const size_t count = own ? 0 : each.at("fds").get<size_t>();
    for (size_t i = 0; i < count; ++i) part.fds.push_back(std::move(message.fds.at(next++)));
    parts.push_back(own ? std::move(worker.part()) : std::move(part));
  }
  return parts;
}

}  // namespace

std::unique_ptr<Star> make_spoke(const StarSetup& setup) { return std::make_unique<Spoke>(setup); }

}  // namespace engram
