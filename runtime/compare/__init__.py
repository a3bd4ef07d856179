# SPDX-License-Identifier: Apache-2.0
"""Engines held against the reference: `trtllm-engram compare`, and parts for polygraphy."""

from .feeds import Feed, make_feeds
from .reference import Reference
from .report import Comparison, compare

__all__ = ["Comparison", "Feed", "Reference", "compare", "make_feeds"]
