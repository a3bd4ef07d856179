// SPDX-License-Identifier: Apache-2.0
// A batching strategy of Triton Inference Server: what it joins to a batch has at most as many
// tokens as the model's parameter max_tokens says. The server finds it as batchstrategy.so in a
// model's folder, and asks it before it makes instances: it binds the tables that the parameter
// `tables` names, for their error is the model's here. TensorRT 10.6 makes contexts without them.
#include <dlfcn.h>

#include <charconv>
#include <new>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>

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
struct TRITONSERVER_Message;
}

namespace engram {
namespace {

constexpr int kInvalidArgument = 3;

//! What is called of the server. It is found in the library that called us, which any program may
//! have loaded in any way: hosts of TensorRT alone have none to link.
struct Server {
  TRITONSERVER_Error* (*new_error)(int code, const char* message);
  TRITONSERVER_Error* (*model_config)(TRITONBACKEND_Model*, uint32_t version,
                                      TRITONSERVER_Message** json);
  TRITONSERVER_Error* (*message_json)(TRITONSERVER_Message*, const char** text, size_t* size);
  TRITONSERVER_Error* (*delete_message)(TRITONSERVER_Message*);
  TRITONSERVER_Error* (*request_input)(TRITONBACKEND_Request*, const char* name,
                                       TRITONBACKEND_Input**);
  TRITONSERVER_Error* (*input_properties)(TRITONBACKEND_Input*, const char** name, int* type,
                                          const int64_t** shape, uint32_t* num_dims,
                                          uint64_t* num_bytes, uint32_t* num_buffers);
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
  find(library, "TRITONBACKEND_ModelConfig", &server->model_config);
  find(library, "TRITONSERVER_MessageSerializeToJson", &server->message_json);
  find(library, "TRITONSERVER_MessageDelete", &server->delete_message);
  find(library, "TRITONBACKEND_RequestInput", &server->request_input);
  find(library, "TRITONBACKEND_InputProperties", &server->input_properties);
}

int64_t parse_max_tokens(const nlohmann::json& config) {
  const auto text = config.value("/parameters/max_tokens/string_value"_json_pointer, std::string());
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  ENGRAM_CHECK(error == std::errc() && end == text.data() + text.size() && value > 0,
               "parameters: max_tokens: expected 1 or more, found '", text, "'");
  return value;
}

//! Names with a comma between them.
void require_tables(const nlohmann::json& config) {
  std::istringstream names(
      config.value("/parameters/tables/string_value"_json_pointer, std::string()));
  for (std::string name; std::getline(names, name, ',');) TableRegistry::instance().require(name);
}

struct Batcher {
  Server server{};
  int64_t max_tokens = 0;
};

struct Batch : Batcher {
  int64_t num_tokens = 0;
  bool is_empty = true;
};

//! An error of the server, or null.
TRITONSERVER_Error* make_batcher(TRITONBACKEND_Model* model, Batcher* batcher) {
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
  batcher->max_tokens = parse_max_tokens(config);
  require_tables(config);
  return nullptr;
}

}  // namespace
}  // namespace engram

using engram::Batch;
using engram::Batcher;

extern "C" {

ENGRAM_API TRITONSERVER_Error* TRITONBACKEND_ModelBatcherInitialize(TRITONBACKEND_Batcher** made,
                                                                    TRITONBACKEND_Model* model) {
  *made = nullptr;
  Batcher batcher;
  try {
    engram::find_server(__builtin_return_address(0), &batcher.server);
    if (TRITONSERVER_Error* const error = engram::make_batcher(model, &batcher)) return error;
    *made = reinterpret_cast<TRITONBACKEND_Batcher*>(new Batcher(batcher));
  } catch (const std::exception& error) {
    if (batcher.server.new_error != nullptr) {
      return batcher.server.new_error(engram::kInvalidArgument, error.what());
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
  delete reinterpret_cast<Batcher*>(batcher);
  return nullptr;
}

ENGRAM_API TRITONSERVER_Error* TRITONBACKEND_ModelBatchInitialize(
    const TRITONBACKEND_Batcher* batcher, void** batch) {
  const auto* const known = reinterpret_cast<const Batcher*>(batcher);
  *batch = known == nullptr ? nullptr : new (std::nothrow) Batch{*known};
  return nullptr;
}

ENGRAM_API TRITONSERVER_Error* TRITONBACKEND_ModelBatchFinalize(void* batch) {
  delete static_cast<Batch*>(batch);
  return nullptr;
}

//! NOTE: a batch's first request is never refused, however large: the server would ask again for
//! ever. The backend refuses it, alone.
ENGRAM_API TRITONSERVER_Error* TRITONBACKEND_ModelBatchIncludeRequest(
    TRITONBACKEND_Request* request, void* opaque, bool* should_include) {
  *should_include = true;
  auto* const batch = static_cast<Batch*>(opaque);
  if (batch == nullptr) return nullptr;
  TRITONBACKEND_Input* input = nullptr;
  if (auto* const error = batch->server.request_input(request, "token_ids", &input)) return error;
  uint64_t num_bytes = 0;
  if (auto* const error = batch->server.input_properties(input, nullptr, nullptr, nullptr, nullptr,
                                                         &num_bytes, nullptr))
    return error;
  const auto num_tokens = batch->num_tokens + static_cast<int64_t>(num_bytes / sizeof(int32_t));
  *should_include = batch->is_empty || num_tokens <= batch->max_tokens;
  if (!*should_include) return nullptr;
  batch->num_tokens = num_tokens;
  batch->is_empty = false;
  return nullptr;
}

}  // extern "C"
