// SPDX-License-Identifier: Apache-2.0
#include "table/limits.h"

#include <linux/magic.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/vfs.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <map>
#include <sstream>

namespace engram {
namespace {

constexpr int64_t kUnlimited = int64_t{1} << 60;  // cgroup v1 writes a number near 2^63

//! The number in a file; -1 without one ("max", no such file).
int64_t read_number(const std::string& path) {
  int64_t number = 0;
  std::ifstream file(path);
  return file >> number ? number : -1;
}

//! The numbers in lines "key: 12 kB", "key 12" or "Node 0 key: 12 kB", by key.
std::map<std::string, int64_t> read_numbers(const std::string& path, const std::string& prefix) {
  std::map<std::string, int64_t> numbers;
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    if (line.compare(0, prefix.size(), prefix) != 0) continue;
    std::istringstream words(line.substr(prefix.size()));
    std::string key;
    std::string unit;
    int64_t number = 0;
    if (!(words >> key >> number)) continue;
    if (key.back() == ':') key.pop_back();
    numbers[key] = words >> unit && unit == "kB" ? number * 1024 : number;
  }
  return numbers;
}

int64_t value_of(const std::map<std::string, int64_t>& numbers, const std::string& key) {
  const auto found = numbers.find(key);
  return found == numbers.end() ? 0 : found->second;
}

//! Equal for two processes if it is the same file or folder, whatever their mounts.
std::string identity_of(const std::string& path) {
  struct stat status{};
  if (stat(path.c_str(), &status) != 0) return path;
  return std::to_string(status.st_dev) + ":" + std::to_string(status.st_ino);
}

//! A mount of a cgroup hierarchy.
struct Mount {
  bool v2 = false;
  std::string options;  // of v1: its controllers
  std::string root;     // the cgroup that lies at `folder`
  std::string folder;
};

//! mountinfo writes blanks in names as \040.
std::string unescape(const std::string& text) {
  std::string plain;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '\\' && i + 3 < text.size()) {
      plain += static_cast<char>(std::strtol(text.substr(i + 1, 3).c_str(), nullptr, 8));
      i += 3;
    } else {
      plain += text[i];
    }
  }
  return plain;
}

std::vector<Mount> read_mounts(const std::string& root) {
  std::vector<Mount> mounts;
  std::ifstream file(root + "proc/self/mountinfo");
  for (std::string line; std::getline(file, line);) {
    const size_t dash = line.find(" - ");
    if (dash == std::string::npos) continue;
    std::istringstream left(line);
    std::istringstream right(line.substr(dash + 3));
    Mount mount;
    std::string skipped;
    std::string type;
    left >> skipped >> skipped >> skipped >> mount.root >> mount.folder;
    right >> type >> skipped >> mount.options;
    if (type != "cgroup" && type != "cgroup2") continue;
    mount.v2 = type == "cgroup2";
    mount.root = unescape(mount.root);
    mount.folder = unescape(mount.folder);
    mounts.push_back(mount);
  }
  return mounts;
}

bool has_word(const std::string& list, const std::string& word) {
  return ("," + list + ",").find("," + word + ",") != std::string::npos;
}

struct LimitFile {
  const char* limit;
  const char* used;
  bool hugetlb;
  bool refuses;
};
constexpr LimitFile kLimitFiles[] = {
    {"memory.max", "memory.current", false, true},
    {"memory.high", "memory.current", false, false},
    {"memory.limit_in_bytes", "memory.usage_in_bytes", false, true},
    {"hugetlb.2MB.max", "hugetlb.2MB.current", true, true},
    {"hugetlb.2MB.rsvd.max", "hugetlb.2MB.rsvd.current", true, true},
    {"hugetlb.2MB.limit_in_bytes", "hugetlb.2MB.usage_in_bytes", true, true},
    {"hugetlb.2MB.rsvd.limit_in_bytes", "hugetlb.2MB.rsvd.usage_in_bytes", true, true},
};

//! Pages of files in a cgroup's count, which the kernel drops before it refuses.
int64_t page_cache(const std::string& folder) {
  const auto numbers = read_numbers(folder + "/memory.stat", "");
  const char* const prefix = numbers.count("total_inactive_file") > 0 ? "total_" : "";  // v1
  return value_of(numbers, std::string(prefix) + "inactive_file") +
         value_of(numbers, std::string(prefix) + "active_file");
}

void add_cgroup(std::vector<CgroupLimit>& limits, const std::string& folder) {
  for (const LimitFile& file : kLimitFiles) {
    const int64_t limit = read_number(folder + "/" + file.limit);
    if (limit < 0 || limit >= kUnlimited) continue;
    const int64_t used = std::max<int64_t>(0, read_number(folder + "/" + file.used));
    limits.push_back(
        {.identity = identity_of(folder) + "/" + file.limit,
         .file = folder + "/" + file.limit,
         .hugetlb = file.hugetlb,
         .refuses = file.refuses,
         .limit = limit,
         .used = file.hugetlb ? used : std::max<int64_t>(0, used - page_cache(folder))});
  }
}

