// SPDX-License-Identifier: Apache-2.0
// What is called of Triton Inference Server, as its tritonbackend.h and tritonserver.h have it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

extern "C" {

struct TRITONBACKEND_Backend;
struct TRITONBACKEND_BackendAttribute;
struct TRITONBACKEND_Batcher;
struct TRITONBACKEND_Input;
struct TRITONBACKEND_Model;
struct TRITONBACKEND_ModelInstance;
struct TRITONBACKEND_Request;
struct TRITONBACKEND_Response;
struct TRITONSERVER_Error;
struct TRITONSERVER_InferenceRequest;
struct TRITONSERVER_Message;
}

namespace engram::triton {

constexpr int kInvalidArgument = 3;
constexpr int kWarning = 1;
constexpr int kCpu = 0;
constexpr int kGpu = 2;
constexpr uint32_t kFinal = 1;
constexpr uint32_t kAll = 1;

//! It is found in the library that called us, which any program may have loaded in any way: hosts
//! of TensorRT alone have none to link.
struct Server {
  TRITONSERVER_Error* (*new_error)(int code, const char* message);
  const char* (*error_message)(TRITONSERVER_Error*);
  void (*delete_error)(TRITONSERVER_Error*);
  TRITONSERVER_Error* (*log)(int level, const char* file, int line, const char* message);
  TRITONSERVER_Error* (*message_json)(TRITONSERVER_Message*, const char** text, size_t* size);
  TRITONSERVER_Error* (*delete_message)(TRITONSERVER_Message*);
  TRITONSERVER_Error* (*backend_name)(TRITONBACKEND_Backend*, const char** name);
  TRITONSERVER_Error* (*backend_config)(TRITONBACKEND_Backend*, TRITONSERVER_Message** json);
  TRITONSERVER_Error* (*model_backend)(TRITONBACKEND_Model*, TRITONBACKEND_Backend**);
  TRITONSERVER_Error* (*model_config)(TRITONBACKEND_Model*, uint32_t version,
                                      TRITONSERVER_Message** json);
  TRITONSERVER_Error* (*instance_model)(TRITONBACKEND_ModelInstance*, TRITONBACKEND_Model**);
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
  TRITONSERVER_Error* (*new_response)(TRITONBACKEND_Response**, TRITONBACKEND_Request*);
  TRITONSERVER_Error* (*send_response)(TRITONBACKEND_Response*, uint32_t flags,
                                       TRITONSERVER_Error*);
  TRITONSERVER_Error* (*release)(TRITONBACKEND_Request*, uint32_t flags);
};

//! `caller`: an address in the server. Throws Error, with new_error found where it has that.
void find_server(const void* caller, Server* server);

//! Throws Error with the text of the server's, which it takes, where that is not null.
void check_server(const Server& server, TRITONSERVER_Error* error);

//! What the server says of a model, whose message is the caller's to delete, or of a backend, whose
//! message is the server's.
std::string read_json(const Server& server, TRITONSERVER_Message* message);

}  // namespace engram::triton
