// SPDX-License-Identifier: Apache-2.0
#include "table/bind.h"

#include <chrono>
#include <list>
#include <optional>

#include "cuda_support.h"
#include "engram/error.h"
#include "table/filling.h"
#include "table/log.h"
#include "table/points.h"
#include "table/table_build.h"

namespace engram {
namespace {

using nlohmann::json;
using std::chrono::steady_clock;

double seconds_since(steady_clock::time_point begin) {
  return std::chrono::duration<double>(steady_clock::now() - begin).count();
}

class Binding {
 public:
  Binding(const Bindings& bindings, const GroupOptions& options, BindState& state)
      : settings_(bindings.group),
        timeout_s_(options.timeout_s),
        group_(options, state.cancelled, &state.progress) {
    seat_ = {.group = options.name, .rank = group_.rank(), .size = group_.size()};
    for (const auto& [name, table] : bindings.tables) tables_.emplace_back(name, table);
    try {
      if (uses_gpu()) seat_.device = choose_device(seat_.rank);
      if (seat_.device >= 0) seat_.gpu_node = gpu_node(seat_.device);
    } catch (const Error& error) {
      seat_failure_ = error;
    }
  }

  TablesByName run(const std::function<void()>& check) {
    vote(check);
    plan();
    allocate();
    shard();
    const auto begin = steady_clock::now();
    fill();
    const double load_seconds = seconds_since(begin);
    count_pages();
    enroll();
    return finish(load_seconds);
  }

 private:
  using Work = Group::Work;

  std::vector<Group::Part> exchange(const char* phase,
                                    const std::function<Group::Part(Work&)>& fn) {
    const auto begin = steady_clock::now();
    auto parts = group_.exchange(phase, [&](Work& work) {
      use_device();
      return fn(work);
    });
    log(LogLevel::kDebug, concat("bind: ", phase, ": ", seconds_since(begin), " s"));
    return parts;
  }

  //! An exchange of nothing but that all have done it.
  void together(const char* phase, const std::function<void(Work&)>& fn) {
    exchange(phase, [&](Work& work) {
      fn(work);
      return Group::Part{.data = json::object(), .fds = {}};
    });
  }

  //! For the thread of an exchange: one that has chosen no GPU would be set back to the first one,
  //! which makes a context (GPU memory) there, for each rank.
  void use_device() const {
#if ENGRAM_CUDA
    if (seat_.size > 1 && seat_.device >= 0) {
      check_cuda(cudaSetDevice(seat_.device), "CUDA device");
    }
#endif
  }

  void vote(const std::function<void()>& check) {
    const auto parts = exchange("vote", [&](Work& work) {
      check();
      if (seat_failure_) throw *seat_failure_;
      for (TableBuild& table : tables_) table.read(seat_);
      filling_.emplace(tables_, seat_);
      ask_for_kept(work);
      Vote mine{.node = current_node(), .gpu_node = seat_.gpu_node, .limits = read_limits()};
      mine.limits.assumed_bytes = settings_.assume_ram.value_or(-1);
      mine.limits.gpu = gpu_room();
      for (const TableBuild& table : tables_) mine.tables.emplace(table.name(), table.vote(seat_));
      ENGRAM_POINT("bind.vote");
      return Group::Part{.data = to_json(mine), .fds = {}};
    });
    for (const Group::Part& part : parts) votes_.push_back(vote_from_json(part.data));
  }

  //! Of this rank's GPU. A process alone loads its GPU's copy once that asks for it; then the one
  //! that its thread has chosen, if it has, is likely to, and no other gets a context for it.
  GpuRoom gpu_room() {
    int64_t needed = 0;
    for (const TableBuild& table : tables_) needed += table.gpu_bytes(seat_);
    if (needed == 0) return {};
    const int device = seat_.size == 1 && seat_.device < 0 ? chosen_device() : seat_.device;
    return engram::gpu_room(device, needed);
  }

  //! A process alone that reads tables on its CPU is to leave CUDA alone: host memory is registered
  //! once a GPU asks for it.
  bool uses_gpu() {
    if (group_.size() > 1) return true;
    for (TableBuild& table : tables_) {
      const TableOptions& options = table.options();
      if (options.memory == MemoryKind::kCumem || options.numa.kind == NumaPolicy::kGpu ||
          options.placement == Placement::kDeviceSharded || options.keeper) {
        return true;
      }
    }
    return false;
  }

  void ask_for_kept(const Work& work) {
    std::map<std::string, TableInfo> wanted;
    for (const TableBuild& table : tables_) {
      if (table.options().keeper) wanted.emplace(table.name(), table.info());
    }
    if (wanted.empty()) return;
    const bool write = seat_.device >= 0 && !can_register_read_only(seat_.device);
    auto kept =
        ask_keepers(settings_.keeper, wanted, write, deadline_after(timeout_s_), cancelled(work));
    for (TableBuild& table : tables_) {
      const auto found = kept.find(table.name());
      if (found != kept.end()) table.set_kept(std::move(found->second));
    }
  }

