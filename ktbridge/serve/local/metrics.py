"""Prometheus metrics: a separate registry for each server."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4 as CONTENT_TYPE

SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)

__all__ = ["CONTENT_TYPE", "Metrics"]


class Metrics:
    """Counters of one server. Model labels are its arms' names only, never what a client sent."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        own: dict[str, Any] = {"registry": self._registry, "namespace": "ktbridge"}
        self._requests = Counter(
            "requests", "Requests that ended, by how.", ("model", "outcome"), **own
        )
        self._prompt = Counter("prompt_tokens", "Tokens of prompts computed.", ("model",), **own)
        self._generated = Counter("generated_tokens", "Tokens chosen.", **own)
        self._first = Histogram(
            "first_token_seconds", "From asking to the first event.", buckets=SECONDS, **own
        )
        self._whole = Histogram(
            "request_seconds",
            "From asking to the end, of finished requests.",
            buckets=SECONDS,
            **own,
        )
        self._waiting = Gauge("waiting_prompts", "Prompts that wait for their turn.", **own)
        self._running = Gauge("running_answers", "Answers computed together now.", **own)

    def watch(self, waiting: Callable[[], int], running: Callable[[], int]) -> None:
        self._waiting.set_function(waiting)
        self._running.set_function(running)

    def prompted(self, model: str, tokens: int) -> None:
        self._prompt.labels(model).inc(tokens)

    def chosen(self, tokens: int) -> None:
        self._generated.inc(tokens)

    def ended(
        self, model: str, outcome: str, first: float | None = None, whole: float | None = None
    ) -> None:
        """``outcome``: finished, cancelled, failed or rejected; the others are seconds, if known."""
        self._requests.labels(model, outcome).inc()
        if first is not None:
            self._first.observe(first)
        if whole is not None:
            self._whole.observe(whole)

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry)
