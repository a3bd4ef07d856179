// SPDX-License-Identifier: Apache-2.0
//! \file plugin.h
//! The TensorRT V3 interfaces, implemented once. A plugin is an Op: fields and tensors it declares,
//! sizes it checks, and work it enqueues; everything that TensorRT calls goes through Plugin, which
//! logs what an Op throws and returns a code.
#pragma once

#include <NvInferRuntime.h>
#include <cuda_runtime_api.h>

#include <memory>
#include <string>
#include <vector>

#include "engram/error.h"
#include "fields.h"
#include "tensors.h"

namespace engram::plugins {

//! One enqueue: pointers follow the Op's inputs() and outputs().
struct Call {
  Sizes sizes;
  const nvinfer1::PluginTensorDesc* input_descs;
  const void* const* inputs;
  void* const* outputs;
  uint64_t* fault;  //!< the device's fault word; null while building, where junk ids are no fault
  void*
      workspace;  //!< of the Op's workspace_bytes; this enqueue's until its work on stream is done
  cudaStream_t stream;
};

//! Where a plugin is about to work.
struct Attachment {
  const nvinfer1::IPluginResourceContext* context;  //!< one per execution context
  int device;
  bool building;  //!< created in TensorRTPhase::kBUILD: tables are left alone
};

class Op {
 public:
  virtual ~Op() = default;
  const TensorSpecs& inputs() const { return inputs_; }
  const TensorSpecs& outputs() const { return outputs_; }

  //! Refuses sizes that do not fit together; those not known yet are kUnknownSize.
  virtual void check(const Sizes& sizes) const = 0;
  //! Adds the letters that only outputs have.
  virtual void derive(SizeExprs*, nvinfer1::IExprBuilder&) const {}
  //! Input that output 0 may overwrite in place, or -1.
  virtual int aliased_input() const { return -1; }
  //! True where there is nothing to write; pointers may then be null.
  virtual bool is_empty(const Sizes& sizes) const { return sizes['T'] == 0; }
  //! GPU memory that an enqueue takes beside its tensors; no less for more tokens.
  virtual int64_t workspace_bytes(const Sizes&) const { return 0; }
  //! True for the first plugin of a step, whose enqueue fails with the fault that an earlier step
  //! left. No other may look: this step's own hash may set the word while its step is still being
  //! enqueued, and an error between an EngramPrefetch and the EngramLookup that waits leaves the
  //! side stream writing memory that the next step uses.
  virtual bool starts_step() const { return false; }
  //! Binds to an execution context; called at most once, before any enqueue.
  virtual void attach(const Attachment&) {}
  //! Capturable; allocates nothing, waits for nothing, reads no tensor on the host.
  virtual cudaError_t enqueue(const Call& call) const = 0;

 protected:
  //! Both return the position that the tensor gets.
  int add_input(TensorSpec spec) {
    inputs_.push_back(std::move(spec));
    return static_cast<int>(inputs_.size()) - 1;
  }
  int add_output(TensorSpec spec) {
    outputs_.push_back(std::move(spec));
    return static_cast<int>(outputs_.size()) - 1;
  }

 private:
  TensorSpecs inputs_;
  TensorSpecs outputs_;
};

//! What a creator needs to know of a plugin.
struct OpSpec {
  const char* name;
  const char* doc;
  FieldSpecs fields;
  std::unique_ptr<Op> (*make)(const FieldValues& values);
};

constexpr const char* kPluginVersion = "1";
constexpr const char* kPluginNamespace = "";

//! The field that every plugin has.
FieldSpec format_version_field();

//! All plugins of this library, each defined in its <op>_plugin.cpp.
const OpSpec& hash_spec();
const OpSpec& lookup_spec();
const OpSpec& prefetch_spec();
const OpSpec& project_spec();
const OpSpec& gate_spec();

//! A plugin of `spec` from a creator's fields; throws where they are wrong.
nvinfer1::IPluginV3* make_plugin(const OpSpec& spec, const nvinfer1::PluginFieldCollection& fields,
                                 nvinfer1::TensorRTPhase phase);

}  // namespace engram::plugins
