// SPDX-License-Identifier: Apache-2.0
#include "table/hub.h"

#include <algorithm>

#include "table/points.h"

namespace engram {
namespace {

using std::chrono::steady_clock;

constexpr double kVerdictSeconds = 2;  // for a verdict to be with the kernel

}  // namespace

Hub::Hub(const StarSetup& setup)
    : Star(setup),
      watch_(setup.options.timeout_s),
      deadline_(deadline_after(setup.options.timeout_s)),
      largest_size_(setup.options.size),
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
    if (loss == Loss::kDied && phase_ == kMeeting) note_early_death(peer);
    return;
  }
  said_[static_cast<size_t>(peer.rank)].all = true;
  fail(peer.rank,
       loss_failure(peer.connection.peer_pid(), loss, detail, phase_, options().timeout_s));
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
    if (watch_.wants_beat(peer)) peer.connection.queue(message);
  }
}

void Hub::queue_all(const nlohmann::json& data) {
  for (Peer& peer : watch_.peers()) peer.connection.queue(data);
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
    peer.connection.queue({{"type", "parts"}, {"done", done}, {"parts", list}}, handles);
  }
  flush(options().timeout_s);
  // NOTE: what is left in a queue names descriptors that are the caller's from here on.
  for (Peer& peer : watch_.peers()) {
    if (!peer.connection.has_queued()) continue;
    said_[static_cast<size_t>(peer.rank)].all = true;
    fail(peer.rank,
         loss_failure(peer.connection.peer_pid(), Loss::kSilent, "", phase_, options().timeout_s));
    peer.lost = true;
  }
  watch_.peers().remove_if([](const Peer& peer) { return peer.lost; });
  return parts;
}

std::unique_ptr<Star> make_hub(const StarSetup& setup) { return std::make_unique<Hub>(setup); }

}  // namespace engram
