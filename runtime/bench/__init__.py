# SPDX-License-Identifier: Apache-2.0
"""Benchmarks: `trtllm-engram bench NAME`. Results are checked before anything is timed."""

GPU_BENCHES = ("hash", "lookup", "stage", "project", "gate", "layer")  # modules with `cases`
