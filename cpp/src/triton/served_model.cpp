// SPDX-License-Identifier: Apache-2.0
#include "triton/served_model.h"

#include <charconv>
#include <cstring>
#include <memory>
#include <nlohmann/json.hpp>
#include <sstream>

#include "engram/error.h"
#include "engram/table.h"

namespace engram::triton {
namespace {

constexpr char kTokenIds[] = "token_ids";
constexpr char kLookbackIds[] = "lookback_ids";

int64_t parse_count(const nlohmann::json& config, const std::string& name) {
  const nlohmann::json::json_pointer place("/parameters/" + name + "/string_value");
  const auto text = config.value(place, std::string());
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  ENGRAM_CHECK(error == std::errc() && end == text.data() + text.size() && value > 0,
               "parameters: ", name, ": expected 1 or more, found '", text, "'");
  return value;
}

//! Names with a comma between them.
std::vector<std::string> parse_tables(const nlohmann::json& config) {
  std::istringstream text(
      config.value("/parameters/tables/string_value"_json_pointer, std::string()));
  std::vector<std::string> names;
  for (std::string name; std::getline(text, name, ',');) names.push_back(name);
  return names;
}

//! An input of a request.
class Input {
 public:
  Input(const Server& server, TRITONBACKEND_Request* request, const char* name)
      : server_(server), name_(name) {
    check_server(server, server.request_input(request, name, &input_));
    const int64_t* sizes = nullptr;
    uint32_t num_dims = 0;
    check_server(server, server.input_properties(input_, nullptr, nullptr, &sizes, &num_dims,
                                                 &num_bytes_, &num_buffers_));
    shape_.assign(sizes, sizes + num_dims);
  }

  //! Throws Error where its first sizes are others than those of a text of so many tokens.
  void check_tokens(int64_t num_tokens) const {
    ENGRAM_CHECK(shape_.size() >= 2 && shape_[0] == 1, name_,
                 ": expected one text in a request, found ", shape_.empty() ? 0 : shape_[0]);
    ENGRAM_CHECK(shape_[1] == num_tokens, name_, ": expected ", num_tokens,
                 " tokens, as in token_ids, found ", shape_[1]);
  }

  //! Throws Error where an INT32 is below `least` or not below `end`. NOTE: what lies in a GPU's
  //! memory is not looked at.
  void check_values(int64_t least, int64_t end) const {
    std::vector<char> bytes;
    bytes.reserve(num_bytes_);
    for (uint32_t index = 0; index < num_buffers_; ++index) {
      const void* buffer = nullptr;
      uint64_t size = 0;
      int memory = kCpu;
      int64_t memory_id = 0;
      check_server(server_,
                   server_.input_buffer(input_, index, &buffer, &size, &memory, &memory_id));
      if (memory == kGpu) return;
      const auto* const first = static_cast<const char*>(buffer);
      bytes.insert(bytes.end(), first, first + size);
    }
    for (size_t at = 0; at + sizeof(int32_t) <= bytes.size(); at += sizeof(int32_t)) {
      int32_t value = 0;
      std::memcpy(&value, bytes.data() + at, sizeof value);
      ENGRAM_CHECK(least <= value && value < end, name_, "[", at / sizeof value, "]: expected ",
                   least, " to ", end - 1, ", found ", value);
    }
  }

  //! Of a text, where check_tokens finds one.
  int64_t num_tokens() const { return static_cast<int64_t>(num_bytes_ / sizeof(int32_t)); }

 private:
  const Server& server_;
  const char* name_;
  TRITONBACKEND_Input* input_ = nullptr;
  std::vector<int64_t> shape_;
  uint64_t num_bytes_ = 0;
  uint32_t num_buffers_ = 0;
};

}  // namespace

ServedModel::ServedModel(const Server& server, TRITONBACKEND_Model* model) : server_(server) {
  TRITONSERVER_Message* message = nullptr;
  check_server(server, server.model_config(model, 1, &message));
  const std::unique_ptr<TRITONSERVER_Message, decltype(server.delete_message)> owner(
      message, server.delete_message);
  const nlohmann::json config = nlohmann::json::parse(read_json(server, message));
  max_tokens_ = parse_count(config, "max_tokens");
  vocab_size_ = parse_count(config, "vocab_size");
  for (const nlohmann::json& input : config.at("input")) {
    const std::string name = input.at("name");
    takes_lookback_ = takes_lookback_ || name == kLookbackIds;
    if (input.value("allow_ragged_batch", false)) ragged_.push_back(name);
  }
  tables_ = parse_tables(config);
  TableRegistry::instance().acquire(tables_);
}

ServedModel::~ServedModel() { TableRegistry::instance().release(tables_); }

int64_t ServedModel::num_tokens(TRITONBACKEND_Request* request) const {
  return Input(server_, request, kTokenIds).num_tokens();
}

void ServedModel::check(TRITONBACKEND_Request* request) const {
  const Input token_ids(server_, request, kTokenIds);
  for (const std::string& name : ragged_) {
    Input(server_, request, name.c_str()).check_tokens(token_ids.num_tokens());
  }
  token_ids.check_values(0, vocab_size_);
  if (takes_lookback_) Input(server_, request, kLookbackIds).check_values(-1, vocab_size_);
}

}  // namespace engram::triton
