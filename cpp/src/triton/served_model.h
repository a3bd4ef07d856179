// SPDX-License-Identifier: Apache-2.0
// A model of Triton Inference Server that an engine serves: its parameters, its tables, and what it
// may be asked.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "triton/server.h"

namespace engram::triton {

//! Has the tables that the model's parameter `tables` names bound while it lives.
class ServedModel {
 public:
  //! Throws Error where a parameter is no number, or a table is not there.
  ServedModel(const Server& server, TRITONBACKEND_Model* model);
  ServedModel(const ServedModel&) = delete;
  ServedModel& operator=(const ServedModel&) = delete;
  ~ServedModel();

  //! The number of a request's tokens. Throws Error where the server does not tell it.
  int64_t num_tokens(TRITONBACKEND_Request* request) const;
  //! Throws Error where the request would spoil those beside it, or the step after it. NOTE: ids in
  //! a GPU's memory are not looked at.
  void check(TRITONBACKEND_Request* request) const;

  const Server& server() const { return server_; }
  int64_t max_tokens() const { return max_tokens_; }  //!< of what runs at a time

 private:
  Server server_;
  int64_t max_tokens_ = 0;
  int64_t vocab_size_ = 0;
  bool takes_lookback_ = false;      //!< else the server has it from the step before
  std::vector<std::string> ragged_;  //!< inputs [1, tokens, ...]
  std::vector<std::string> tables_;
};

}  // namespace engram::triton
