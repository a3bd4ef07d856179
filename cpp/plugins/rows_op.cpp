// SPDX-License-Identifier: Apache-2.0
#include "rows_op.h"

#include "engram/ops.h"
#include "engram/row.h"

namespace engram::plugins {
namespace {

using nvinfer1::DataType;
using nvinfer1::DimensionOperation;
using Expr = const nvinfer1::IDimensionExpr&;

int32_t row_form(const std::string& output) {
  if (output == "bf16") return ENGRAM_ROWS_BF16;
  if (output == "mxfp8_linear") return ENGRAM_ROWS_MXFP8_LINEAR;
  if (output == "mxfp8_128x4") return ENGRAM_ROWS_MXFP8_128X4;
  throw Error(
      ENGRAM_INVALID_ARGUMENT,
      concat("field 'output': expected bf16, mxfp8_linear or mxfp8_128x4, found '", output, "'"));
}

}  // namespace

RowsOp::RowsOp(const FieldValues& fields)
    : table_name_(fields.text("table")),
      fingerprint_(fields.text("fingerprint")),
      layer_(fields.int32("layer")),
      layer_idx_(fields.int32("layer_idx")),
      head_dim_(fields.int32("head_dim")),
      form_(row_form(fields.text("output"))),
      as_words_(fields.text("values") == "words") {
  ENGRAM_CHECK(!table_name_.empty(), "field 'table': expected a name, found none");
  ENGRAM_CHECK(fingerprint_.size() == 64 &&
                   fingerprint_.find_first_not_of("0123456789abcdef") == std::string::npos,
               "field 'fingerprint': expected 64 hex digits in lower case, found '", fingerprint_,
               "'");
  ENGRAM_CHECK(layer_ >= 0, "field 'layer': expected at least 0, found ", layer_);
  ENGRAM_CHECK(head_dim_ > 0 && head_dim_ % kScaleBlock == 0,
               "field 'head_dim': expected a positive multiple of ", kScaleBlock, ", found ",
               head_dim_);
  ENGRAM_CHECK(layer_idx_ >= 0, "field 'layer_idx': expected at least 0, found ", layer_idx_);
  ENGRAM_CHECK(as_words_ || fields.text("values") == "fp8",
               "field 'values': expected fp8 or words, found '", fields.text("values"), "'");
  ENGRAM_CHECK(!as_words_ || form_ != ENGRAM_ROWS_BF16,
               "field 'values': expected fp8 where output is bf16, found 'words'");
}

FieldSpecs RowsOp::field_specs() {
  FieldSpec table = required_text("table", "name that the process binds to a table at run time");
  table.in_timing_id = false;
  return {
      table,
      required_text("fingerprint",
                    "of the layout, as the store has it: 64 hex digits in lower case"),
      required_int("layer", "the model's number of the layer whose table is meant"),
      required_int("head_dim", "values of a row"),
      required_int("layer_idx", "which layer of hash_ids [T, L, C] to look up"),
      optional_text("output", "bf16",
                    "bf16, or mxfp8_linear or mxfp8_128x4: values and scales apart"),
      optional_text("values", "fp8", "type of MXFP8 values: fp8, or words of four bytes (INT32)"),
      format_version_field()};
}

TensorSpec RowsOp::ids_spec() { return {"hash_ids", {DataType::kINT32}, "TLC"}; }

TensorSpecs RowsOp::row_specs() const {
  if (form_ == ENGRAM_ROWS_BF16) return {{"rows", {DataType::kBF16}, "TR"}};
  return {{"values", {as_words_ ? DataType::kINT32 : DataType::kFP8}, "TR"},
          {"scales", {DataType::kINT32}, form_ == ENGRAM_ROWS_MXFP8_LINEAR ? "TQ" : "Q"}};
}

void RowsOp::check(const Sizes& sizes) const {
  ENGRAM_CHECK(sizes['L'] < 0 || layer_idx_ < sizes['L'], "field 'layer_idx': expected below ",
               sizes['L'], " (hash_ids dimension 1), found ", layer_idx_);
  if (table_ != nullptr && sizes['L'] == table_->info().num_layers) {
    // Another layer's ids lie inside this table too: they would read wrong rows and tell nobody.
    ENGRAM_CHECK(layer_idx_ == table_->info().layer_idx, "field 'layer_idx': expected ",
                 table_->info().layer_idx, ", the place of layer ", layer_, " among the ",
                 sizes['L'], " of the layout, found ", layer_idx_);
  }
  const int64_t columns = sizes['C'];
  if (columns < 0) return;
  ENGRAM_CHECK(columns > 0, "hash_ids: expected at least 1 in dimension 2, found 0");
  if (table_ != nullptr)
    check_size("hash_ids dimension 2 (columns of the table)", table_->info().num_columns, columns);
  const int64_t num_scales = row_offset(columns, scales_per_row(head_dim_));
  ENGRAM_CHECK(form_ != ENGRAM_ROWS_MXFP8_LINEAR || num_scales % kBytesPerWord == 0,
               "hash_ids: expected columns whose scales fill words of ", kBytesPerWord,
               " bytes, found ", num_scales, " scales");
  const int64_t num_values = row_offset(columns, head_dim_);
  check_size("rows dimension 1", as_words_ ? num_values / kBytesPerWord : num_values, sizes['R']);
  if (form_ == ENGRAM_ROWS_MXFP8_LINEAR)
    check_size("scales dimension 1", num_scales / kBytesPerWord, sizes['Q']);
}

void RowsOp::derive(SizeExprs* exprs, nvinfer1::IExprBuilder& builder) const {
  const auto times = [&](Expr a, int64_t b) -> Expr {
    return *builder.operation(DimensionOperation::kPROD, a, *builder.constant(b));
  };
  const auto ceil_over = [&](Expr a, int64_t b) -> Expr {
    return *builder.operation(DimensionOperation::kCEIL_DIV, a, *builder.constant(b));
  };
  Expr columns = *(*exprs)['C'];
  (*exprs)['R'] = &times(columns, as_words_ ? head_dim_ / kBytesPerWord : head_dim_);
  Expr scale_words = ceil_over(times(columns, scales_per_row(head_dim_)), kBytesPerWord);
  (*exprs)['Q'] = &scale_words;
  if (form_ == ENGRAM_ROWS_MXFP8_128X4) {
    static_assert(kStageTileScales == kBytesPerWord, "a row of a scale tile is one word");
    Expr tiles = *builder.operation(DimensionOperation::kPROD,
                                    ceil_over(*(*exprs)['T'], kStageTileRows), scale_words);
    (*exprs)['Q'] = &times(tiles, kStageTileRows);
  }
}

void RowsOp::attach(const Attachment& attachment) {
  // What is bound says nothing of where the plan will run, and the environment's tables may take
  // minutes to load.
  if (attachment.building) return;
  table_ = TableRegistry::instance().require(table_name_);
  const TableInfo& info = table_->info();
  const std::string where = concat("table '", table_name_, "' (", info.store, ")");
  ENGRAM_CHECK(info.fingerprint == fingerprint_, where, ": expected layout fingerprint ",
               fingerprint_, ", found ", info.fingerprint);
  check_size((where + ": layer").c_str(), layer_, info.layer);
  check_size((where + ": head_dim").c_str(), head_dim_, info.head_dim);
  view_ = table_->view(attachment.device);
  if (table_->disk() != nullptr) lane_ = make_lane(table_, attachment.device);
}

size_t RowsOp::output_bytes(size_t output, const Sizes& sizes) const {
  const int64_t num_values = row_offset(sizes['C'], head_dim_);
  const int64_t num_scales = row_offset(sizes['C'], scales_per_row(head_dim_));
  int64_t bytes = row_offset(sizes['T'], num_scales);
  if (output == 0) {
    bytes = row_offset(sizes['T'], num_values) * (form_ == ENGRAM_ROWS_BF16 ? 2 : 1);
  } else if (form_ == ENGRAM_ROWS_MXFP8_128X4) {
    bytes = staged_scale_bytes(sizes['T'], num_scales);
  }
  return static_cast<size_t>(bytes);
}

engram_lookup_args RowsOp::lookup_sizes(const Sizes& sizes) const {
  engram_lookup_args args{};
  args.ids_stride = row_offset(sizes['L'], sizes['C']);
  args.num_tokens = sizes['T'];
  args.num_columns = static_cast<int32_t>(sizes['C']);
  args.head_dim = head_dim_;
  args.form = form_;
  return args;
}

int64_t RowsOp::gather_workspace_bytes(const Sizes& sizes) const {
  engram_lookup_args args = lookup_sizes(sizes);
  args.values_in_host = 1;
  return lookup_workspace_bytes(args);
}

cudaError_t RowsOp::gather(const Sizes& sizes, const void* hash_ids, void* const* outputs,
                           void* workspace, cudaStream_t stream) const {
  const size_t num_outputs = form_ == ENGRAM_ROWS_BF16 ? 1 : 2;
  if (table_ == nullptr) {
    for (size_t i = 0; i < num_outputs; ++i) {
      const cudaError_t code = cudaMemsetAsync(outputs[i], 0, output_bytes(i, sizes), stream);
      if (code != cudaSuccess) return code;
    }
    return cudaSuccess;
  }
  engram_lookup_args args = lookup_sizes(sizes);
  args.values = view_.values;
  args.scales = view_.scales;
  args.values_in_host = view_.values_in_host ? 1 : 0;
  args.hot = view_.hot;
  args.lanes = view_.lanes;
  args.ids = static_cast<const int32_t*>(hash_ids) + row_offset(layer_idx_, sizes['C']);
  args.out = outputs[0];
  if (num_outputs > 1) args.out_scales = static_cast<uint8_t*>(outputs[1]);
  args.first_row = table_->info().first_row;
  args.num_rows = table_->info().num_rows;
  if (workspace != nullptr) {
    args.workspace = workspace;
    args.workspace_bytes = gather_workspace_bytes(sizes);
  }
  if (lane_ != nullptr) return lane_->lookup(args, stream);
  check_lookup(args);
  check_lookup_on_gpu(args);
  return lookup_by_path(args, stream);
}

}  // namespace engram::plugins
