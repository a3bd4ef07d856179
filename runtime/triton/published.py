# SPDX-License-Identifier: Apache-2.0
"""Metrics as Triton's own: on its metrics port, beside its counters of requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..metrics import COUNTER, FAMILIES, Labels, Metrics


class Published:
    """Brings a Metrics' values to the server.

    Args:
        pb: triton_python_backend_utils.
        labels: what tells this instance's values from the others'.
    """

    def __init__(self, pb: Any, metrics: Metrics, labels: Mapping[str, str]) -> None:
        self._metrics = metrics
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
        self.update()

    def update(self) -> None:
        """Brings what has changed."""
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
