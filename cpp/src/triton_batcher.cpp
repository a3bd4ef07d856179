// SPDX-License-Identifier: Apache-2.0
// A batching strategy of Triton Inference Server, which finds it as batchstrategy.so in a model's
// folder. It says what is joined to a batch: at most as many tokens as the model's parameter
// max_tokens, and no request that would fail, or whose ids a GPU would find bad once its answer is
// out. Such a request is cancelled, which is the only error that a batching strategy can give. The
// server asks it before it makes instances: it binds the tables that the parameter `tables` names,
// for their error is the model's here (TensorRT 10.6 makes contexts without them), and unbinds them
// when the model goes.
#include <dlfcn.h>

#include <charconv>
#include <cstring>
#include <memory>
#include <new>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "engram/error.h"
#include "engram/table.h"
#include "table/log.h"

extern "C" {

// As the server's tritonbackend.h and tritonserver.h have them.
struct TRITONBACKEND_Batcher;
struct TRITONBACKEND_Input;
struct TRITONBACKEND_Model;
struct TRITONBACKEND_Request;
struct TRITONSERVER_Error;
struct TRITONSERVER_InferenceRequest;
struct TRITONSERVER_Message;
}

namespace engram {
namespace {

constexpr int kInvalidArgument = 3;
constexpr int kWarning = 1;
constexpr int kCpu = 0;
constexpr int kGpu = 2;

//! What is called of the server. It is found in the library that called us, which any program may
//! have loaded in any way: hosts of TensorRT alone have none to link.
struct Server {
  TRITONSERVER_Error* (*new_error)(int code, const char* message);
  void (*delete_error)(TRITONSERVER_Error*);
  TRITONSERVER_Error* (*log)(int level, const char* file, int line, const char* message);
  TRITONSERVER_Error* (*model_config)(TRITONBACKEND_Model*, uint32_t version,
                                      TRITONSERVER_Message** json);
  TRITONSERVER_Error* (*message_json)(TRITONSERVER_Message*, const char** text, size_t* size);
  TRITONSERVER_Error* (*delete_message)(TRITONSERVER_Message*);
  TRITONSERVER_Error* (*request_input)(TRITONBACKEND_Request*, const char* name,
                                       TRITONBACKEND_Input**);
  TRITONSERVER_Error* (*input_properties)(TRITONBACKEND_Input*, const char** name, int* type,
                                          const int64_t** shape, uint32_t* num_dims,
                                          uint64_t* num_bytes, uint32_t* num_buffers);
  TRITONSERVER_Error* (*input_buffer)(TRITONBACKEND_Input*, uint32_t index, const void** buffer,
                                      uint64_t* num_bytes, int* memory, int64_t* memory_id);
  TRITONSERVER_Error* (*request_id)(TRITONBACKEND_Request*, const char**);
  TRITONSERVER_Error* (*cancel)(TRITONSERVER_InferenceRequest*);
  TRITONSERVER_Error* (*is_cancelled)(TRITONBACKEND_Request*, bool*);
};

template <typename Function>
void find(void* library, const char* name, Function** function) {
  *function = reinterpret_cast<Function*>(dlsym(library, name));
  ENGRAM_CHECK(*function != nullptr, "batchstrategy.so: expected a server with ", name,
               ", found none");
}

void find_server(const void* caller, Server* server) {
  Dl_info info{};
  dladdr(caller, &info);
  void* const library = dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
  ENGRAM_CHECK(library != nullptr, "batchstrategy.so: expected to be called by a library");
  find(library, "TRITONSERVER_ErrorNew", &server->new_error);
  find(library, "TRITONSERVER_ErrorDelete", &server->delete_error);
  find(library, "TRITONSERVER_LogMessage", &server->log);
  find(library, "TRITONBACKEND_ModelConfig", &server->model_config);
  find(library, "TRITONSERVER_MessageSerializeToJson", &server->message_json);
  find(library, "TRITONSERVER_MessageDelete", &server->delete_message);
  find(library, "TRITONBACKEND_RequestInput", &server->request_input);
  find(library, "TRITONBACKEND_InputProperties", &server->input_properties);
  find(library, "TRITONBACKEND_InputBuffer", &server->input_buffer);
  find(library, "TRITONBACKEND_RequestId", &server->request_id);
  find(library, "TRITONSERVER_InferenceRequestCancel", &server->cancel);
  find(library, "TRITONBACKEND_RequestIsCancelled", &server->is_cancelled);
}

struct Batcher {
  Server server{};
  int64_t max_tokens = 0;
  int64_t vocab_size = 0;
  std::vector<std::string> ragged;  //!< inputs [1, tokens, ...]
  std::vector<std::string> tables;

