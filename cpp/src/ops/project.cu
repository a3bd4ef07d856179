// SPDX-License-Identifier: Apache-2.0
// engram_project on a GPU: which kernel runs. All of them add an output's products in the same
// order, 16 inner values at a time from the first on, in FP32, and round once: a token's result
// depends neither on the kernel nor on the tokens beside it.
#include <cstdint>

#include "check.h"
#include "engram/ops.h"
#include "launch.cuh"
#include "project_kernels.h"

namespace engram {
namespace {

struct Kernel {
  engram_project_kernel id;
  int64_t most_tokens;  //!< for which it is chosen
  cudaError_t (*launch)(const engram_project_args&, int num_blocks, cudaStream_t);
  bool is_wide = false;  //!< chosen where its outputs fill the GPU
};

constexpr Kernel kGeneric[] = {{ENGRAM_PROJECT_GENERIC, INT64_MAX, project_generic}};
// From 257 to 384 tokens two tiles of 192 or three of 128 take less time than two of 256.
constexpr Kernel kSm90[] = {{ENGRAM_PROJECT_SM90_16, 16, project_sm90_16},
                            {ENGRAM_PROJECT_SM90_32, 32, project_sm90_32},
                            {ENGRAM_PROJECT_SM90_64, 64, project_sm90_64},
                            {ENGRAM_PROJECT_SM90_128, 128, project_sm90_128},
                            {ENGRAM_PROJECT_SM90_WIDE_192, 192, project_sm90_wide_192, true},
                            {ENGRAM_PROJECT_SM90_WIDE_256, 256, project_sm90_wide_256, true},
                            {ENGRAM_PROJECT_SM90_256, 256, project_sm90_256},
                            {ENGRAM_PROJECT_SM90_WIDE_192, 384, project_sm90_wide_192, true},
                            {ENGRAM_PROJECT_SM90_128, 384, project_sm90_128},
                            {ENGRAM_PROJECT_SM90_256, INT64_MAX, project_sm90_256}};

//! Whether blocks of 192 outputs come to whole rounds, but for a few outputs or an eighth of one.
bool fills_wide_rounds(int64_t out_features, int num_blocks) {
  const int64_t round = int64_t{num_blocks} / 2 * 2 * 192;
  const int64_t num_left = out_features % round;
  return num_left >= round / 8 * 7 || (out_features >= round && num_left <= 512);
}

//! What the copy engine asks for, and 16-byte writes of outputs.
bool fits_sm90(const engram_project_args& args) {
  return is_aligned(16, args.x, args.weight, args.out) && args.out_features % 8 == 0;
}

void check_gpu_has_sm90(const engram_project_args& args, int major, int minor) {
  ENGRAM_CHECK(major == 9 && minor == 0,
               "weight_layout sm90_v1: expected a GPU of compute "
               "capability 9.0, found ",
               major, ".", minor);
  ENGRAM_CHECK(
      project_sm90_is_built(),
      "weight_layout sm90_v1: expected a library built for architecture 90a, found another");
  ENGRAM_CHECK(args.kernel != ENGRAM_PROJECT_GENERIC,
               "kernel: expected one of those of sm90 for weight_layout sm90_v1, found generic");
  check_aligned(args.out, "out", 16);
}

//! The first of a list that is wanted; null if none is.
template <int kKernels>
const Kernel* find(const Kernel (&kernels)[kKernels], const engram_project_args& args,
                   int num_blocks) {
  const bool wide = fills_wide_rounds(args.out_features, num_blocks);
  for (const Kernel& kernel : kernels) {
    const bool is_chosen = args.num_tokens <= kernel.most_tokens && (wide || !kernel.is_wide);
    if (args.kernel == ENGRAM_PROJECT_AUTO ? is_chosen : args.kernel == kernel.id) return &kernel;
  }
  return nullptr;
}

}  // namespace

cudaError_t project_cuda(const engram_project_args& args, cudaStream_t stream) {
  if (args.num_tokens == 0) return cudaSuccess;
  int device = 0, major = 0, minor = 0, num_blocks = 0;
  for (const cudaError_t code :
       {cudaGetDevice(&device),
        cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device),
        cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device),
        cudaDeviceGetAttribute(&num_blocks, cudaDevAttrMultiProcessorCount, device)}) {
    if (code != cudaSuccess) return code;
  }
  if (args.weight_layout == ENGRAM_WEIGHT_SM90_V1) check_gpu_has_sm90(args, major, minor);
  const Kernel* kernel = nullptr;
  if (major == 9 && minor == 0 && num_blocks > 1 && fits_sm90(args) && project_sm90_is_built()) {
    kernel = find(kSm90, args, num_blocks);
  }
  if (kernel == nullptr) kernel = find(kGeneric, args, num_blocks);
  return kernel == nullptr ? cudaErrorNotSupported : kernel->launch(args, num_blocks, stream);
}

}  // namespace engram
