# SPDX-License-Identifier: Apache-2.0
"""`python -m trtllm_engram.runtime.cli`."""

import sys

from . import main

sys.exit(main())