  ~Batcher() { TableRegistry::instance().release(tables); }
};

using SharedBatcher = std::shared_ptr<const Batcher>;

struct Batch {
  //! NOTE: the server never ends a model's last batch, and ends its batcher before.
  std::weak_ptr<const Batcher> batcher;
  int64_t num_tokens = 0;
  bool is_empty = true;
};

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

std::vector<std::string> ragged_inputs(const nlohmann::json& config) {
  std::vector<std::string> names;
  for (const nlohmann::json& input : config.at("input")) {
    if (input.value("allow_ragged_batch", false)) names.push_back(input.at("name"));
  }
  return names;
}

void check_server(const Server& server, TRITONSERVER_Error* error) {
  if (error == nullptr) return;
  server.delete_error(error);
  throw Error(ENGRAM_INVALID_ARGUMENT, "the server does not say what it has");
}

//! An error of the server, or null.
TRITONSERVER_Error* configure(TRITONBACKEND_Model* model, Batcher* batcher) {
  const Server& server = batcher->server;
  TRITONSERVER_Message* message = nullptr;
  if (TRITONSERVER_Error* const error = server.model_config(model, 1, &message)) return error;
  const char* text = nullptr;
  size_t size = 0;
  TRITONSERVER_Error* error = server.message_json(message, &text, &size);
  const std::string json(text, error == nullptr ? size : 0);
  server.delete_message(message);
  if (error != nullptr) return error;
  const nlohmann::json config = nlohmann::json::parse(json);
  batcher->max_tokens = parse_count(config, "max_tokens");
  batcher->vocab_size = parse_count(config, "vocab_size");
  batcher->ragged = ragged_inputs(config);
  std::vector<std::string> tables = parse_tables(config);
  TableRegistry::instance().acquire(tables);
  batcher->tables = std::move(tables);
  return nullptr;
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

//! Throws Error where the request would spoil those beside it, or the step after it.
void check_request(const Batcher& batcher, TRITONBACKEND_Request* request, const Input& token_ids) {
  for (const std::string& name : batcher.ragged) {
    Input(batcher.server, request, name.c_str()).check_tokens(token_ids.num_tokens());
  }
  token_ids.check_values(0, batcher.vocab_size);
  Input(batcher.server, request, "lookback_ids").check_values(-1, batcher.vocab_size);
}

//! The server answers it with CANCELLED, once it is not included; its log says why.
//! NOTE: there is one kind of request in the server, which its two interfaces name differently.
void cancel(const Server& server, TRITONBACKEND_Request* request, const Error& why) {
  const char* id = "";
  check_server(server, server.request_id(request, &id));
  const std::string text = concat("request '", id, "' is cancelled: ", why.what());
  check_server(server, server.log(kWarning, __FILE__, __LINE__, text.c_str()));
  auto* const same = reinterpret_cast<TRITONSERVER_InferenceRequest*>(request);
  check_server(server, server.cancel(same));
  bool is_cancelled = false;
  check_server(server, server.is_cancelled(request, &is_cancelled));
  ENGRAM_CHECK(is_cancelled, "batchstrategy.so: expected a server that cancels, found none");
}

//! NOTE: a batch's first request is never left out, however large: the server would ask again for
//! ever. The backend refuses it, alone. A cancelled one does not come again.
bool may_join(TRITONBACKEND_Request* request, const Batcher& batcher, Batch* batch) {
  const Input token_ids(batcher.server, request, "token_ids");
  try {
    check_request(batcher, request, token_ids);
  } catch (const Error& error) {
    cancel(batcher.server, request, error);
    return false;
  }
  const int64_t num_tokens = batch->num_tokens + token_ids.num_tokens();
  if (!batch->is_empty && num_tokens > batcher.max_tokens) return false;
  batch->num_tokens = num_tokens;
  batch->is_empty = false;
  return true;
}

}  // namespace
}  // namespace engram

using engram::Batch;
using engram::Batcher;
using engram::SharedBatcher;

extern "C" {

ENGRAM_API TRITONSERVER_Error* TRITONBACKEND_ModelBatcherInitialize(TRITONBACKEND_Batcher** made,
                                                                    TRITONBACKEND_Model* model) {
  *made = nullptr;
  engram::Server server{};
  try {
    const std::shared_ptr<Batcher> batcher(new Batcher);  // apart from what batches count by
    engram::find_server(__builtin_return_address(0), &server);
    batcher->server = server;
    if (TRITONSERVER_Error* const error = engram::configure(model, batcher.get())) return error;
    *made = reinterpret_cast<TRITONBACKEND_Batcher*>(new SharedBatcher(batcher));
  } catch (const std::exception& error) {
    if (server.new_error != nullptr) {
      return server.new_error(engram::kInvalidArgument, error.what());
    }
    // No server of ours, and so no error of its kind: it joins without asking.
    try {
      engram::log(engram::LogLevel::kError, error.what());
    } catch (const std::exception&) {
      return nullptr;
    }
  }
  return nullptr;
}

ENGRAM_API TRITONSERVER_Error* TRITONBACKEND_ModelBatcherFinalize(TRITONBACKEND_Batcher* batcher) {
  delete reinterpret_cast<SharedBatcher*>(batcher);
  return nullptr;
}

ENGRAM_API TRITONSERVER_Error* TRITONBACKEND_ModelBatchInitialize(
    const TRITONBACKEND_Batcher* batcher, void** batch) {
  const auto* const known = reinterpret_cast<const SharedBatcher*>(batcher);
  *batch = known == nullptr ? nullptr : new (std::nothrow) Batch{.batcher = *known};
  return nullptr;
}

ENGRAM_API TRITONSERVER_Error* TRITONBACKEND_ModelBatchFinalize(void* batch) {
  delete static_cast<Batch*>(batch);
  return nullptr;
}

ENGRAM_API TRITONSERVER_Error* TRITONBACKEND_ModelBatchIncludeRequest(
    TRITONBACKEND_Request* request, void* opaque, bool* should_include) {
  *should_include = true;
  auto* const batch = static_cast<Batch*>(opaque);
  const SharedBatcher batcher = batch == nullptr ? nullptr : batch->batcher.lock();
  if (batcher == nullptr) return nullptr;
  try {
    *should_include = engram::may_join(request, *batcher, batch);
  } catch (const std::exception& error) {
    return batcher->server.new_error(engram::kInvalidArgument, error.what());
  }
  return nullptr;
}

}  // extern "C"
