// SPDX-License-Identifier: Apache-2.0
#include "table/record.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <mutex>
#include <optional>
#include <sstream>

#include "engram/error.h"
#include "table/descriptor.h"
#include "table/points.h"
#include "table/sealed_file.h"

namespace engram {
namespace {

using nlohmann::json;

constexpr const char* kName = "trtllm-engram.tables";
constexpr const char* kLabel = "record of tables";
constexpr const char* kLink = "/memfd:trtllm-engram.tables (deleted)";
constexpr int64_t kFormatVersion = 1;
constexpr off_t kMaxBytes = 1 << 20;

class Record {
 public:
  //! Never destroyed: tables may end while the process exits.
  static Record& instance() {
    static auto* const record = new Record();
    return *record;
  }

  int64_t add(const std::string& group, int32_t rank, int32_t size, json table) {
    const std::lock_guard lock(mutex_);
    group_ = {{"name", group}, {"rank", rank}, {"size", size}};
    const int64_t id = ++last_id_;
    tables_.emplace(id, std::move(table));
    try {
      publish();
    } catch (...) {
      tables_.erase(id);
      throw;
    }
    return id;
  }

  void remove(int64_t id) noexcept {
    const std::lock_guard lock(mutex_);
    tables_.erase(id);
    republish();
  }

  void set_keeper(std::optional<json> keeper) noexcept {
    const std::lock_guard lock(mutex_);
    keeper_ = std::move(keeper);
    republish();
  }

 private:
  void publish() {
    if (tables_.empty() && !keeper_) return file_.reset();
    json document = {{"format_version", kFormatVersion},
                     {"pid", getpid()},
                     {"role", "rank"},
                     {"socket", ""},
                     {"id", ""},
                     {"tables", json::array()}};
    document.update(keeper_ ? *keeper_ : group_);
    for (const auto& [id, table] : tables_) {
      const double began = table.at("since").get<double>();
      document["since"] = std::min(document.value("since", began), began);
      document["tables"].push_back(table);
    }
    FileDescriptor file = make_sealed_file(
        kName, document.dump(-1, ' ', true, json::error_handler_t::replace), kLabel);
    ENGRAM_POINT("record.write");
    if (!file_) {
      file_ = std::move(file);
    } else if (dup3(file.get(), file_.get(), O_CLOEXEC) < 0) {  // from one to the other at once
      throw Error(ENGRAM_INTERNAL_ERROR,
                  concat(kLabel, ": cannot replace it: ", std::strerror(errno)));
    }
  }

  //! For ends: a record that cannot be written says what was there before.
  void republish() noexcept {
    try {
      publish();
    } catch (...) {
    }
  }

  std::mutex mutex_;
  int64_t last_id_ = 0;
  std::map<int64_t, json> tables_;
  json group_;
  std::optional<json> keeper_;
  FileDescriptor file_;
};

//! By its effective user: the folder's owner is root where a process has changed its user.
bool is_this_users(const std::filesystem::path& process) {
  std::string text;
  std::getline(std::ifstream(process / "status"), text, '\0');
  const size_t line = text.find("\nUid:");
  if (line == text.npos) return false;
  std::istringstream words(text.substr(line + 5));
  uid_t real = 0;
  uid_t effective = 0;
  return static_cast<bool>(words >> real >> effective) && effective == geteuid();
}

//! None where the file is no record.
std::optional<json> read_record(const std::filesystem::path& link) {
  const FileDescriptor file(open(link.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  struct stat status{};
  if (!file || fstat(file.get(), &status) != 0 || status.st_size > kMaxBytes) return std::nullopt;
  std::string text(static_cast<size_t>(status.st_size), '\0');
  if (pread(file.get(), text.data(), text.size(), 0) != status.st_size) return std::nullopt;
  json document = json::parse(text, nullptr, false);
  const bool known = document.is_object() &&
                     document.value("format_version", int64_t{0}) == kFormatVersion &&
                     document.contains("tables") && document["tables"].is_array();
  return known ? std::optional(std::move(document)) : std::nullopt;
}

}  // namespace

RecordEntry::RecordEntry(const std::string& group, int32_t rank, int32_t size, json table)
    : id_(Record::instance().add(group, rank, size, std::move(table))) {}

RecordEntry::~RecordEntry() { Record::instance().remove(id_); }

double seconds_since_1970() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

KeeperRole::KeeperRole(const std::string& name, const std::string& socket, const std::string& id) {
  Record::instance().set_keeper(json{{"role", "keeper"},
                                     {"name", name},
                                     {"rank", 0},
                                     {"size", 1},
                                     {"socket", socket},
                                     {"id", id},
                                     {"since", seconds_since_1970()}});
}

KeeperRole::~KeeperRole() { Record::instance().set_keeper(std::nullopt); }

json read_records(pid_t of) {
  namespace fs = std::filesystem;
  json records = json::array();
  std::error_code error;
  for (const fs::directory_entry& process : fs::directory_iterator("/proc", error)) {
    const std::string pid = process.path().filename();
    if (pid.find_first_not_of("0123456789") != pid.npos) continue;
    const pid_t number = std::stoi(pid);
    if ((of != 0 && of != number) || !is_this_users(process.path())) continue;
    fs::directory_iterator link(process.path() / "fd", error);
    for (; !error && link != fs::directory_iterator(); link.increment(error)) {
      std::error_code gone;
      if (fs::read_symlink(link->path(), gone) != kLink || gone) continue;
      try {
        std::optional<json> record = read_record(link->path());
        if (!record) continue;
        (*record)["pid"] = number;
        records.push_back(std::move(*record));
        break;  // a process has one, and may show it twice while it changes
      } catch (const json::exception&) {  // another program's
      }
    }
  }
  return records;
}

}  // namespace engram
