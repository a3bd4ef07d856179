// SPDX-License-Identifier: Apache-2.0
//! EngramLookup: row ids to rows of a named table, as BF16 or as FP8 values with E8M0 scales.
#include "cuda_support.h"
#include "engram/ops.h"
#include "engram/row.h"
#include "engram/table.h"
#include "plugin.h"

namespace engram::plugins {
namespace {

using nvinfer1::DataType;
using nvinfer1::DimensionOperation;

constexpr int kBytesPerWord =
    4;  // TensorRT has no type for raw bytes: four to an INT32, in memory order

int32_t row_form(const std::string& output) {
  if (output == "bf16") return ENGRAM_ROWS_BF16;
  if (output == "mxfp8_linear") return ENGRAM_ROWS_MXFP8_LINEAR;
  if (output == "mxfp8_128x4") return ENGRAM_ROWS_MXFP8_128X4;
  throw Error(
      ENGRAM_INVALID_ARGUMENT,
      concat("field 'output': expected bf16, mxfp8_linear or mxfp8_128x4, found '", output, "'"));
}

//! Letters: T tokens, L layers, C columns, R values or words of a token, Q scale words (of a token
//! where linear).
class LookupOp final : public Op {
 public:
  explicit LookupOp(const FieldValues& fields)
      : table_name_(fields.text("table")),
        fingerprint_(fields.text("fingerprint")),
        layer_(fields.int32("layer")),
        layer_idx_(fields.int32("layer_idx")),
        head_dim_(fields.int32("head_dim")),
        form_(row_form(fields.text("output"))) {
    const std::string& values = fields.text("values");
    ENGRAM_CHECK(!table_name_.empty(), "field 'table': expected a name, found none");
    ENGRAM_CHECK(fingerprint_.size() == 64, "field 'fingerprint': expected 64 hex digits, found '",
                 fingerprint_, "'");
    ENGRAM_CHECK(head_dim_ > 0 && head_dim_ % kScaleBlock == 0,
                 "field 'head_dim': expected a positive multiple of ", kScaleBlock, ", found ",
                 head_dim_);
    ENGRAM_CHECK(layer_idx_ >= 0, "field 'layer_idx': expected at least 0, found ", layer_idx_);
    ENGRAM_CHECK(values == "fp8" || values == "words",
                 "field 'values': expected fp8 or words, found '", values, "'");
    add_input({"hash_ids", {DataType::kINT32}, "TLC"});
    if (form_ == ENGRAM_ROWS_BF16) {
      add_output({"rows", {DataType::kBF16}, "TR"});
      return;
    }
    values_per_element_ = values == "words" ? kBytesPerWord : 1;
    add_output({"values", {values == "words" ? DataType::kINT32 : DataType::kFP8}, "TR"});
    add_output({"scales", {DataType::kINT32}, form_ == ENGRAM_ROWS_MXFP8_LINEAR ? "TQ" : "Q"});
  }

  void check(const Sizes& sizes) const override {
    ENGRAM_CHECK(sizes['L'] < 0 || layer_idx_ < sizes['L'], "field 'layer_idx': expected below ",
                 sizes['L'], " (hash_ids dimension 1), found ", layer_idx_);
    const int64_t columns = sizes['C'];
    if (columns < 0) return;
    ENGRAM_CHECK(columns > 0, "hash_ids: expected at least 1 in dimension 2, found 0");
    if (table_ != nullptr)
      check_size("hash_ids dimension 2 (columns of the table)", table_->info().num_columns,
                 columns);
    const int64_t num_scales = row_offset(columns, scales_per_row(head_dim_));
    ENGRAM_CHECK(form_ != ENGRAM_ROWS_MXFP8_LINEAR || num_scales % kBytesPerWord == 0,
                 "hash_ids: expected columns whose scales fill words of ", kBytesPerWord,
                 " bytes, found ", num_scales, " scales");
  }

  void derive(const Sizes&, SizeExprs* exprs, nvinfer1::IExprBuilder& builder) const override {
    using Expr = const nvinfer1::IDimensionExpr&;
    const auto times = [&](Expr a, int64_t b) -> Expr {
      return *builder.operation(DimensionOperation::kPROD, a, *builder.constant(b));
    };
    const auto ceil_over = [&](Expr a, int64_t b) -> Expr {
      return *builder.operation(DimensionOperation::kCEIL_DIV, a, *builder.constant(b));
    };
    Expr columns = *(*exprs)['C'];
    (*exprs)['R'] = &times(columns, head_dim_ / values_per_element_);
    Expr scale_words = ceil_over(times(columns, scales_per_row(head_dim_)), kBytesPerWord);
    (*exprs)['Q'] = &scale_words;
    if (form_ == ENGRAM_ROWS_MXFP8_128X4) {
      static_assert(kStageTileScales == kBytesPerWord, "a row of a scale tile is one word");
      Expr tiles = *builder.operation(DimensionOperation::kPROD,
                                      ceil_over(*(*exprs)['T'], kStageTileRows), scale_words);
      (*exprs)['Q'] = &times(tiles, kStageTileRows);
    }
  }

