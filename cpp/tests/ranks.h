// SPDX-License-Identifier: Apache-2.0
//! \file ranks.h
//! Ranks as real processes, for tests.
#pragma once

#include <dirent.h>
#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <fstream>
#include <functional>
#include <iostream>
#include <iterator>
#include <string>
#include <thread>
#include <vector>

#include "doctest/doctest.h"
#include "table/descriptor.h"

namespace engram {

inline double now_s() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

inline void sleep_s(double seconds) {
  std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
}

//! Far more than anything takes that is not waited for in vain, on the busiest machine.
constexpr double kPatience = 120;

//! Waits until something holds, and says whether it does.
inline bool comes_true(const std::function<bool()>& holds, double seconds = kPatience) {
  const double end = now_s() + seconds;
  while (!holds()) {
    if (now_s() > end) return false;
    sleep_s(0.005);
  }
  return true;
}

//! Seconds that `run` takes; where that is no less than `most`, the least of a few turns: what is
//! slow by itself is so each time, and a busy machine is not.
inline double least_seconds(double most, const std::function<void()>& run) {
  double least = most;
  for (int turn = 0; turn < 5 && least >= most; ++turn) {
    const double begin = now_s();
    run();
    least = turn == 0 ? now_s() - begin : std::min(least, now_s() - begin);
  }
  return least;
}

inline size_t count_descriptors() {
  DIR* const folder = opendir("/proc/self/fd");
  size_t count = 0;
  while (readdir(folder) != nullptr) ++count;
  closedir(folder);
  return count;
}

//! A process that runs `body`. What that returns, or the text of what it throws, is result(); empty
//! where it was killed before. It is killed at the end of this object.
class Process {
 public:
  explicit Process(const std::function<std::string()>& body) {
    int ends[2];
    REQUIRE(pipe2(ends, O_CLOEXEC) == 0);
    std::cout.flush();  // else both have what is in its buffer
    pid_ = fork();
    REQUIRE(pid_ >= 0);
    if (pid_ == 0) run(ends[1], body);
    close(ends[1]);
    result_.reset(ends[0]);
  }
  ~Process() {
    if (pid_ <= 0) return;
    kill(pid_, SIGKILL);
    kill(pid_, SIGCONT);
    waitpid(pid_, nullptr, 0);
  }
  Process(Process&& other) noexcept
      : pid_(std::exchange(other.pid_, 0)),
        result_(std::move(other.result_)),
        text_(std::move(other.text_)) {}
  Process& operator=(Process&&) = delete;

  pid_t pid() const { return pid_; }
  void signal(int number) const { kill(pid_, number); }

  //! Connections that its group watches: of rank 0 to each other rank that it has accepted, of
  //! another rank to rank 0. (A pidfd stands beside each.)
  int num_connections() const {
    const std::string folder = concat("/proc/", pid_, "/fd");
    int count = 0;
    DIR* const files = opendir(folder.c_str());
    while (const dirent* const entry = files == nullptr ? nullptr : readdir(files)) {
      char target[64] = {};
      const std::string link = concat(folder, "/", entry->d_name);
      if (readlink(link.c_str(), target, sizeof(target) - 1) < 0) continue;
      count += std::string(target) == "anon_inode:[pidfd]" ? 1 : 0;
    }
    if (files != nullptr) closedir(files);
    return count;
  }
  bool connects(int count) const {
    return comes_true([&] { return num_connections() == count; });
  }

  //! Waits for its end, up to `seconds`, then "TIMEOUT".
  std::string result(double seconds = kPatience) {
    const double end = now_s() + seconds;
    for (char bytes[4096];;) {
      pollfd entry{.fd = result_.get(), .events = POLLIN};
      const double left = end - now_s();
      if (left <= 0 || poll(&entry, 1, static_cast<int>(left * 1000) + 1) == 0) return "TIMEOUT";
      const ssize_t count = read(result_.get(), bytes, sizeof(bytes));
      if (count <= 0) break;
      text_.append(bytes, static_cast<size_t>(count));
    }
    // A process closes its files one by one: all are closed once it can be waited for.
    siginfo_t info;
    waitid(P_PID, static_cast<id_t>(pid_), &info, WEXITED | WNOWAIT);
    return text_;
  }

 private:
  [[noreturn]] static void run(int to, const std::function<std::string()>& body) {
    std::string text;
    try {
      text = body();
    } catch (const std::exception& error) {
      text = error.what();
    } catch (...) {
      text = "a check failed";
    }
    for (size_t from = 0; from < text.size();) {
      const ssize_t count = write(to, text.data() + from, text.size() - from);
      if (count <= 0) break;
      from += static_cast<size_t>(count);
    }
    _exit(0);
  }

  pid_t pid_ = 0;
  FileDescriptor result_;
  std::string text_;  // of the result, as far as it was read
};

//! A flag that processes share: set by one, seen by others.
class Signal {
 public:
  Signal() {
    int ends[2];
    REQUIRE(pipe2(ends, O_CLOEXEC | O_NONBLOCK) == 0);
    read_.reset(ends[0]);
    write_.reset(ends[1]);
  }
  void set() const { static_cast<void>(!write(write_.get(), "x", 1)); }
  //! Waits until it has been set so often; not for who else waits for it.
  bool wait_times(int times) const {
    for (char byte; times > 0 && wait();) {
      if (read(read_.get(), &byte, 1) == 1) --times;
    }
    return times == 0;
  }
  bool wait(double seconds = kPatience) const {
    pollfd entry{.fd = read_.get(), .events = POLLIN};
    return poll(&entry, 1, static_cast<int>(seconds * 1000)) > 0;
  }

 private:
  FileDescriptor read_;
  FileDescriptor write_;
};

//! Folder of this user alone, removed with what is in it at the end.
class Folder {
 public:
  Folder() {
    char name[] = "/tmp/engram-XXXXXX";
    REQUIRE(mkdtemp(name) != nullptr);
    path_ = name;
  }
  ~Folder() {
    for (const std::string& name : names()) unlink((path_ + "/" + name).c_str());
    rmdir(path_.c_str());
  }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;

  const std::string& path() const { return path_; }
  std::vector<std::string> names() const {
    std::vector<std::string> names;
    DIR* const folder = opendir(path_.c_str());
    while (const dirent* const entry = readdir(folder)) {
      const std::string name = entry->d_name;
      if (name != "." && name != "..") names.push_back(name);
    }
    closedir(folder);
    return names;
  }

 private:
  std::string path_;
};

//! Whether an abstract socket with this in its name is there.
inline bool has_socket(const std::string& name) {
  std::ifstream list("/proc/net/unix");
  const std::string text{std::istreambuf_iterator<char>(list), {}};
  return text.find(name) != text.npos;
}

inline bool is_root() { return geteuid() == 0; }

//! Whether a test that has to be several users cannot run.
inline bool skip_without_root() {
  if (!is_root()) MESSAGE("skipped: needs root, to be another user as well");
  return !is_root();
}

constexpr uid_t kNobody = 65534;

}  // namespace engram
