// SPDX-License-Identifier: Apache-2.0
#include "table/filling.h"

#include <map>

namespace engram {
namespace {

std::vector<const Source*> host_sources(std::list<TableBuild>& tables) {
  std::vector<const Source*> sources;
  for (TableBuild& table : tables) {
    for (const ArrayBuild& array : table.arrays()) {
      if (table.fills(array)) sources.push_back(&array.source);
    }
  }
  return sources;
}

}  // namespace

std::function<bool()> cancelled(const Group::Work& work) {
  return [&work] { return work.cancelled(); };
}

Filling::Filling(std::list<TableBuild>& tables, const Seat& seat)
    : tables_(tables), seat_(seat), loader_(host_sources(tables)) {}

void Filling::load(Group::Work& work) {
  load_host(work);
  const auto add_bytes = [&work](int64_t num_bytes) { work.add_bytes(num_bytes); };
  for (TableBuild& table : tables_) {
    const bool verify = table.options().verify;
    for (ArrayBuild& array : table.arrays()) {
      if (array.sharded) array.sharded->load(*array.reader, verify, cancelled(work), add_bytes);
      // A process alone loads it once a GPU asks.
      if (array.device && seat_.size > 1) {
        array.device->load(seat_.device, cancelled(work), add_bytes);
      }
    }
  }
}

void Filling::load_host(Group::Work& work) {
  // Blocks of all tables that the same ranks share are dealt out together (plan.h, BlocksDealt).
  std::map<std::vector<int>, std::vector<LoadTarget>> dealt;
  for (TableBuild& table : tables_) {
    for (ArrayBuild& array : table.arrays()) {
      if (!table.fills(array)) continue;
      HostMemory& memory = array.host->memory();
      dealt[table.copy(seat_).members].push_back(
          {.data = memory.data(),
           .num_bytes = memory.num_bytes(),
           .source = &array.source,
           .verify = table.options().verify,
           .prefault = [&memory](int64_t begin, int64_t end) { memory.prefault(begin, end); }});
    }
  }
  for (const auto& [members, targets] : dealt) {
    loader_.run(targets, {.share = *Copy{.members = members}.share_of(seat_.rank),
                          .shares = static_cast<int>(members.size()),
                          .num_threads = loader_threads(seat_.size),
                          .cancelled = cancelled(work),
                          .add_bytes = [&work](int64_t bytes) { work.add_bytes(bytes); }});
  }
}

void Filling::check_unchanged() const {
  loader_.check_unchanged();
  for (TableBuild& table : tables_) {
    for (const ArrayBuild& array : table.arrays()) {
      if (array.reader && array.reader->stamp()) check_stamp(*array.reader->stamp());
    }
  }
}

}  // namespace engram
