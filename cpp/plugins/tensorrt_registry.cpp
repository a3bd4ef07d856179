// SPDX-License-Identifier: Apache-2.0
#include "tensorrt_registry.h"

#include <algorithm>

#include "log.h"

namespace engram::plugins {

using Creator = nvinfer1::IPluginCreatorInterface;

// TensorRT 11 dropped the V2 generation's methods from the front of IPluginRegistry, which moved
// all others. A library that serves both cannot call through either's header, so here are both
// tables of methods, as far as they are called.
// NOTE: not in an anonymous namespace, where a compiler may conclude that nobody implements them.

class Registry10 {
 public:
  virtual void register_v1_creator() = 0;
  virtual void v1_creator_list() = 0;
  virtual void v1_creator() = 0;

 protected:
  virtual ~Registry10() = default;

 public:
  virtual void set_error_recorder() = 0;
  virtual void error_recorder() = 0;
  virtual void deregister_v1_creator() = 0;
  virtual void is_parent_search_enabled() = 0;
  virtual void set_parent_search_enabled() = 0;
  virtual void load_library() = 0;
  virtual void deregister_library() = 0;
  virtual bool register_creator(Creator& creator, const char* plugin_namespace) noexcept = 0;
  virtual Creator* const* all_creators(int32_t* num_creators) const noexcept = 0;
};

class Registry11 {
 protected:
  virtual ~Registry11() = default;

 public:
  virtual void set_error_recorder() = 0;
  virtual void error_recorder() = 0;
  virtual void is_parent_search_enabled() = 0;
  virtual void set_parent_search_enabled() = 0;
  virtual void load_library() = 0;
  virtual void deregister_library() = 0;
  virtual bool register_creator(Creator& creator, const char* plugin_namespace) noexcept = 0;
  virtual Creator* const* all_creators(int32_t* num_creators) const noexcept = 0;
};

namespace {

constexpr int kFirstUnknownVersion = 120000;

template <typename Registry>
bool register_missing(void* opaque, const std::vector<Creator*>& creators) {
  auto* const registry = static_cast<Registry*>(opaque);
  int32_t num_present = 0;
  Creator* const* const first = registry->all_creators(&num_present);
  const std::vector<Creator*> present(first, first + num_present);
  bool complete = true;
  for (Creator* const creator : creators) {
    if (std::find(present.begin(), present.end(), creator) != present.end()) continue;
    complete = registry->register_creator(*creator, "") && complete;
  }
  return complete;
}

}  // namespace

bool register_with_tensorrt(const std::vector<Creator*>& creators) {
  const int version = tensorrt_version();
  // NOTE: an unknown major may have moved the methods again; its load_library still works.
  if (version == 0 || version >= kFirstUnknownVersion) return false;
  using GetRegistry = void* (*)() noexcept;
  const auto get_registry = reinterpret_cast<GetRegistry>(tensorrt_symbol("getPluginRegistry"));
  void* const registry = get_registry == nullptr ? nullptr : get_registry();
  if (registry == nullptr) return false;
  return version < kFirstVersion11 ? register_missing<Registry10>(registry, creators)
                                   : register_missing<Registry11>(registry, creators);
}

}  // namespace engram::plugins
