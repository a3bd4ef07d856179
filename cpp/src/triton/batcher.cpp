// SPDX-License-Identifier: Apache-2.0
// A batching strategy of Triton Inference Server, which finds it as batchstrategy.so in a model's
// folder. It says what is joined to a batch: at most as many tokens as the model's parameter
// max_tokens, and no request that would fail, or whose ids a GPU would find bad once its answer is
// out. Such a request is cancelled, which is the only error that a batching strategy can give. The
// server asks it before it makes instances: it binds the tables that the parameter `tables` names,
// for their error is the model's here (TensorRT 10.6 makes contexts without them), and unbinds them
// when the model goes.
#include <exception>
#include <memory>
#include <new>
#include <string>

#include "engram/error.h"
#include "table/log.h"
#include "triton/served_model.h"
#include "triton/server.h"

namespace engram::triton {
namespace {

using SharedModel = std::shared_ptr<const ServedModel>;

struct Batch {
  //! NOTE: the server never ends a model's last batch, and ends its batcher before.
  std::weak_ptr<const ServedModel> model;
  int64_t num_tokens = 0;
  bool is_empty = true;
};

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
  ENGRAM_CHECK(is_cancelled, "expected a server that cancels, found none");
}

//! NOTE: a batch's first request is never left out, however large: the server would ask again for
//! ever. The backend refuses it, alone. A cancelled one does not come again.
bool may_join(TRITONBACKEND_Request* request, const ServedModel& model, Batch* batch) {
  const int64_t num_tokens = batch->num_tokens + model.num_tokens(request);
  try {
    model.check(request);
  } catch (const Error& error) {
    cancel(model.server(), request, error);
    return false;
  }
  if (!batch->is_empty && num_tokens > model.max_tokens()) return false;
  batch->num_tokens = num_tokens;
  batch->is_empty = false;
  return true;
}

}  // namespace
}  // namespace engram::triton

using engram::triton::Batch;
using engram::triton::ServedModel;
using engram::triton::Server;
using engram::triton::SharedModel;

extern "C" {

ENGRAM_API TRITONSERVER_Error* TRITONBACKEND_ModelBatcherInitialize(TRITONBACKEND_Batcher** made,
                                                                    TRITONBACKEND_Model* model) {
  *made = nullptr;
  Server server{};
  try {
    engram::triton::find_server(__builtin_return_address(0), &server);
    // NOTE: the model apart from what batches count by, which outlives it.
    const std::shared_ptr<const ServedModel> served(new ServedModel(server, model));
    *made = reinterpret_cast<TRITONBACKEND_Batcher*>(new SharedModel(served));
  } catch (const std::exception& error) {
    if (server.new_error != nullptr) {
      return server.new_error(engram::triton::kInvalidArgument, error.what());
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
  delete reinterpret_cast<SharedModel*>(batcher);
  return nullptr;
}

ENGRAM_API TRITONSERVER_Error* TRITONBACKEND_ModelBatchInitialize(
    const TRITONBACKEND_Batcher* batcher, void** batch) {
  const auto* const known = reinterpret_cast<const SharedModel*>(batcher);
  *batch = known == nullptr ? nullptr : new (std::nothrow) Batch{.model = *known};
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
  const SharedModel model = batch == nullptr ? nullptr : batch->model.lock();
  if (model == nullptr) return nullptr;
  try {
    *should_include = engram::triton::may_join(request, *model, batch);
  } catch (const std::exception& error) {
    return model->server().new_error(engram::triton::kInvalidArgument, error.what());
  }
  return nullptr;
}

}  // extern "C"
