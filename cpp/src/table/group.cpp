// SPDX-License-Identifier: Apache-2.0
#include "table/group.h"

#include <cmath>
#include <new>

#include "check.h"
#include "table/points.h"
#include "table/sayings.h"
#include "table/star.h"

namespace engram {
namespace {

//! One process: nobody to meet.
class Alone : public Star {
 public:
  explicit Alone(const StarSetup& setup) : Star(setup) { throw_where_interrupted(); }

  std::vector<Group::Part> exchange(const std::string&, const WorkFunction& work) override {
    if (failure_) std::rethrow_exception(failure_);
    try {
      Group::Work state(setup_.interrupted, setup_.progress.done);
      std::vector<Group::Part> parts;
      parts.push_back(work(state));
      throw_where_interrupted();
      return parts;
    } catch (...) {
      failure_ = std::current_exception();
      throw;
    }
  }

 private:
  void throw_where_interrupted() const {
    const Failure failure = interrupted_failure();
    if (setup_.interrupted) throw Error(failure.status, failure.text);
  }

  std::exception_ptr failure_;
};

//! What the exception that is being handled says.
Failure current_failure() {
  try {
    throw;
  } catch (const Error& error) {
    return {error.status(), error.what()};
  } catch (const std::bad_alloc&) {
    return {ENGRAM_OUT_OF_MEMORY, "out of host memory"};
  } catch (const std::exception& error) {
    return {ENGRAM_INTERNAL_ERROR, error.what()};
  } catch (...) {
    return {ENGRAM_INTERNAL_ERROR, "unknown exception"};
  }
}

void check_options(const GroupOptions& options) {
  check_range(options.size, "group: size", 1, 4096);
  check_range(options.rank, "group: rank", 0, options.size - 1);
  ENGRAM_CHECK(!options.name.empty(), "group: name: expected a text, got an empty one");
  ENGRAM_CHECK(std::isfinite(options.timeout_s) && options.timeout_s > 0,
               "group: timeout_s: expected more than 0 seconds, got ", options.timeout_s);
}

}  // namespace

Error joined(const Failures& failures) {
  Sayings sayings;
  for (const auto& [rank, failure] : failures) sayings.add(rank, failure.text);
  return Error(failures.begin()->second.status, sayings.text());
}

Failure loss_failure(pid_t pid, Loss loss, const std::string& detail, const std::string& phase,
                     double timeout_s) {
  const std::string who = concat(" in ", phase, " (pid ", pid, ")");
  switch (loss) {
    case Loss::kDied:
      return {.text = "died" + who};
    case Loss::kLeft:
      return {.text = "left the group" + who};
    case Loss::kSilent:
      return {.text = concat("silent for ", timeout_s, " s", who)};
    case Loss::kBroken:
      break;
  }
  return {.text = concat("cannot be understood", who, ": ", detail)};
}

Failure interrupted_failure() { return {.text = "cancelled"}; }

std::string rank_word(int32_t rank) { return concat("rank", rank); }

nlohmann::json hello_of(const GroupOptions& options) {
  return {{"type", "hello"},
          {"version", kGroupVersion},
          {"group", options.name},
          {"rank", options.rank},
          {"size", options.size}};
}

Worker::Worker(const WorkFunction& work, const StarSetup& setup, std::atomic<int64_t>& done,
               Watch& watch)
    : interrupted_(setup.interrupted), watch_(watch), state_(setup.interrupted, done) {
  try {
    thread_ = std::thread([this, &work] { run(work); });
  } catch (const std::exception& error) {
    failure_ = Failure{.text = concat("cannot start a thread: ", error.what())};
    ended_ = true;
  }
}

Worker::~Worker() { finish(); }

void Worker::finish() {
  state_.stop();
  if (thread_.joinable()) thread_.join();
}

void Worker::run(const WorkFunction& work) noexcept {
  try {
    part_ = work(state_);
  } catch (...) {
    failure_ = current_failure();
    // The first to fail says why; what that ends elsewhere is no news.
    if (state_.told()) failure_ = Failure{failure_->status, ""};
  }
  if (interrupted_ && (!failure_ || failure_->text.empty())) failure_ = interrupted_failure();
  ended_ = true;
  watch_.wake();
}

std::unique_ptr<Star> make_alone(const StarSetup& setup) { return std::make_unique<Alone>(setup); }

Group::Group(const GroupOptions& options, const std::atomic<bool>& cancelled, Progress* progress)
    : own_progress_(progress == nullptr ? std::make_unique<Progress>() : nullptr) {
  check_options(options);
  const StarSetup setup{options, cancelled, progress == nullptr ? *own_progress_ : *progress};
  if (options.size == 1) {
    star_ = make_alone(setup);
    return;
  }
  set_stop_role(std::to_string(options.rank));
  star_ = options.rank == 0 ? make_hub(setup) : make_spoke(setup);
  ENGRAM_POINT("group.met");
}

Group::~Group() { ENGRAM_POINT("group.close"); }

int32_t Group::rank() const { return star_->options().rank; }

int32_t Group::size() const { return star_->options().size; }

std::vector<Group::Part> Group::exchange(const std::string& phase, const WorkFunction& work) {
  return star_->exchange(phase, work);
}

void Group::set_total_bytes(int64_t num_bytes) { star_->progress().total = num_bytes; }

}  // namespace engram