  void attach(const Attachment& attachment) override {
    TableRegistry& registry = TableRegistry::instance();
    table_ = attachment.building ? registry.find(table_name_) : registry.require(table_name_);
    if (table_ == nullptr) return;
    const TableInfo& info = table_->info();
    const std::string where = concat("table '", table_name_, "' (", info.store, ")");
    ENGRAM_CHECK(info.fingerprint == fingerprint_, where, ": expected layout fingerprint ",
                 fingerprint_, ", found ", info.fingerprint);
    check_size((where + ": layer").c_str(), layer_, info.layer);
    check_size((where + ": head_dim").c_str(), head_dim_, info.head_dim);
    view_ = table_->view(attachment.device);
  }

  cudaError_t enqueue(const Call& call) const override {
    const Sizes& sizes = call.sizes;
    if (table_ == nullptr) return write_zeros(call);
    engram_lookup_args args{};
    args.values = view_.values;
    args.scales = view_.scales;
    args.ids = static_cast<const int32_t*>(call.inputs[0]) + row_offset(layer_idx_, sizes['C']);
    args.out = call.outputs[0];
    if (form_ != ENGRAM_ROWS_BF16) args.out_scales = static_cast<uint8_t*>(call.outputs[1]);
    args.ids_stride = sizes['L'] * sizes['C'];
    args.num_rows = table_->info().num_rows;
    args.num_tokens = sizes['T'];
    args.num_columns = static_cast<int32_t>(sizes['C']);
    args.head_dim = head_dim_;
    args.form = form_;
    check_lookup(args);
    return lookup_cuda(args, call.stream);
  }

 private:
  //! While building, an unbound table.
  cudaError_t write_zeros(const Call& call) const {
    const int64_t num_tokens = call.sizes['T'];
    const int64_t num_values = row_offset(num_tokens, row_offset(call.sizes['C'], head_dim_));
    const int64_t num_scales = row_offset(call.sizes['C'], scales_per_row(head_dim_));
    const auto zero = [&call](int output, int64_t bytes) {
      return cudaMemsetAsync(call.outputs[output], 0, static_cast<size_t>(bytes), call.stream);
    };
    if (form_ == ENGRAM_ROWS_BF16)
      return zero(0, num_values * static_cast<int64_t>(sizeof(uint16_t)));
    const cudaError_t code = zero(0, num_values);
    if (code != cudaSuccess) return code;
    return zero(1, form_ == ENGRAM_ROWS_MXFP8_LINEAR ? row_offset(num_tokens, num_scales)
                                                     : staged_scale_bytes(num_tokens, num_scales));
  }

  std::string table_name_;
  std::string fingerprint_;
  int32_t layer_;
  int32_t layer_idx_;
  int32_t head_dim_;
  int32_t form_;
  int32_t values_per_element_ = 1;
  std::shared_ptr<const Table> table_;
  TableView view_;
};

}  // namespace

const OpSpec& lookup_spec() {
  static const OpSpec spec = [] {
    FieldSpec table = required_text("table", "name that the process binds to a table at run time");
    table.in_timing_id = false;
    return OpSpec{
        "EngramLookup",
        "row ids to rows of a named table",
        {table, required_text("fingerprint", "of the layout, as the store has it: 64 hex digits"),
         required_int("layer", "the model's number of the layer whose table is meant"),
         required_int("head_dim", "values of a row"),
         optional_int("layer_idx", 0, "which layer of hash_ids [T, L, C] to look up"),
         optional_text("output", "bf16",
                       "bf16, or mxfp8_linear or mxfp8_128x4: values and scales apart"),
         optional_text("values", "fp8",
                       "type of MXFP8 values: fp8, or words of four bytes (INT32)"),
         format_version_field()},
        [](const FieldValues& fields) -> std::unique_ptr<Op> {
          return std::make_unique<LookupOp>(fields);
        }};
  }();
  return spec;
}

}  // namespace engram::plugins
