// SPDX-License-Identifier: Apache-2.0
#include "table/plan.h"

#include <algorithm>

#include "engram/error.h"
#include "engram/row.h"
#include "table/load.h"
#include "table/sayings.h"

namespace engram {
namespace {

using nlohmann::json;

[[noreturn]] void refuse(const std::string& text) { throw Error(ENGRAM_INVALID_ARGUMENT, text); }

//! What differs between a rank's vote and that of rank 0, joined to `text`.
void add_differences(const Vote& first, const Vote& other, int rank, std::string* text) {
  const auto add = [&](const std::string& difference) {
    *text += concat(text->empty() ? "" : "; ", "rank ", rank, ": ", difference);
  };
  for (const auto& [name, table] : first.tables) {
    const auto found = other.tables.find(name);
    if (found == other.tables.end()) {
      add(concat("table '", name, "': expected it to be bound as on rank 0, found that it is not"));
      continue;
    }
    for (const auto& [key, value] : table.same) {
      const auto& theirs = found->second.same;
      const auto there = theirs.find(key);
      const std::string other_value = there == theirs.end() ? "" : there->second;
      if (other_value == value) continue;
      add(concat("table '", name, "': ", key, ": expected ", value, " as on rank 0, found ",
                 other_value));
      break;  // the first of them explains the others
    }
  }
  for (const auto& [name, table] : other.tables) {
    if (first.tables.count(name) != 0) continue;
    add(concat("table '", name, "': expected no such table, as on rank 0"));
  }
}

//! Why the ranks cannot have the kind of memory that is their choice number `index`; empty: they
//! can.
std::string why_not(const std::string& table, size_t index, const std::vector<Vote>& votes) {
  const auto reason = [&](const Vote& vote) {
    return vote.tables.at(table).kinds.at(index).second;
  };
  if (votes.size() == 1) return reason(votes.front());
  Sayings sayings;
  for (size_t rank = 0; rank < votes.size(); ++rank) {
    const std::string text = reason(votes[rank]);
    if (!text.empty()) sayings.add(static_cast<int64_t>(rank), text);
  }
  return sayings.text();
}

//! The first kind that every rank can have.
std::optional<MemoryKind> choose_kind(const std::string& name, const std::vector<Vote>& votes,
                                      std::vector<std::string>* warnings) {
  const auto& choices = votes.front().tables.at(name).kinds;
  if (choices.empty()) return std::nullopt;
  std::vector<std::pair<std::string, std::string>> given_up;  // kinds, why
  const auto text = [&] {
    std::string joined;
    for (const auto& [kinds, why] : given_up) {
      joined += concat(joined.empty() ? "" : "; ", kinds, " cannot be had: ", why);
    }
    return joined;
  };
  for (size_t i = 0; i < choices.size(); ++i) {
    const std::string why = why_not(name, i, votes);
    const std::string kind = memory_kind_name(choices[i].first);
    if (why.empty()) {
      if (!given_up.empty()) {
        warnings->push_back(concat("table '", name, "': memory ", kind, " is taken: ", text()));
      }
      return choices[i].first;
    }
    if (!given_up.empty() && given_up.back().second == why) {
      given_up.back().first += ", " + kind;
    } else {
      given_up.emplace_back(kind, why);
    }
  }
  refuse(concat("table '", name, "': memory: ", text()));
}

//! Ranks whose wish for memory next to their GPUs cannot be met.
void warn_of_unknown_nodes(const std::string& name, const std::vector<Vote>& votes,
                           std::vector<std::string>* warnings) {
  Sayings sayings;
  for (size_t rank = 0; rank < votes.size(); ++rank) {
    const Vote& vote = votes[rank];
    if (vote.gpu_node >= 0 || vote.limits.nodes.size() < 2) continue;
    sayings.add(static_cast<int64_t>(rank), "no NUMA node next to its GPU is known");
  }
  const std::string who = sayings.text();
  if (who.empty()) return;
  warnings->push_back(concat("table '", name, "': numa gpu: the default is taken: ", who));
}

std::vector<Copy> make_copies(const TableOptions& options, MemoryKind kind,
                              const std::vector<Vote>& votes) {
  std::vector<Copy> copies;
  for (size_t i = 0; i < votes.size(); ++i) {
    const int rank = static_cast<int>(i);
    const NumaPolicy numa = policy_for(options.numa, votes[i].gpu_node);
    const auto same = std::find_if(copies.begin(), copies.end(),
                                   [&](const Copy& copy) { return copy.numa == numa; });
    if (same == copies.end() || kind == MemoryKind::kPrivate) {
      copies.push_back({rank, {rank}, numa});
    } else {
      same->members.push_back(rank);
    }
  }
  // The ranks touch the pages of one copy together, from nodes of their own.
  for (Copy& copy : copies) {
    const auto node_of = [&](int rank) { return votes[static_cast<size_t>(rank)].node; };
    const bool apart = std::any_of(copy.members.begin(), copy.members.end(),
                                   [&](int rank) { return node_of(rank) != node_of(copy.owner); });
    if (copy.numa.kind == NumaPolicy::kLocal && apart) {
      copy.numa = {NumaPolicy::kNode, node_of(copy.owner)};
    }
  }
  return copies;
}

}  // namespace

NumaPolicy policy_for(const NumaPolicy& wanted, int gpu_node) {
  if (wanted.kind != NumaPolicy::kGpu) return wanted;
  return gpu_node < 0 ? NumaPolicy{} : NumaPolicy{NumaPolicy::kNode, gpu_node};
}

json to_json(const Vote& vote) {
  json tables = json::object();
  for (const auto& [name, table] : vote.tables) {
    json kinds = json::array();
    for (const auto& [kind, reason] : table.kinds)
      kinds.push_back({memory_kind_name(kind), reason});
    tables[name] = {{"same", table.same}, {"kinds", kinds}};
  }
  return {{"tables", tables},
          {"node", vote.node},
          {"gpu_node", vote.gpu_node},
          {"limits", to_json(vote.limits)}};
}

Vote vote_from_json(const json& data) {
  Vote vote;
  for (const auto& [name, table] : data.at("tables").items()) {
    TableVote& entry = vote.tables[name];
    entry.same = table.at("same").get<std::map<std::string, std::string>>();
    for (const json& kind : table.at("kinds")) {
      entry.kinds.emplace_back(parse_memory_kind(kind.at(0).get<std::string>()),
                               kind.at(1).get<std::string>());
    }
  }
  vote.node = data.at("node").get<int>();
  vote.gpu_node = data.at("gpu_node").get<int>();
  vote.limits = limits_from_json(data.at("limits"));
  return vote;
}

std::optional<int> Copy::share_of(int rank) const {
  const auto found = std::find(members.begin(), members.end(), rank);
  if (found == members.end()) return std::nullopt;
  return static_cast<int>(found - members.begin());
}

const Copy& TablePlan::copy_of(int rank) const {
  return *std::find_if(copies.begin(), copies.end(),
                       [rank](const Copy& copy) { return copy.share_of(rank).has_value(); });
}

Plan make_plan(const std::map<std::string, TableOptions>& tables, const std::vector<Vote>& votes) {
  std::string differences;
  for (size_t rank = 1; rank < votes.size(); ++rank) {
    add_differences(votes.front(), votes[rank], static_cast<int>(rank), &differences);
  }
  if (!differences.empty()) refuse(differences);
  Plan plan;
  for (const auto& [name, options] : tables) {
    TablePlan& table = plan.tables[name];
    const auto kind = choose_kind(name, votes, &plan.warnings);
    if (!kind) continue;
    if (options.numa.kind == NumaPolicy::kGpu) warn_of_unknown_nodes(name, votes, &plan.warnings);
    table.kind = *kind;
    table.copies = make_copies(options, *kind, votes);
  }
  return plan;
}

std::vector<RoomRequest> room_requests(const std::string& label, const TablePlan& plan,
                                       PageKind pages, int64_t num_bytes, int num_ranks,
                                       BlocksDealt* dealt) {
  std::vector<RoomRequest> requests;
  for (const Copy& copy : plan.copies) {
    RoomRequest request;
    request.label = label;
    request.options = {.kind = plan.kind, .pages = pages, .numa = copy.numa};
    request.num_bytes = num_bytes;
    request.creator = copy.owner;
    request.touched.assign(static_cast<size_t>(num_ranks), 0);
    const int shares = static_cast<int>(copy.members.size());
    int64_t& first_block = (*dealt)[copy.members];
    for (int share = 0; share < shares; ++share) {
      request.touched[static_cast<size_t>(copy.members[static_cast<size_t>(share)])] =
          share_bytes(num_bytes, first_block, share, shares);
    }
    first_block += ceil_div(num_bytes, kBlockBytes);
    requests.push_back(std::move(request));
  }
  return requests;
}

}  // namespace engram
