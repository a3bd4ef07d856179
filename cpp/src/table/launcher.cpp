// SPDX-License-Identifier: Apache-2.0
#include "table/launcher.h"

#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <fstream>
#include <optional>
#include <sstream>
#include <string_view>

namespace engram {
namespace {

std::string text_of(const Variables& variables, const char* name) {
  const char* const value = variables(name);
  return value == nullptr ? "" : value;
}

std::optional<int32_t> number_in(std::string_view text) {
  int32_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (text.empty() || error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return number;
}

//! A variable's number; none where it is not set.
std::optional<int32_t> number_of(const Variables& variables, const char* name) {
  const std::string text = text_of(variables, name);
  if (text.empty()) return std::nullopt;
  const std::optional<int32_t> number = number_in(text);
  ENGRAM_CHECK(number, name, ": expected a whole number, found '", text, "'");
  return number;
}

//! What a launcher says about this process.
struct Launcher {
  const char* rank_name;
  const char* size_name;
  std::optional<int32_t> rank;
  std::optional<int32_t> size;
};

Launcher launcher_of(const Variables& variables, const char* rank_name, const char* size_name) {
  return {rank_name, size_name, number_of(variables, rank_name), number_of(variables, size_name)};
}

//! The tasks of node `node_idx` in Slurm's list, "8(x2),4": 8 on each of two nodes, 4 on the next.
int32_t slurm_tasks(std::string_view list, int32_t node_idx) {
  std::string_view rest = list;
  while (!rest.empty()) {
    const std::string_view entry = rest.substr(0, rest.find(','));
    rest.remove_prefix(std::min(rest.size(), entry.size() + 1));
    const size_t times = entry.find("(x");
    const std::optional<int32_t> tasks = number_in(entry.substr(0, times));
    std::optional<int32_t> nodes = 1;
    if (times != entry.npos && entry.back() == ')') {
      nodes = number_in(entry.substr(times + 2, entry.size() - times - 3));
    }
    if (!tasks || !nodes) break;
    if (node_idx < *nodes) return *tasks;
    node_idx -= *nodes;
  }
  throw Error(ENGRAM_INVALID_ARGUMENT,
              concat("SLURM_STEP_TASKS_PER_NODE: expected tasks for each node, such as 8(x2),4, "
                     "and this one (SLURM_NODEID) among them, found '",
                     list, "'"));
}

Launcher slurm_of(const Variables& variables) {
  const char* const list_name = "SLURM_STEP_TASKS_PER_NODE";
  const std::string list = text_of(variables, list_name);
  if (list.empty()) {
    // A batch script has the variables of a rank, but is no step, and the only process there is.
    const bool batch =
        !text_of(variables, "SLURM_JOB_ID").empty() && text_of(variables, "SLURM_STEP_ID").empty();
    if (batch) return {"SLURM_LOCALID", list_name, std::nullopt, std::nullopt};
    return launcher_of(variables, "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE");
  }
  const int32_t node_idx = number_of(variables, "SLURM_NODEID").value_or(0);
  return {"SLURM_LOCALID", list_name, number_of(variables, "SLURM_LOCALID"),
          slurm_tasks(list, node_idx)};
}

//! "-VALUE" of each variable that is set.
std::string joined_values(const Variables& variables, std::initializer_list<const char*> names) {
  std::string joined;
  for (const char* const name : names) {
    const std::string value = text_of(variables, name);
    if (!value.empty()) joined += "-" + value;
  }
  return joined;
}

struct ProcessStatus {
  std::string name;
  pid_t parent = 0;
  std::string since;  //!< ticks: who has the same number later began later
};

//! Of a process that is gone or not to be seen: no name.
ProcessStatus process_status(pid_t pid) {
  std::string text;
  std::getline(std::ifstream(concat("/proc/", pid, "/stat")), text, '\0');
  // "PID (NAME) STATE PARENT" and numbers, the 22nd word of all is when it began.
  const size_t begin = text.find('(');
  const size_t end = text.rfind(')');
  if (begin == text.npos || end == text.npos) return {};
  ProcessStatus status{.name = text.substr(begin + 1, end - begin - 1)};
  std::istringstream words(text.substr(end + 1));
  std::string word;
  words >> word >> status.parent;
  for (int number = 5; number <= 22; ++number) words >> status.since;
  return status;
}

//! "hydra-PID-SINCE" of the launcher's process on this machine; empty where there is none.
std::string hydra_job() {
  constexpr char kProxy[] = "hydra_pmi_proxy";  // the kernel keeps 15 letters of a name
  for (pid_t pid = getppid(); pid > 0;) {
    const ProcessStatus status = process_status(pid);
    if (status.name == kProxy) return concat("hydra-", pid, "-", status.since);
    pid = status.parent;
  }
  return "";
}

//! Jobs on one machine at the same time differ in it, ranks of a job do not.
std::string job_name(const Variables& variables, const std::string& rank_name) {
  if (rank_name == "LOCAL_RANK") {
    return "torch" + joined_values(variables, {"TORCHELASTIC_RUN_ID", "MASTER_PORT"});
  }
  if (rank_name == "MPI_LOCALRANKID") {
    const std::string hydra = hydra_job();
    if (!hydra.empty()) return hydra;
  }
  const std::string pmix = joined_values(variables, {"PMIX_NAMESPACE"});
  if (!pmix.empty()) return "pmix" + pmix;
  return "job" + joined_values(variables, {"SLURM_JOB_ID", "SLURM_STEP_ID"});
}

}  // namespace

GroupOptions launcher_group(const Variables& variables) {
  const Launcher launchers[] = {
      launcher_of(variables, "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
      launcher_of(variables, "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
      launcher_of(variables, "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
      slurm_of(variables),
  };
  GroupOptions options;
  for (const Launcher& launcher : launchers) {
    if (!launcher.rank || !launcher.size) continue;
    ENGRAM_CHECK(*launcher.size >= 1 && *launcher.rank >= 0 && *launcher.rank < *launcher.size,
                 launcher.rank_name, ", ", launcher.size_name,
                 ": expected a rank of 0 to size - 1, found rank ", *launcher.rank, " of ",
                 *launcher.size);
    options.rank = *launcher.rank;
    options.size = *launcher.size;
    if (options.size > 1) options.name = job_name(variables, launcher.rank_name);
    return options;
  }
  for (const Launcher& launcher : launchers) {
    ENGRAM_CHECK(!launcher.rank && !launcher.size, "launcher: expected both ", launcher.rank_name,
                 " and ", launcher.size_name, ", found only ",
                 launcher.rank ? launcher.rank_name : launcher.size_name,
                 "; give the group's rank and size, or set both");
  }
  return options;
}

GroupOptions launcher_group() {
  return launcher_group([](const char* name) { return std::getenv(name); });
}

}  // namespace engram
