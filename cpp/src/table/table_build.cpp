// SPDX-License-Identifier: Apache-2.0
#include "table/table_build.h"

#include <algorithm>
#include <iterator>

#include "cuda_support.h"
#include "engram/error.h"
#include "engram/row.h"
#include "table/cumem.h"
#include "table/disk_reader.h"
#include "table/gpu_hot_rows.h"
#include "table/hot_buckets.h"
#include "table/hot_file.h"
#include "table/lane.h"
#include "table/points.h"
#include "table/record.h"
#include "table/worker_pool.h"

namespace engram {
namespace {

using nlohmann::json;

//! What a table holds on to beside its arrays.
struct Held {
  std::shared_ptr<void> keeper;
  std::unique_ptr<RecordEntry> record;
};

std::unique_ptr<TableArray> take(ArrayBuild& array) {
  if (array.host) return std::move(array.host);
  if (array.device) return std::move(array.device);
  if (array.disk) return std::move(array.disk);
  return std::move(array.sharded);
}

int64_t bytes_here(const ArrayBuild& array, int rank) {
  if (array.disk) return 0;
  if (array.sharded) return array.sharded->parts().part_bytes(rank);
  return array.device ? array.device_bytes : array.source.file.num_bytes;
}

int64_t hot_bytes(const TableOptions& options) {
  constexpr double kGibi = 1 << 30;
  return static_cast<int64_t>(options.hot_gib * kGibi);
}

template <typename Fn>
auto named(const std::string& name, const Fn& fn) {
  try {
    return fn();
  } catch (const Error& error) {
    throw Error(error.status(), concat("table '", name, "': ", error.what()));
  }
}

}  // namespace

TableInfo read_info(const std::string& name, const TableOptions& options) {
  return named(name, [&] {
    const bool by_formula = options.formula_seed.has_value();
    const bool all_kept = options.keeper && options.scales == Placement::kHost;
    TableInfo info =
        read_table_info(options.store, options.layer, options.checkpoint, !by_formula && !all_kept);
    if (by_formula) info.content_id = concat("formula:", *options.formula_seed);
    ENGRAM_CHECK(options.expect_content.empty() || options.expect_content == info.content_id,
                 options.store, ": expected tables with content id ", options.expect_content,
                 ", found ", info.content_id);
    return info;
  });
}

std::vector<int32_t> read_hot_ids(const std::string& name, const TableOptions& options,
                                  const TableInfo& info) {
  if (options.hot_rows.empty()) return {};
  return named(name, [&] { return read_hot_file(options.hot_rows, info.layer, info.num_rows); });
}

void TableBuild::read(const Seat& seat) {
  info_ = read_info(name_, options_);
  hot_ids_ = read_hot_ids(name_, options_, info_);
  named(name_, [&] {
    const bool by_formula = options_.formula_seed.has_value();
    split_ = options_.heads ? split_heads(info_.column_rows, seat.rank, seat.size)
                            : split_heads(info_.column_rows, 0, 1);
    std::erase_if(hot_ids_, [&](int32_t id) {
      return id < split_.first_row || id >= split_.first_row + split_.num_rows;
    });
    const auto fill = [&](ArrayBuild& array, const char* kind, Placement placement,
                          const FileRange& file, FormulaTensor tensor) {
      array.label = concat(name_, ".", kind);
      array.placement = placement;
      array.source = {.name = concat("engram.", info_.layer, ".", kind), .file = file};
      if (by_formula) array.source.formula = {info_.layer, tensor, *options_.formula_seed};
      if (placement == Placement::kDevice) {
        const int64_t row_bytes = file.num_bytes / info_.num_rows;
        const int64_t begin = row_offset(split_.first_row, row_bytes);
        array.device_bytes = row_offset(split_.num_rows, row_bytes);
        array.device =
            make_device_array(array.source, begin, begin + array.device_bytes, options_.verify);
      }
      if (placement == Placement::kDisk) {
        array.disk = std::make_unique<DiskArray>(file);
      }
      if (placement == Placement::kDeviceSharded) {
        array.reader = std::make_unique<SourceReader>(array.source);
      }
    };
    fill(arrays_[0], "values", options_.placement, info_.values, FormulaTensor::kValues);
    fill(arrays_[1], "scales", options_.scales, info_.scales, FormulaTensor::kScales);
  });
}

HostMemoryOptions TableBuild::memory_options(const Seat& seat) const {
  return {
      .kind = plan_.kind, .pages = options_.pages, .numa = copy(seat).numa, .device = seat.device};
}

std::string TableBuild::problem(MemoryKind kind, const Seat& seat) const {
  const HostMemoryOptions tried{.kind = kind,
                                .pages = options_.pages,
                                .numa = policy_for(options_.numa, seat.gpu_node),
                                .device = seat.device};
  try {
    check_host_memory(tried);
    if (kind == MemoryKind::kCumem) {
      require_cuda(seat.device);
      return cumem_problem(seat.device, tried.numa);
    }
    // Reserved pages are counted later, with all that is to be allocated.
    if (tried.pages != PageKind::k2M) HostMemory::create(tried, small_page_bytes(), name_);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TableVote TableBuild::vote(const Seat& seat) const {
  TableVote vote;
  vote.same = {{"layer", std::to_string(info_.layer)},
               {"fingerprint", info_.fingerprint},
               {"content id", info_.content_id},
               {"rows", std::to_string(info_.num_rows)},
               {"head_dim", std::to_string(info_.head_dim)},
               {"placement", placement_name(options_.placement)},
               {"scales", placement_name(options_.scales)},
               {"heads", options_.heads ? "true" : "false"},
               {"verify", options_.verify ? "true" : "false"},
               {"memory", options_.keeper    ? "keeper"
                          : !options_.memory ? "any"
                                             : memory_kind_name(*options_.memory)},
               {"pages", page_kind_name(options_.pages)},
               {"numa", numa_policy_name(options_.numa)},
               {"keeper", kept_ ? concat(kept_->keeper, " (", kept_->id, ")") : "none"}};
  if (!fills(arrays_[0]) && !fills(arrays_[1])) return vote;
  std::vector<MemoryKind> kinds{MemoryKind::kMemfd, MemoryKind::kShm};
  if (seat.size == 1) kinds.push_back(MemoryKind::kPrivate);
  if (options_.memory) kinds = {*options_.memory};
  for (const MemoryKind kind : kinds) vote.kinds.emplace_back(kind, problem(kind, seat));
  return vote;
}

std::vector<RoomRequest> TableBuild::room_requests(int num_ranks, BlocksDealt* dealt) const {
  std::vector<RoomRequest> requests;
  for (const ArrayBuild& array : arrays_) {
    if (!fills(array)) continue;
    for (RoomRequest& request : engram::room_requests(
             array.label, plan_, options_.pages, array.source.file.num_bytes, num_ranks, dealt)) {
      requests.push_back(std::move(request));
    }
  }
  return requests;
}

Parts TableBuild::parts_of(const ArrayBuild& array, int num_ranks) const {
  return {info_.column_rows, array.source.file.num_bytes / info_.num_rows, num_ranks};
}

int64_t TableBuild::gpu_bytes(const Seat& seat) const {
  int64_t total = hot_sizes().num_bytes;
  for (const ArrayBuild& array : arrays_) {
    total += array.device_bytes;
    if (array.placement != Placement::kDeviceSharded) continue;
    total += parts_of(array, seat.size).part_bytes(seat.rank);
  }
  return total;
}

int64_t TableBuild::bytes_to_load(int num_ranks) const {
  int64_t total = 0;
  for (const ArrayBuild& array : arrays_) {
    int64_t times = 0;
    if (fills(array)) times = static_cast<int64_t>(plan_.copies.size());
    if (array.placement == Placement::kDeviceSharded) times = 1;
    if (array.placement == Placement::kDevice && num_ranks > 1) {
      times = options_.heads ? 1 : num_ranks;
    }
    total += times * array.source.file.num_bytes;
  }
  return total;
}

void TableBuild::create(const Seat& seat, Group::Part* part) {
  for (ArrayBuild& array : arrays_) {
    if (!fills(array) || copy(seat).owner != seat.rank) continue;
    ENGRAM_POINT("allocate.create");
    array.host = std::make_unique<HostArray>(
        HostMemory::create(memory_options(seat), array.source.file.num_bytes, array.label));
    if (copy(seat).members.size() == 1) continue;
    const std::vector<FileDescriptor>& descriptors = array.host->memory().descriptors();
    part->data[array.label] = {part->fds.size(), descriptors.size()};
    for (const FileDescriptor& each : descriptors) part->fds.push_back(each.duplicate());
  }
}

void TableBuild::seal(const Seat& seat) {
  for (ArrayBuild& array : arrays_) {
    if (fills(array) && copy(seat).owner == seat.rank) array.host->memory().seal();
  }
}

void TableBuild::attach(const Seat& seat, std::vector<Group::Part>* parts) {
  if (kept_) return attach_kept(seat);
  for (ArrayBuild& array : arrays_) {
    if (!fills(array) || copy(seat).owner == seat.rank) continue;
    Group::Part& part = parts->at(static_cast<size_t>(copy(seat).owner));
    const json& place = part.data.at(array.label);
    const auto first = place.at(0).get<size_t>();
    std::vector<FileDescriptor> fds;
    for (size_t i = 0; i < place.at(1).get<size_t>(); ++i) {
      fds.push_back(std::move(part.fds.at(first + i)));
    }
    ENGRAM_POINT("attach.map");
    array.host = std::make_unique<HostArray>(HostMemory::attach(
        memory_options(seat), std::move(fds), array.source.file.num_bytes, array.label));
    ENGRAM_POINT("attach.mapped");
  }
}

void TableBuild::attach_kept(const Seat& seat) {
  named(name_, [&] {
    const bool read_only = seat.device < 0 || can_register_read_only(seat.device);
    for (size_t i = 0; i < arrays_.size(); ++i) {
      ArrayBuild& array = arrays_[i];
      if (array.placement != Placement::kHost) continue;
      HostMemoryOptions options = kept_->options;
      options.device = seat.device;
      array.host = std::make_unique<HostArray>(HostMemory::attach(
          options, std::move(i == 0 ? kept_->values : kept_->scales), array.source.file.num_bytes,
          array.label, read_only ? Access::kReadOnly : Access::kReadWrite));
    }
  });
}

std::shared_ptr<const Table> TableBuild::finish(const Seat& seat, double huge_share,
                                                double load_seconds) {
  int64_t filled_bytes = 0;
  for (const ArrayBuild& array : arrays_) {
    if (fills(array)) filled_bytes += array.source.file.num_bytes;
  }
  TableHistory history{
      .rank = seat.rank,
      .size = seat.size,
      .num_bytes = bytes_here(arrays_[0], seat.rank) + bytes_here(arrays_[1], seat.rank),
      .since = seconds_since_1970(),
      .load_seconds = load_seconds,
      .huge_bytes = static_cast<int64_t>(huge_share * static_cast<double>(filled_bytes))};
  if (kept_) {
    history.keeper = kept_->keeper;
    history.huge_bytes = kept_->huge_bytes;
    // What became of the keeper's wishes, for reports.
    options_.pages = kept_->options.pages;
    options_.numa = kept_->options.numa;
  }
  info_.first_column = split_.first_column;
  info_.first_row = split_.first_row;
  info_.num_rows = split_.num_rows;
  info_.num_columns = split_.num_columns;
  info_.column_rows = {info_.column_rows.begin() + split_.first_column,
                       info_.column_rows.begin() + split_.first_column + split_.num_columns};
  const std::shared_ptr<DiskReader> disk = named(name_, [&] { return make_reader(); });
  if (disk) history.num_bytes += disk->hot_rows().num_bytes();
  std::shared_ptr<GpuHotRows> hot = make_hot_rows();
  const HostMemory* const memory = arrays_[0].host   ? arrays_[0].host->host_memory()
                                   : arrays_[1].host ? arrays_[1].host->host_memory()
                                                     : nullptr;
  auto held = std::make_shared<Held>();
  if (kept_) held->keeper = kept_->connection;
  held->record = std::make_unique<RecordEntry>(
      seat.group, seat.rank, seat.size,
      json{{"name", name_},
           {"store", info_.store},
           {"layer", info_.layer},
           {"content_id", info_.content_id},
           {"fingerprint", info_.fingerprint},
           {"kind", memory != nullptr ? memory_kind_name(memory->options().kind)
                    : disk            ? "disk"
                                      : "gpu"},
           {"placement", placement_name(options_.placement)},
           {"bytes", history.num_bytes},
           {"huge_bytes", history.huge_bytes},
           {"since", history.since},
           {"keeper", kept_ ? kept_->id : ""}});
  const std::shared_ptr<Lanes> lanes =
      disk || num_gather_threads(options_, seat.size) > 0 ? std::make_shared<Lanes>() : nullptr;
  auto table = std::make_shared<const Table>(std::move(options_), std::move(info_),
                                             std::move(history), take(arrays_[0]), take(arrays_[1]),
                                             std::move(held), disk, std::move(hot), lanes);
  if (lanes) lanes->belong_to(table);
  return table;
}

std::shared_ptr<DiskReader> TableBuild::make_reader() const {
  const auto& [values, scales] = arrays_;
  if (!values.disk) return nullptr;
  return std::make_shared<DiskReader>(info_, *values.disk, scales.disk.get(),
                                      scales.host ? scales.host->memory().data() : nullptr,
                                      hot_bytes(options_));
}

TableBuild::HotSizes TableBuild::hot_sizes() const {
  if (options_.hot_rows.empty() && options_.hot_adaptive == 0) return {};
  const bool with_scales = arrays_[1].placement == Placement::kHost;
  const int row_bytes = info_.head_dim + (with_scales ? scales_per_row(info_.head_dim) : 0);
  const int64_t budget = hot_bytes(options_);
  const auto adaptive_bytes =
      static_cast<int64_t>(static_cast<double>(budget) * options_.hot_adaptive);
  const int64_t bucket_bytes = row_offset(kAdaptiveWays, row_bytes + int64_t{sizeof(uint64_t)});
  // More find no rows to keep.
  const int64_t roomy = ceil_div(2 * split_.num_rows, kAdaptiveWays);
  const int64_t slot_bytes = row_bytes + int64_t{sizeof(int32_t)};
  HotSizes sizes{
      .max_slots = (budget - adaptive_bytes) / slot_bytes,
      .num_adaptive = std::min({roomy, adaptive_bytes / bucket_bytes, int64_t{INT32_MAX}})};
  const int64_t num_buckets =
      num_hot_buckets(static_cast<int64_t>(hot_ids_.size()), sizes.max_slots);
  sizes.num_bytes = row_offset(row_offset(num_buckets, kHotWays), slot_bytes) +
                    row_offset(sizes.num_adaptive, bucket_bytes);
  return sizes;
}

std::shared_ptr<GpuHotRows> TableBuild::make_hot_rows() const {
  if (options_.hot_rows.empty() && options_.hot_adaptive == 0) return nullptr;
  const HostMemory* const scales = arrays_[1].host ? arrays_[1].host->host_memory() : nullptr;
  const HotSource source{.label = name_,
                         .values = arrays_[0].host->memory().data(),
                         .scales = scales != nullptr ? scales->data() : nullptr,
                         .head_dim = info_.head_dim,
                         .num_columns = info_.num_columns};
  const HotSizes sizes = hot_sizes();
  return std::make_shared<GpuHotRows>(source, make_hot_buckets(hot_ids_, sizes.max_slots),
                                      sizes.num_adaptive);
}

}  // namespace engram
