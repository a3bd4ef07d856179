// SPDX-License-Identifier: Apache-2.0
//! EngramPrefetch: starts a lookup on a side stream. Its outputs are ready after the EngramLookup
//! that takes them (prefetched = 1) has waited, and may be read by nothing else.
#include "lane.h"
#include "rows_op.h"

namespace engram::plugins {
namespace {

class PrefetchOp final : public RowsOp {
 public:
  explicit PrefetchOp(const FieldValues& fields) : RowsOp(fields) {
    add_input(ids_spec());
    for (const TensorSpec& rows : row_specs()) add_output(rows);
  }

  void attach(const Attachment& attachment) override {
    RowsOp::attach(attachment);
    if (!attachment.building) lane_ = PrefetchLane::of(attachment.context, table_name());
  }

  cudaError_t enqueue(const Call& call) const override {
    // While building nobody waits: TensorRT times this plugin alone, and may free its outputs at
    // once.
    // NOTE: no workspace, which other layers take while the side stream still works.
    const auto gather_on = [&](cudaStream_t stream) {
      return gather(call.sizes, call.inputs[0], call.outputs, nullptr, stream);
    };
    if (lane_ == nullptr) return gather_on(call.stream);
    lane_->start(call.stream, call.outputs[0], gather_on);
    return cudaSuccess;
  }

 private:
  std::shared_ptr<PrefetchLane> lane_;
};

}  // namespace

const OpSpec& prefetch_spec() {
  static const OpSpec spec{"EngramPrefetch", "starts a lookup beside the layers that follow",
                           RowsOp::field_specs(),
                           [](const FieldValues& values) -> std::unique_ptr<Op> {
                             return std::make_unique<PrefetchOp>(values);
                           }};
  return spec;
}

}  // namespace engram::plugins
