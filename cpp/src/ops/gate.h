// SPDX-License-Identifier: Apache-2.0
//! \file gate.h
//! The gate's arithmetic for one token and one hyper-connection copy, for CPU and GPU alike.
#pragma once

#include <cmath>

#include "engram/row.h"

namespace engram {

constexpr float kGateClamp = 1e-6f;  //!< smallest |dot| under the root

ENGRAM_HOST_DEVICE float reciprocal_root(float value) {
#if defined(__CUDA_ARCH__)
  return rsqrtf(value);
#else
  return 1.0f / std::sqrt(value);
#endif
}

//! g of out = hidden + g * value, from the FP32 sums over one copy's hidden_size elements:
//! dot = sum(h*q*k*key), hidden_square_sum = sum(h*h), key_square_sum = sum(key*key). A NaN stays
//! one.
ENGRAM_HOST_DEVICE float gate_value(float dot, float hidden_square_sum, float key_square_sum,
                                    int hidden_size, float eps) {
  const float size = static_cast<float>(hidden_size);
  const float scaled = dot * reciprocal_root(hidden_square_sum / size + eps) *
                       reciprocal_root(key_square_sum / size + eps) * reciprocal_root(size);
  const float magnitude = std::fabs(scaled);
  const float root = std::sqrt(magnitude < kGateClamp ? kGateClamp : magnitude);
  return 1.0f / (1.0f + std::exp(scaled < 0.0f ? root : -root));
}

}  // namespace engram
