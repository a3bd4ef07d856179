// SPDX-License-Identifier: Apache-2.0
//! \file ranks.h
//! Ranks as forked processes that say what became of them, line by line.
#pragma once

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <functional>
#include <string>
#include <vector>

#include "doctest/doctest.h"
#include "engram/error.h"

namespace engram {

//! A rank's ends of its pipes.
class Channel {
 public:
  Channel(int in, int out) : in_(in), out_(out) {}
  void say(const std::string& line) const {
    const std::string text = line + "\n";
    if (write(out_, text.data(), text.size()) < 0) _exit(1);
  }
  //! Until the test says go on.
  void wait() const {
    char go = 0;
    if (read(in_, &go, 1) != 1) _exit(1);
  }

 private:
  int in_;
  int out_;
};

class Ranks {
 public:
  //! body(rank, channel) runs in each process; an Error that it throws is said as "error: TEXT".
  Ranks(int count, const std::function<void(int, const Channel&)>& body) {
    for (int rank = 0; rank < count; ++rank) {
      std::array<int, 2> down{};
      std::array<int, 2> up{};
      REQUIRE(pipe(down.data()) == 0);
      REQUIRE(pipe(up.data()) == 0);
      const pid_t pid = fork();
      REQUIRE(pid >= 0);
      if (pid == 0) {
        close(down[1]);
        close(up[0]);
        const Channel channel(down[0], up[1]);
        try {
          body(rank, channel);
        } catch (const std::exception& error) {
          channel.say(std::string("error: ") + error.what());
        }
        _exit(0);
      }
      close(down[0]);
      close(up[1]);
      processes_.push_back({pid, down[1], up[0]});
    }
  }
  ~Ranks() {
    for (const Process& process : processes_) {
      close(process.to);
      close(process.from);
      if (process.pid == 0) continue;
      ::kill(process.pid, SIGKILL);
      waitpid(process.pid, nullptr, 0);
    }
  }
  Ranks(const Ranks&) = delete;
  Ranks& operator=(const Ranks&) = delete;

  //! The rank's next line; empty at its end.
  std::string line(int rank) {
    std::string text;
    for (char character = 0; read(at(rank).from, &character, 1) == 1 && character != '\n';) {
      text += character;
    }
    return text;
  }
  void go_on(int rank) { REQUIRE(write(at(rank).to, "x", 1) == 1); }
  void kill(int rank) {
    ::kill(at(rank).pid, SIGKILL);
    waitpid(at(rank).pid, nullptr, 0);
    at(rank).pid = 0;
  }

 private:
  struct Process {
    pid_t pid;
    int to;
    int from;
  };
  Process& at(int rank) { return processes_.at(static_cast<size_t>(rank)); }

  std::vector<Process> processes_;
};

}  // namespace engram
