// SPDX-License-Identifier: Apache-2.0
//! \file refused_plugin.h
//! What a creator gives for a plan that it cannot take: TensorRT 10.6 ends the process where it
//! gets nothing.
#pragma once

#include <NvInferRuntime.h>

#include <string>

namespace engram::plugins {

//! A plugin that no context takes and nothing runs: whatever is asked of it fails with `reason`.
//! name: of the plugin, for as long as the process lives. Its fields to serialise are those given,
//! without values where they are FP8, of four bits, dimensions or of a type that is not known.
nvinfer1::IPluginV3* make_refused_plugin(const char* name, std::string reason,
                                         const nvinfer1::PluginFieldCollection& fields);

}  // namespace engram::plugins
