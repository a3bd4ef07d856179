// SPDX-License-Identifier: Apache-2.0
//! \file paged_hash.h
//! EngramHash with history kv_phantom: the tokens before a call come from TensorRT-LLM's KV cache.
#pragma once

#include "plugin.h"

namespace engram::plugins {

//! Takes the fields of hash_spec(). Throws where they are wrong.
std::unique_ptr<Op> make_paged_hash(const FieldValues& fields);

}  // namespace engram::plugins
