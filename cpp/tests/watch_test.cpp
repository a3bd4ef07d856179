// SPDX-License-Identifier: Apache-2.0
#include "table/watch.h"

#include "groups.h"
#include "sockets.h"

namespace engram {
namespace {

//! What is told of the peers of a Watch.
class Told final : public WatchHandler {
 public:
  void on_message(Peer&, Message message) override { texts.push_back(message.data.at("text")); }
  void on_loss(Peer&, Loss loss, const std::string&) override { losses.push_back(loss); }
  void on_beat() override {}

  std::vector<std::string> texts;
  std::vector<Loss> losses;
};

//! A process that connects, says something and closes its connection; then it ends, or lives on.
Process visitor_of(const Address& address, bool lives_on) {
  return Process([=] {
    connect(address).send({{{"text", "hello"}}, {}}, deadline_after(kPatience));
    if (lives_on) sleep_s(kNever);
    return std::string("said");
  });
}

void check_loss(Listener& listener, Loss expected) {
  Watch watch(kPatience);
  std::optional<Connection> accepted = listener.accept(deadline_after(kPatience));
  REQUIRE(accepted);
  watch.add(std::move(*accepted));
  Told told;
  const Deadline deadline = deadline_after(kPatience);
  while (told.losses.empty() && std::chrono::steady_clock::now() < deadline) watch.step(told);
  CHECK(told.texts == std::vector<std::string>{"hello"});
  REQUIRE(told.losses.size() == 1);
  CHECK(told.losses[0] == expected);
}

TEST_CASE("a process that was gone before it was watched has died, once all that it said is read") {
  const Address address{new_name(), ""};
  Listener listener(address);
  {
    Process visitor = visitor_of(address, false);
    REQUIRE(visitor.result() == "said");
  }  // waited for by its parent, so that nothing is left of it but what it said
  check_loss(listener, Loss::kDied);
}

TEST_CASE("a process that closes its connection has left") {
  const Address address{new_name(), ""};
  Listener listener(address);
  const Process visitor = visitor_of(address, true);
  check_loss(listener, Loss::kLeft);
}

}  // namespace
}  // namespace engram
