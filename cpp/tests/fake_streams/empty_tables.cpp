// SPDX-License-Identifier: Apache-2.0
// The registry, of tables that no store has: their layout is that of ../plugins/cases.h, their rows
// are nobody's to read, but of those on disk.
#include "../made_disk_table.h"
#include "engram/table.h"
#include "fake_streams.h"

namespace engram {
namespace {

class OneByte final : public TableArray {
 public:
  const uint8_t* on_device(int) override { return &byte_; }
  const uint8_t* on_host() override { return nullptr; }

 private:
  alignas(16) uint8_t byte_ = 0;
};

}  // namespace

MadeDiskTable& fake::disk_table() {
  static MadeDiskTable table(ScalesIn::kFile, 0);
  return table;
}

TableView Table::view(int device) const {
  if (disk_ != nullptr) return {};
  return {.values = values_->on_device(device), .scales = scales_->on_device(device)};
}

TableView Table::rows_on_host() const { return {}; }

TableRegistry& TableRegistry::instance() {
  static TableRegistry registry;
  return registry;
}

void TableRegistry::bind(const Bindings& bindings) {
  for (const auto& [name, options] : bindings.tables) {
    TableInfo info{.store = options.store,
                   .fingerprint = std::string(64, 'a'),
                   .layer = 1,
                   .layer_idx = 1,
                   .num_layers = 2,
                   .num_columns = 24,
                   .head_dim = 256,
                   .num_rows = kDiskRows};
    std::shared_ptr<DiskReader> disk;
    if (options.placement == Placement::kDisk) {
      disk = {std::shared_ptr<void>(), &fake::disk_table().reader()};
    }
    tables_[name] =
        std::make_shared<Table>(options, info, TableHistory{}, std::make_unique<OneByte>(),
                                std::make_unique<OneByte>(), nullptr, disk);
  }
}

void TableRegistry::unbind(const std::string& name) { tables_.erase(name); }

std::shared_ptr<const Table> TableRegistry::find(const std::string& name) {
  const auto found = tables_.find(name);
  return found == tables_.end() ? nullptr : found->second;
}

std::shared_ptr<const Table> TableRegistry::require(const std::string& name) {
  auto table = find(name);
  ENGRAM_CHECK(table != nullptr, "table '", name, "': expected a bound name, found none");
  return table;
}

}  // namespace engram
