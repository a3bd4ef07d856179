// SPDX-License-Identifier: Apache-2.0
//! \file rows_op.h
//! What EngramLookup and EngramPrefetch share: fields, outputs and the gather from a named table.
#pragma once

#include "engram/engram.h"
#include "engram/table.h"
#include "plugin.h"
#include "table/lane.h"

namespace engram::plugins {

//! Letters: T tokens, L layers, C columns, R values or words of a token, Q scale words (of a token
//! where the order is linear).
class RowsOp : public Op {
 public:
  explicit RowsOp(const FieldValues& fields);

  void check(const Sizes& sizes) const override;
  void derive(SizeExprs* exprs, nvinfer1::IExprBuilder& builder) const override;
  void attach(const Attachment& attachment) override;

  //! The fields of both plugins.
  static FieldSpecs field_specs();

 protected:
  const std::string& table_name() const { return table_name_; }
  //! hash_ids, as an input.
  static TensorSpec ids_spec();
  //! Rows, or values and scales.
  TensorSpecs row_specs() const;
  //! Bytes of an output; 0 is rows or values, 1 scales.
  size_t output_bytes(size_t output, const Sizes& sizes) const;
  //! Bytes of the workspace that gathers fastest from host memory, where the table may turn out to
  //! be.
  int64_t gather_workspace_bytes(const Sizes& sizes) const;
  //! Gathers into outputs on a stream; zeros while building, which reads no table.
  //! workspace: of gather_workspace_bytes, or null.
  cudaError_t gather(const Sizes& sizes, const void* hash_ids, void* const* outputs,
                     void* workspace, cudaStream_t stream) const;

 private:
  //! Sizes alone.
  engram_lookup_args lookup_sizes(const Sizes& sizes) const;

  std::string table_name_;
  std::string fingerprint_;
  int32_t layer_;
  int32_t layer_idx_;
  int32_t head_dim_;
  int32_t form_;
  bool as_words_;
  std::shared_ptr<const Table> table_;
  TableView view_;
  std::shared_ptr<Lane> lane_;  //!< of a table on disk
};

}  // namespace engram::plugins
