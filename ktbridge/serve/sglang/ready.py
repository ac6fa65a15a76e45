"""Readiness of a server: what is required, and the progress so far."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from ktbridge.errors import KtbridgeError
from ktbridge.openai_client import OpenAIClient

_LOADED = re.compile(rb"Loaded KT expert LoRA for layer (\d+)\b")


@dataclass(frozen=True)
class Conditions:
    """``layers`` that must have logged their expert LoRA, ``adapters`` that /v1/models must list.

    ``answers`` is false on the nodes after the first of several: those answer /health alone.
    """

    layers: tuple[int, ...]
    adapters: tuple[str, ...]
    answers: bool = True

    def as_dict(self) -> dict[str, Any]:
        return {
            "health": True,
            "expert_lora_layers": list(self.layers),
            "models_listed": list(self.adapters),
        }


@dataclass
class Progress:
    """Startup progress, fed with the server's log, line by line, and with its answers."""

    conditions: Conditions
    loaded: set[int] = field(default_factory=set)
    healthy: bool = False
    listed: set[str] | None = None

    def read(self, line: bytes) -> None:
        """Parse one line of the engine's log."""
        found = _LOADED.search(line)
        if found:
            self.loaded.add(int(found[1]))

    @property
    def missing_layers(self) -> tuple[int, ...]:
        return tuple(layer for layer in self.conditions.layers if layer not in self.loaded)

    @property
    def missing_adapters(self) -> tuple[str, ...]:
        return tuple(name for name in self.conditions.adapters if name not in (self.listed or ()))

    @property
    def answering(self) -> bool:
        """Whether the server answers, be it with what was asked for or without."""
        return self.healthy and (not self.conditions.answers or self.listed is not None)

    @property
    def ready(self) -> bool:
        return self.answering and not self.missing_layers and not self.missing_adapters

    def missing(self) -> str:
        """What is missing, as text."""
        parts = []
        if not self.healthy:
            parts.append("/health does not answer")
        elif not self.answering:
            parts.append("/v1/models does not answer")
        layers = self.missing_layers
        if layers:
            total = len(self.conditions.layers)
            shown = ", ".join(map(str, layers[:8])) + (", ..." if len(layers) > 8 else "")
            parts.append(
                f"{len(layers)} of {total} layers never logged their expert LoRA ({shown})"
            )
        if self.answering and self.missing_adapters:
            parts.append(f"/v1/models does not list {', '.join(self.missing_adapters)}")
        return "; ".join(parts)


def probe(progress: Progress, client: OpenAIClient) -> None:
    """Ask /health and then /v1/models; what doesn't answer leaves ``progress`` as it was."""
    if not progress.healthy:
        progress.healthy = client.is_healthy()
    if progress.healthy and progress.conditions.answers and not progress.ready:
        with suppress(KtbridgeError):
            progress.listed = set(client.models())