//! The cgroups of this process and those above them, as far up as they are mounted here.
std::vector<CgroupLimit> read_cgroups(const std::string& root) {
  std::vector<CgroupLimit> limits;
  const std::vector<Mount> mounts = read_mounts(root);
  std::ifstream file(root + "proc/self/cgroup");
  for (std::string line; std::getline(file, line);) {  // "4:memory:/path", of v2 "0::/path"
    const size_t first = line.find(':');
    const size_t second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const std::string path = line.substr(second + 1);
    const bool v2 = controllers.empty();
    if (!v2 && !has_word(controllers, "memory") && !has_word(controllers, "hugetlb")) continue;
    const auto mount = std::find_if(mounts.begin(), mounts.end(), [&](const Mount& one) {
      return one.v2 == v2 &&
             (v2 || has_word(one.options, controllers.substr(0, controllers.find(','))));
    });
    if (mount == mounts.end()) continue;
    // A container sees its own cgroup at the mount, whatever the path is called outside.
    std::string inside;
    const std::string above = mount->root == "/" ? "" : mount->root;
    if (path.compare(0, above.size(), above) == 0) inside = path.substr(above.size());
    if (inside.find("..") != std::string::npos || inside == "/") inside.clear();
    const std::string base = root.substr(0, root.size() - 1) + mount->folder;
    for (;;) {
      add_cgroup(limits, base + inside);
      if (inside.empty()) break;
      inside.erase(inside.rfind('/'));
    }
  }
  return limits;
}

std::vector<NodeRoom> read_nodes(const std::string& root) {
  std::vector<NodeRoom> nodes;
  const std::vector<int> allowed = allowed_nodes(root);
  for (const int node : memory_nodes(root)) {
    const std::string name = std::to_string(node);
    const std::string folder = root + "sys/devices/system/node/node" + name;
    const auto numbers = read_numbers(folder + "/meminfo", "Node " + name);
    if (numbers.empty()) continue;
    const int64_t pages = read_number(folder + "/hugepages/hugepages-2048kB/free_hugepages");
    nodes.push_back(
        {.node = node,
         .allowed = std::find(allowed.begin(), allowed.end(), node) != allowed.end(),
         .free_bytes = value_of(numbers, "MemFree") + value_of(numbers, "Active(file)") +
                       value_of(numbers, "Inactive(file)") + value_of(numbers, "SReclaimable"),
         .free_hugetlb_bytes = std::max<int64_t>(0, pages) * kHugePageBytes});
  }
  return nodes;
}

}  // namespace

Limits read_limits(const std::string& root) {
  const std::string base = root.back() == '/' ? root : root + "/";
  Limits limits;
  limits.cgroups = read_cgroups(base);
  limits.nodes = read_nodes(base);
  const auto memory = read_numbers(base + "proc/meminfo", "");
  if (memory.count("MemAvailable") > 0) limits.available_bytes = memory.at("MemAvailable");
  limits.free_hugetlb_bytes = free_hugetlb_bytes(base);
  struct statfs status{};
  if (statfs("/dev/shm", &status) == 0 && status.f_type == TMPFS_MAGIC && status.f_blocks > 0) {
    limits.shm_identity = identity_of("/dev/shm");
    limits.shm_size_bytes = static_cast<int64_t>(status.f_blocks) * status.f_bsize;
    limits.shm_free_bytes = static_cast<int64_t>(status.f_bavail) * status.f_bsize;
  }
  struct rlimit file{};
  if (getrlimit(RLIMIT_FSIZE, &file) == 0 && file.rlim_cur <= kUnlimited) {
    limits.file_bytes = static_cast<int64_t>(file.rlim_cur);
  }
  return limits;
}

nlohmann::json to_json(const Limits& limits) {
  nlohmann::json cgroups = nlohmann::json::array();
  for (const CgroupLimit& one : limits.cgroups) {
    cgroups.push_back({one.identity, one.file, one.hugetlb, one.refuses, one.limit, one.used});
  }
  nlohmann::json nodes = nlohmann::json::array();
  for (const NodeRoom& one : limits.nodes) {
    nodes.push_back({one.node, one.allowed, one.free_bytes, one.free_hugetlb_bytes});
  }
  return {{"cgroups", cgroups},
          {"nodes", nodes},
          {"available_bytes", limits.available_bytes},
          {"assumed_bytes", limits.assumed_bytes},
          {"free_hugetlb_bytes", limits.free_hugetlb_bytes},
          {"shm_identity", limits.shm_identity},
          {"shm_size_bytes", limits.shm_size_bytes},
          {"shm_free_bytes", limits.shm_free_bytes},
          {"file_bytes", limits.file_bytes},
          {"gpu", {limits.gpu.gpu, limits.gpu.free_bytes, limits.gpu.needed_bytes}}};
}

Limits limits_from_json(const nlohmann::json& json) {
  Limits limits;
  for (const nlohmann::json& one : json.at("cgroups")) {
    limits.cgroups.push_back({one.at(0), one.at(1), one.at(2), one.at(3), one.at(4), one.at(5)});
  }
  for (const nlohmann::json& one : json.at("nodes")) {
    limits.nodes.push_back({one.at(0), one.at(1), one.at(2), one.at(3)});
  }
  json.at("available_bytes").get_to(limits.available_bytes);
  json.at("assumed_bytes").get_to(limits.assumed_bytes);
  json.at("free_hugetlb_bytes").get_to(limits.free_hugetlb_bytes);
  json.at("shm_identity").get_to(limits.shm_identity);
  json.at("shm_size_bytes").get_to(limits.shm_size_bytes);
  json.at("shm_free_bytes").get_to(limits.shm_free_bytes);
  json.at("file_bytes").get_to(limits.file_bytes);
  const nlohmann::json& gpu = json.at("gpu");
  limits.gpu = {gpu.at(0), gpu.at(1), gpu.at(2)};
  return limits;
}

}  // namespace engram
