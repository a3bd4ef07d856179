// SPDX-License-Identifier: Apache-2.0
//! EngramLookup: row ids to rows of a named table, as BF16 or as FP8 values with E8M0 scales; or
//! the rows that an EngramPrefetch of the same table gathers meanwhile.
#include "lane.h"
#include "rows_op.h"

namespace engram::plugins {
namespace {

class LookupOp final : public RowsOp {
 public:
  explicit LookupOp(const FieldValues& fields)
      : RowsOp(fields), prefetched_(fields.flag("prefetched")) {
    // hash_ids is an input of both forms: TensorRT must keep it while a prefetch still reads it.
    hash_ids_ = add_input(ids_spec());
    for (const TensorSpec& rows : row_specs()) {
      if (prefetched_) add_input(rows);
      add_output(rows);
    }
  }

  void attach(const Attachment& attachment) override {
    if (!prefetched_) return RowsOp::attach(attachment);
    if (!attachment.building) lane_ = PrefetchLane::of(attachment.context, table_name());
  }

  int64_t workspace_bytes(const Sizes& sizes) const override {
    return prefetched_ ? 0 : gather_workspace_bytes(sizes);
  }

  cudaError_t enqueue(const Call& call) const override {
    if (!prefetched_) {
      return gather(call.sizes, call.inputs[hash_ids_], call.outputs, call.workspace, call.stream);
    }
    if (lane_ != nullptr) lane_->join(call.stream, call.inputs[hash_ids_ + 1]);
    for (size_t i = 0; i < outputs().size(); ++i) {
      const cudaError_t code =
          cudaMemcpyAsync(call.outputs[i], call.inputs[hash_ids_ + 1 + static_cast<int>(i)],
                          output_bytes(i, call.sizes), cudaMemcpyDeviceToDevice, call.stream);
      if (code != cudaSuccess) return code;
    }
    return cudaSuccess;
  }

 private:
  bool prefetched_;
  int hash_ids_;
  std::shared_ptr<PrefetchLane> lane_;
};

}  // namespace

const OpSpec& lookup_spec() {
  static const OpSpec spec = [] {
    FieldSpecs fields = RowsOp::field_specs();
    fields.push_back(
        optional_int("prefetched", 0, "1: inputs are hash_ids and an EngramPrefetch's outputs"));
    return OpSpec{"EngramLookup", "row ids to rows of a named table", fields,
                  [](const FieldValues& values) -> std::unique_ptr<Op> {
                    return std::make_unique<LookupOp>(values);
                  }};
  }();
  return spec;
}

}  // namespace engram::plugins
