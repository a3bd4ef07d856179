// SPDX-License-Identifier: Apache-2.0
//! \file tensorrt_registry.h
//! The plugin registry of the TensorRT in this process, whatever its version and that of the
//! headers.
#pragma once

#include <NvInferRuntime.h>

#include <vector>

namespace engram::plugins {

//! Registers those of the creators that the registry does not have. False where no TensorRT is
//! loaded, or where it refuses.
bool register_with_tensorrt(const std::vector<nvinfer1::IPluginCreatorInterface*>& creators);

}  // namespace engram::plugins
