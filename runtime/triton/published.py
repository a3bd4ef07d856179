# SPDX-License-Identifier: Apache-2.0
"""Metrics as Triton's own: on its metrics port, beside its counters of requests."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

from ..metrics import COUNTER, FAMILIES, Labels, Metrics

_TABLES_SECONDS = 1.0  # a look at tables waits for their GPU's counts
_logger = logging.getLogger("trtllm_engram")


class Published:
    """Brings a Metrics' values to the server.

    Args:
        pb: triton_python_backend_utils.
        labels: what tells this instance's values from the others'.
        describe: Tables.describe, where tables count on after they are bound.
    """

    def __init__(
        self,
        pb: Any,
        metrics: Metrics,
        labels: Mapping[str, str],
        describe: Callable[[], Mapping[str, Any]] | None = None,
    ) -> None:
        self._metrics = metrics
        self._describe = describe
        self._described_at = -math.inf
        self._has_failed = False
        self._labels = dict(labels)
        self._kinds = {name: kind for name, (kind, _) in FAMILIES.items()}
        self._families = {
            name: pb.MetricFamily(
                name=name,
                description=about,
                kind=pb.MetricFamily.COUNTER if kind == COUNTER else pb.MetricFamily.GAUGE,
            )
            for name, (kind, about) in FAMILIES.items()
        }
        self._published: dict[tuple[str, Labels], tuple[Any, float]] = {}
        self._bring()

    def update(self) -> None:
        """Brings what has changed; what tables count, once a second at most. Raises nothing, for
        the answers of a batch are made by then: the first error is logged."""
        try:
            self._note_tables()
            self._bring()
        except Exception as error:
            if not self._has_failed:
                _logger.warning("metrics: %s", error)
            self._has_failed = True

    def _note_tables(self) -> None:
        now = time.monotonic()
        if self._describe is not None and now - self._described_at >= _TABLES_SECONDS:
            self._described_at = now
            self._metrics.note_tables(self._describe())

    def _bring(self) -> None:
        for one in self._metrics.samples():
            key = (one.name, one.labels)
            metric, before = self._published.get(key, (None, 0.0))
            if metric is None:
                metric = self._families[one.name].Metric(
                    labels={**self._labels, **dict(one.labels)}
                )
            elif one.value == before:
                continue
            if self._kinds[one.name] == COUNTER:
                metric.increment(one.value - before)
            else:
                metric.set(one.value)
            self._published[key] = (metric, one.value)
