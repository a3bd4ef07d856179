/* SPDX-License-Identifier: Apache-2.0 */
/* The C ABI's header compiles as C. */
#include "engram/engram.h"

int32_t abi_version_in_c(void);

int32_t abi_version_in_c(void) { return ENGRAM_ABI_VERSION; }
