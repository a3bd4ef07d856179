// SPDX-License-Identifier: Apache-2.0
//! \file cases.h
//! One right set of fields for each plugin.
#pragma once

#include "harness.h"

namespace harness {

inline const std::map<std::string, Fields>& right_fields() {
  static const std::map<std::string, Fields> all{
      {"EngramHash", {{"pad_token_id", 2}, {"history", std::string("explicit")}}},
      {"EngramLookup",
       {{"table", std::string("engram.1")},
        {"fingerprint", std::string(64, 'a')},
        {"layer", 1},
        {"layer_idx", 1},
        {"head_dim", 256}}},
      {"EngramPrefetch",
       {{"table", std::string("engram.1")},
        {"fingerprint", std::string(64, 'a')},
        {"layer", 1},
        {"layer_idx", 1},
        {"head_dim", 256}}},
      {"EngramProject", {{"weight_layout", std::string("row_major")}}},
      {"EngramGate", {{"eps", 1e-6F}}},
  };
  return all;
}

//! Those fields with some replaced.
inline Fields fields_of(const std::string& plugin, const Fields& changes = {}) {
  Fields fields = changes;
  fields.insert(right_fields().at(plugin).begin(), right_fields().at(plugin).end());
  return fields;
}

}  // namespace harness
