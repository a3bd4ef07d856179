// SPDX-License-Identifier: Apache-2.0
// What stands before a backend of Triton Inference Server for models that keep sequences, to which
// the server gives no batching strategy. The server takes a backend from a model's folder before
// its own: there, a link to this library has that backend's file name, as libtriton_tensorrt.so.
// The true one is opened, and asked all that the server asks, with three exceptions. A model has
// its tables bound before it is made, and unbound once it is gone. A request that would fail, or
// whose ids a GPU would find bad once its answer is out, is answered with its error. Requests of
// more tokens than the engine takes (the parameter max_tokens) run one after another.
#include <dlfcn.h>

#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "engram/error.h"
#include "triton/served_model.h"
#include "triton/server.h"

namespace engram::triton {
namespace {

template <typename... Things>
using Entry = TRITONSERVER_Error* (*)(Things...);

//! The true backend. What it does not have the server would not ask: only `execute` is never null.
class Backend {
 public:
  explicit Backend(const std::string& path)
      : library_(dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL)) {
    ENGRAM_CHECK(library_ != nullptr, "cannot open the backend: ", dlerror());
    find("TRITONBACKEND_Initialize", &initialize);
    find("TRITONBACKEND_Finalize", &finalize);
    find("TRITONBACKEND_GetBackendAttribute", &attribute);
    find("TRITONBACKEND_ModelInitialize", &model_initialize);
    find("TRITONBACKEND_ModelFinalize", &model_finalize);
    find("TRITONBACKEND_ModelInstanceInitialize", &instance_initialize);
    find("TRITONBACKEND_ModelInstanceFinalize", &instance_finalize);
    find("TRITONBACKEND_ModelInstanceExecute", &execute);
    ENGRAM_CHECK(execute != nullptr, path, ": expected a backend, found none");
  }

  Entry<TRITONBACKEND_Backend*> initialize = nullptr;
  Entry<TRITONBACKEND_Backend*> finalize = nullptr;
  Entry<TRITONBACKEND_Backend*, TRITONBACKEND_BackendAttribute*> attribute = nullptr;
  Entry<TRITONBACKEND_Model*> model_initialize = nullptr;
  Entry<TRITONBACKEND_Model*> model_finalize = nullptr;
  Entry<TRITONBACKEND_ModelInstance*> instance_initialize = nullptr;
  Entry<TRITONBACKEND_ModelInstance*> instance_finalize = nullptr;
  Entry<TRITONBACKEND_ModelInstance*, TRITONBACKEND_Request**, uint32_t> execute = nullptr;

 private:
  template <typename Function>
  void find(const char* name, Function* function) {
    *function = reinterpret_cast<Function>(dlsym(library_, name));
  }

  void* library_;  //!< NOTE: never closed: TensorRT's plugins and threads stay
};

struct Model {
  Model(std::shared_ptr<const Backend> behind, const Server& server, TRITONBACKEND_Model* model)
      : backend(std::move(behind)), served(server, model) {}

  std::shared_ptr<const Backend> backend;
  ServedModel served;
};

//! What the server has made, by the server's own pointers.
template <typename Key, typename Value>
class Made {
 public:
  void add(Key* key, std::shared_ptr<const Value> value) {
    const std::lock_guard<std::mutex> lock(mutex_);
    values_[key] = std::move(value);
  }

  //! Null where there is none.
  std::shared_ptr<const Value> find(Key* key) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = values_.find(key);
    return found == values_.end() ? nullptr : found->second;
  }

  //! The same, and it is there no more.
  std::shared_ptr<const Value> take(Key* key) {
    std::shared_ptr<const Value> value = find(key);
    const std::lock_guard<std::mutex> lock(mutex_);
    values_.erase(key);
    return value;
  }

 private:
  std::mutex mutex_;
  std::map<Key*, std::shared_ptr<const Value>> values_;
};

Made<TRITONBACKEND_Backend, Backend> backends;
Made<TRITONBACKEND_Model, Model> models;
Server server{};
std::once_flag server_is_found;

template <typename Function, typename... Things>
TRITONSERVER_Error* ask(Function function, Things... things) {
  return function == nullptr ? nullptr : function(things...);
}

//! The server's error of what `body` throws.
template <typename Body>
TRITONSERVER_Error* guarded(Body body) {
  try {
    return body();
  } catch (const std::exception& error) {
    return server.new_error(kInvalidArgument, error.what());
  }
}

//! In the server's folder of backends.
std::string path_of(TRITONBACKEND_Backend* backend) {
  const char* name = nullptr;
  check_server(server, server.backend_name(backend, &name));
  TRITONSERVER_Message* message = nullptr;
  check_server(server, server.backend_config(backend, &message));
  const nlohmann::json config = nlohmann::json::parse(read_json(server, message));
  const std::string folder = config.at("cmdline").at("backend-directory");
  return concat(folder, "/", name, "/libtriton_", name, ".so");
}

std::shared_ptr<const Model> model_of(TRITONBACKEND_ModelInstance* instance) {
  TRITONBACKEND_Model* model = nullptr;
  check_server(server, server.instance_model(instance, &model));
  std::shared_ptr<const Model> found = models.find(model);
  ENGRAM_CHECK(found != nullptr, "expected a model that was made, found none");
  return found;
}