  //! The same on all ranks, so that one Error is all ranks' without an exchange.
  void plan() {
    ENGRAM_POINT("bind.plan");
    std::map<std::string, TableOptions> options;
    for (const TableBuild& table : tables_) options.emplace(table.name(), table.options());
    Plan plan = make_plan(options, votes_);
    std::vector<RoomRequest> requests;
    BlocksDealt dealt;
    int64_t total = 0;
    for (TableBuild& table : tables_) {
      table.set_plan(std::move(plan.tables.at(table.name())));
      for (RoomRequest& each : table.room_requests(seat_.size, &dealt)) {
        requests.push_back(std::move(each));
      }
      total += table.bytes_to_load(seat_.size);
    }
    std::vector<Limits> limits;
    for (Vote& each : votes_) limits.push_back(std::move(each.limits));
    for (std::string& warning : check_room(requests, limits)) {
      plan.warnings.push_back(std::move(warning));
    }
    if (seat_.rank == 0) {
      for (const std::string& warning : plan.warnings) log(LogLevel::kWarning, warning);
    }
    group_.set_total_bytes(total);
  }

  void allocate() {
    auto parts = exchange("allocate", [&](Work&) {
      Group::Part part{.data = json::object(), .fds = {}};
      for (TableBuild& table : tables_) table.create(seat_, &part);
      ENGRAM_POINT("allocate.send");
      return part;
    });
    together("map", [&](Work&) {
      for (TableBuild& table : tables_) table.attach(seat_, &parts);
    });
  }

  //! What the ranks' GPUs hold parts of.
  void shard() {
    std::vector<std::pair<ArrayBuild*, Parts>> wanted;
    for (TableBuild& table : tables_) {
      for (ArrayBuild& array : table.arrays()) {
        if (array.placement != Placement::kDeviceSharded) continue;
        wanted.emplace_back(&array, table.parts_of(array, seat_.size));
      }
    }
    if (wanted.empty()) return;
    const PeerGpus gpus(group_, seat_.device);
    for (auto& [array, parts] : wanted) {
      array->sharded = std::make_unique<ShardedArray>(group_, gpus, std::move(parts), array->label);
    }
  }

  void fill() {
    together("load", [&](Work& work) {
      ENGRAM_POINT("load.begin");
      filling_->load(work);
      ENGRAM_POINT("load.end");
    });
    together("check", [&](Work&) {
      ENGRAM_POINT("bind.unchanged");
      filling_->check_unchanged();
    });
  }

  //! Before registration, which maps all of a table on each rank: the kernel counts small pages.
  void count_pages() {
    page_shares_ = exchange("pages", [&](Work&) {
      std::vector<std::string> labels;
      std::vector<AddressRange> ranges;
      for (TableBuild& table : tables_) {
        for (const ArrayBuild& array : table.arrays()) {
          if (!table.fills(array)) continue;
          labels.push_back(array.label);
          ranges.push_back({array.host->memory().data(), array.host->memory().num_bytes()});
        }
      }
      const std::vector<PageShare> shares = page_shares(ranges);
      json data = json::object();
      for (size_t i = 0; i < labels.size(); ++i) {
        data[labels[i]] = {shares[i].huge_bytes, shares[i].resident_bytes};
      }
      return Group::Part{.data = std::move(data), .fds = {}};
    });
  }

  //! From here on nobody writes to what is filled.
  void enroll() {
    together("register", [&](Work& work) {
      ENGRAM_POINT("register.begin");
      for (TableBuild& table : tables_) {
        for (const ArrayBuild& array : table.arrays()) {
          if (array.host) enroll(*array.host, work);
        }
        if (seat_.size > 1) table.seal(seat_);
      }
      ENGRAM_POINT("register.end");
    });
  }

  void enroll(HostArray& array, const Work& work) {
    if (seat_.size > 1 && seat_.device >= 0) {
      array.enroll(seat_.device, cancelled(work));
    } else if (seat_.size > 1) {
      array.protect();
    }
    // A process alone spoils nobody else's table, and has a GPU register it once that asks: pages
    // that were read-only meanwhile would be pinned one by one, by faults.
  }

  TablesByName finish(double load_seconds) {
    TablesByName tables;
    together("end", [&](Work&) {
      for (TableBuild& table : tables_) {
        // Of what each rank has touched, which is its share.
        int64_t huge = 0, resident = 0;
        for (const ArrayBuild& array : table.arrays()) {
          if (!table.fills(array)) continue;
          for (const int rank : table.copy(seat_).members) {
            const json& share = page_shares_[static_cast<size_t>(rank)].data.at(array.label);
            huge += share.at(0).get<int64_t>();
            resident += share.at(1).get<int64_t>();
          }
        }
        const double huge_share =
            resident > 0 ? static_cast<double>(huge) / static_cast<double>(resident) : 0;
        tables.emplace(table.name(), table.finish(seat_, huge_share, load_seconds));
      }
    });
    ENGRAM_POINT("bind.done");
    return tables;
  }

  const GroupSettings settings_;
  const double timeout_s_;
  Group group_;
  Seat seat_;
  std::optional<Error> seat_failure_;
  std::list<TableBuild> tables_;    // sources have addresses
  std::optional<Filling> filling_;  // once the tables are read
  std::vector<Vote> votes_;
  std::vector<Group::Part> page_shares_;  // by rank
};

}  // namespace

TablesByName bind_tables(const Bindings& bindings, const GroupOptions& group, BindState& state,
                         const std::function<void()>& check) {
  return Binding(bindings, group, state).run(check);
}

void check_tables(const Bindings& bindings) {
  if (bindings.failure) throw *bindings.failure;
  for (const auto& [name, options] : bindings.tables) {
    read_hot_ids(name, options, read_info(name, options));
  }
}

}  // namespace engram
