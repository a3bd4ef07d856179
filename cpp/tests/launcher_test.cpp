// SPDX-License-Identifier: Apache-2.0
#include "table/launcher.h"

#include <sys/prctl.h>

#include <map>
#include <set>
#include <sstream>

#include "doctest/doctest.h"
#include "ranks.h"

namespace engram {
namespace {

using Environment = std::map<std::string, std::string>;

std::string group_of(const Environment& environment) {
  const GroupOptions options = launcher_group([&](const char* name) {
    const auto found = environment.find(name);
    return found == environment.end() ? nullptr : found->second.c_str();
  });
  return concat(options.name, " ", options.rank, "/", options.size);
}

TEST_CASE("each launcher's variables make a group with the job's name") {
  CHECK(group_of({}) == "default 0/1");
  CHECK(group_of({{"OMPI_COMM_WORLD_LOCAL_RANK", "3"},
                  {"OMPI_COMM_WORLD_LOCAL_SIZE", "8"},
                  {"PMIX_NAMESPACE", "prterun-node-7@1"}}) == "pmix-prterun-node-7@1 3/8");
  CHECK(group_of({{"LOCAL_RANK", "1"},
                  {"LOCAL_WORLD_SIZE", "2"},
                  {"TORCHELASTIC_RUN_ID", "none"},
                  {"MASTER_PORT", "29500"}}) == "torch-none-29500 1/2");
  CHECK(group_of({{"MPI_LOCALRANKID", "0"}, {"MPI_LOCALNRANKS", "4"}}) == "job 0/4");
  CHECK(group_of({{"SLURM_LOCALID", "2"}, {"SLURM_NTASKS_PER_NODE", "4"}}) == "job 2/4");
  CHECK(group_of({{"LOCAL_RANK", "0"}, {"LOCAL_WORLD_SIZE", "1"}}) == "default 0/1");
}

//! The names of the groups of two ranks of a job, which MPICH's launcher starts here: by itself, or
//! by a shell each.
std::vector<std::string> hydra_names(bool by_shells) {
  Process proxy([&] {
    prctl(PR_SET_NAME, "hydra_pmi_proxy");
    std::string names;
    for (const char* const rank : {"0", "1"}) {
      const auto name = [&] {
        return group_of({{"MPI_LOCALRANKID", rank}, {"MPI_LOCALNRANKS", "2"}});
      };
      const auto named_rank = [&] {
        prctl(PR_SET_NAME, "rank");
        return name();
      };
      Process process([&] {
        prctl(PR_SET_NAME, "shell");
        return by_shells ? Process(named_rank).result() : name();
      });
      names += process.result() + "\n";
    }
    return names;
  });
  std::istringstream lines(proxy.result());
  std::vector<std::string> names;
  for (std::string line; std::getline(lines, line);) names.push_back(line);
  REQUIRE(names.size() == 2);
  return names;
}

TEST_CASE("two jobs of MPICH's are two groups, each of all its ranks") {
  std::set<std::string> jobs;
  for (const bool by_shells : {false, true}) {
    const std::vector<std::string> names = hydra_names(by_shells);
    const std::string job = names[0].substr(0, names[0].find(' '));
    CHECK(job.starts_with("hydra-"));
    CHECK(names == std::vector<std::string>{job + " 0/2", job + " 1/2"});
    jobs.insert(job);
  }
  CHECK(jobs.size() == 2);
}

TEST_CASE("Slurm lists its tasks by node") {
  Environment step{{"SLURM_LOCALID", "3"},
                   {"SLURM_JOB_ID", "77"},
                   {"SLURM_STEP_ID", "0"},
                   {"SLURM_STEP_TASKS_PER_NODE", "8(x2),4"}};
  for (const auto& [node, size] : {std::pair("0", 8), {"1", 8}, {"2", 4}}) {
    step["SLURM_NODEID"] = node;
    CHECK(group_of(step) == concat("job-77-0 3/", size));
  }
  for (const char* const node : {"3", "900000"}) {
    step["SLURM_NODEID"] = node;
    CHECK_THROWS_AS(group_of(step), Error);
  }
  for (const char* const list : {"x", "8(x", "8(xy)", ",", "8(x2)4"}) {
    step["SLURM_NODEID"] = "2";
    step["SLURM_STEP_TASKS_PER_NODE"] = list;
    CHECK_THROWS_AS(group_of(step), Error);
  }
}

TEST_CASE("the innermost launcher counts") {
  CHECK(group_of({{"SLURM_LOCALID", "0"},
                  {"SLURM_STEP_TASKS_PER_NODE", "1"},
                  {"LOCAL_RANK", "5"},
                  {"LOCAL_WORLD_SIZE", "8"}}) == "torch 5/8");
  // mpirun's users set LOCAL_RANK for their frameworks.
  CHECK(group_of({{"LOCAL_RANK", "1"},
                  {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                  {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}}) == "job 1/2");
}

TEST_CASE("a Slurm batch script is no rank") {
  CHECK(group_of({{"SLURM_JOB_ID", "7"}, {"SLURM_LOCALID", "0"}, {"SLURM_NTASKS_PER_NODE", "8"}}) ==
        "default 0/1");
}

TEST_CASE("variables that are half a launcher, or no rank, are refused") {
  CHECK_THROWS_WITH_AS(group_of({{"LOCAL_RANK", "1"}}),
                       "launcher: expected both LOCAL_RANK and LOCAL_WORLD_SIZE, found only "
                       "LOCAL_RANK; give the group's rank and size, or set both",
                       Error);
  CHECK_THROWS_AS(group_of({{"OMPI_COMM_WORLD_LOCAL_SIZE", "1"}}), Error);
  CHECK_THROWS_WITH_AS(group_of({{"LOCAL_RANK", "two"}, {"LOCAL_WORLD_SIZE", "2"}}),
                       "LOCAL_RANK: expected a whole number, found 'two'", Error);
  for (const char* const rank : {"2", "-1"}) {
    CHECK_THROWS_AS(group_of({{"LOCAL_RANK", rank}, {"LOCAL_WORLD_SIZE", "2"}}), Error);
  }
}

}  // namespace
}  // namespace engram
