// SPDX-License-Identifier: Apache-2.0
#include "triton/server.h"

#include <dlfcn.h>

#include <string>

#include "engram/error.h"

namespace engram::triton {
namespace {

template <typename Function>
void find(void* library, const char* name, Function** function) {
  *function = reinterpret_cast<Function*>(dlsym(library, name));
  ENGRAM_CHECK(*function != nullptr, "expected a server with ", name, ", found none");
}

}  // namespace

void find_server(const void* caller, Server* server) {
  Dl_info info{};
  dladdr(caller, &info);
  void* const library = dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
  ENGRAM_CHECK(library != nullptr, "expected to be called by a server's library");
  find(library, "TRITONSERVER_ErrorNew", &server->new_error);
  find(library, "TRITONSERVER_ErrorMessage", &server->error_message);
  find(library, "TRITONSERVER_ErrorDelete", &server->delete_error);
  find(library, "TRITONSERVER_LogMessage", &server->log);
  find(library, "TRITONSERVER_MessageSerializeToJson", &server->message_json);
  find(library, "TRITONSERVER_MessageDelete", &server->delete_message);
  find(library, "TRITONBACKEND_BackendName", &server->backend_name);
  find(library, "TRITONBACKEND_BackendConfig", &server->backend_config);
  find(library, "TRITONBACKEND_ModelBackend", &server->model_backend);
  find(library, "TRITONBACKEND_ModelConfig", &server->model_config);
  find(library, "TRITONBACKEND_ModelInstanceModel", &server->instance_model);
  find(library, "TRITONBACKEND_RequestInput", &server->request_input);
  find(library, "TRITONBACKEND_InputProperties", &server->input_properties);
  find(library, "TRITONBACKEND_InputBuffer", &server->input_buffer);
  find(library, "TRITONBACKEND_RequestId", &server->request_id);
  find(library, "TRITONSERVER_InferenceRequestCancel", &server->cancel);
  find(library, "TRITONBACKEND_RequestIsCancelled", &server->is_cancelled);
  find(library, "TRITONBACKEND_ResponseNew", &server->new_response);
  find(library, "TRITONBACKEND_ResponseSend", &server->send_response);
  find(library, "TRITONBACKEND_RequestRelease", &server->release);
}

void check_server(const Server& server, TRITONSERVER_Error* error) {
  if (error == nullptr) return;
  const std::string text = server.error_message(error);
  server.delete_error(error);
  throw Error(ENGRAM_INVALID_ARGUMENT, text);
}

std::string read_json(const Server& server, TRITONSERVER_Message* message) {
  const char* text = nullptr;
  size_t size = 0;
  check_server(server, server.message_json(message, &text, &size));
  return std::string(text, size);
}

}  // namespace engram::triton