//! Answers a request with an error, and lets go of it.
void refuse(TRITONBACKEND_Request* request, const char* text) {
  TRITONBACKEND_Response* response = nullptr;
  TRITONSERVER_Error* error = server.new_response(&response, request);
  if (error == nullptr) {
    TRITONSERVER_Error* const why = server.new_error(kInvalidArgument, text);
    error = server.send_response(response, kFinal, why);
    server.delete_error(why);
  }
  if (error != nullptr) server.delete_error(error);
  error = server.release(request, kAll);
  if (error != nullptr) server.delete_error(error);
}

//! Requests that the engine takes at a time.
class Batch {
 public:
  Batch(const Model& model, TRITONBACKEND_ModelInstance* instance, uint32_t num_requests)
      : model_(model), instance_(instance) {
    requests_.reserve(num_requests);
  }

  //! Throws Error where it is one to refuse.
  void add(TRITONBACKEND_Request* request) {
    const ServedModel& served = model_.served;
    served.check(request);
    const int64_t num_tokens = served.num_tokens(request);
    ENGRAM_CHECK(num_tokens <= served.max_tokens(), "token_ids: expected at most ",
                 served.max_tokens(), " tokens, which the engine takes, found ", num_tokens);
    if (num_tokens_ + num_tokens > served.max_tokens()) run();
    requests_.push_back(request);
    num_tokens_ += num_tokens;
  }

  //! NOTE: a backend that gives an error has not taken the requests.
  void run() {
    if (requests_.empty()) return;
    TRITONSERVER_Error* const error = model_.backend->execute(
        instance_, requests_.data(), static_cast<uint32_t>(requests_.size()));
    if (error != nullptr) {
      for (TRITONBACKEND_Request* request : requests_) {
        refuse(request, server.error_message(error));
      }
      server.delete_error(error);
    }
    requests_.clear();
    num_tokens_ = 0;
  }

 private:
  const Model& model_;
  TRITONBACKEND_ModelInstance* const instance_;
  std::vector<TRITONBACKEND_Request*> requests_;
  int64_t num_tokens_ = 0;
};

}  // namespace
}  // namespace engram::triton

using engram::triton::ask;
using engram::triton::Backend;
using engram::triton::backends;
using engram::triton::guarded;
using engram::triton::model_of;
using engram::triton::models;
using engram::triton::server;

extern "C" {

ENGRAM_API TRITONSERVER_Error* TRITONBACKEND_Initialize(TRITONBACKEND_Backend* backend) {
  const void* const caller = __builtin_return_address(0);
  return guarded([&] {
    std::call_once(engram::triton::server_is_found, engram::triton::find_server, caller, &server);
    const auto opened = std::make_shared<const Backend>(engram::triton::path_of(backend));
    TRITONSERVER_Error* const error = ask(opened->initialize, backend);
    if (error == nullptr) backends.add(backend, opened);
    return error;
  });
}

ENGRAM_API TRITONSERVER_Error* TRITONBACKEND_Finalize(TRITONBACKEND_Backend* backend) {
  const auto opened = backends.take(backend);
  return opened == nullptr ? nullptr : ask(opened->finalize, backend);
}

ENGRAM_API TRITONSERVER_Error* TRITONBACKEND_GetBackendAttribute(
    TRITONBACKEND_Backend* backend, TRITONBACKEND_BackendAttribute* attribute) {
  const auto opened = backends.find(backend);
  return opened == nullptr ? nullptr : ask(opened->attribute, backend, attribute);
}

ENGRAM_API TRITONSERVER_Error* TRITONBACKEND_ModelInitialize(TRITONBACKEND_Model* model) {
  return guarded([&] {
    TRITONBACKEND_Backend* backend = nullptr;
    engram::triton::check_server(server, server.model_backend(model, &backend));
    const auto opened = backends.find(backend);
    ENGRAM_CHECK(opened != nullptr, "expected a backend that was made, found none");
    models.add(model, std::make_shared<const engram::triton::Model>(opened, server, model));
    return ask(opened->model_initialize, model);
  });
}

//! NOTE: the server calls it of models, too, that could not be initialized.
ENGRAM_API TRITONSERVER_Error* TRITONBACKEND_ModelFinalize(TRITONBACKEND_Model* model) {
  const auto made = models.take(model);
  return made == nullptr ? nullptr : ask(made->backend->model_finalize, model);
}

ENGRAM_API TRITONSERVER_Error* TRITONBACKEND_ModelInstanceInitialize(
    TRITONBACKEND_ModelInstance* instance) {
  return guarded([&] { return ask(model_of(instance)->backend->instance_initialize, instance); });
}

ENGRAM_API TRITONSERVER_Error* TRITONBACKEND_ModelInstanceFinalize(
    TRITONBACKEND_ModelInstance* instance) {
  return guarded([&] { return ask(model_of(instance)->backend->instance_finalize, instance); });
}

ENGRAM_API TRITONSERVER_Error* TRITONBACKEND_ModelInstanceExecute(
    TRITONBACKEND_ModelInstance* instance, TRITONBACKEND_Request** requests, uint32_t count) {
  return guarded([&]() -> TRITONSERVER_Error* {
    const auto model = model_of(instance);
    engram::triton::Batch batch(*model, instance, count);
    for (uint32_t index = 0; index < count; ++index) {
      try {
        batch.add(requests[index]);
      } catch (const std::exception& error) {
        engram::triton::refuse(requests[index], error.what());
      }
    }
    batch.run();
    return nullptr;
  });
}

}  // extern "C"
