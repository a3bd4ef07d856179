# SPDX-License-Identifier: Apache-2.0
"""Engram as a model of Triton's Python backend (builder.triton has its inputs and outputs)."""
