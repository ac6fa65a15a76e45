"""Experts on both: which of them the CPU computes, chosen anew as a run learns where its tokens go.

The choice is made at the start of an optimizer step from the steps before, and then again, at fixed steps.
It goes into checkpoints with all that the next one depends on, so a run that goes on repeats itself.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ktbridge.experts.gpu.cut import Paces, coldest
from ktbridge.experts.gpu.executor import GpuExperts

_OFTEN = 32
"""Steps between choices, once there were some."""


class Hybrid:
    """Chooses the cold experts of ``experts`` by ``paces``; ``cold`` fixes how many of each layer."""

    def __init__(
        self, experts: GpuExperts, paces: Paces, rows: float, cold: int | None = None
    ) -> None:
        """``rows``: of a layer's experts in a pass, for the first choice, which spreads them evenly."""
        self._experts, self._paces, self._cold = experts, paces, cold
        counts = experts.counts
        self._choose({index: [rows / len(each)] * len(each) for index, each in counts.items()})

    @property
    def cold(self) -> int:
        """How many experts of how many layers' the CPU computes now."""
        return sum(map(len, self._experts.cold.values()))

    def begin_step(self, step: int) -> None:
        """Choose again if it is time to; ``step`` optimizer steps have been made."""
        experts = self._experts
        if step == 1:
            experts.watch()  # a step that compiles nothing any more
        if step == 2:
            forward, backward = experts.watched()
            self._paces = replace(
                self._paces,
                forward=replace(self._paces.forward, outside=forward),
                backward=replace(self._paces.backward, outside=backward),
            )
        due = step % _OFTEN == 0 or step & (step - 1) == 0
        if not (step and due and experts.passes):
            return
        passes = experts.passes
        self._choose(
            {index: [n / passes for n in counts] for index, counts in experts.counts.items()}
        )
        # What was counted long ago counts less.
        experts.passes /= 2
        for counts in experts.counts.values():
            counts[:] = [count / 2 for count in counts]

    def state(self) -> dict[str, Any]:
        """For JSON: what makes the next steps the same in a run that goes on."""
        experts = self._experts
        return {
            "cold": {str(index): list(cold) for index, cold in experts.cold.items()},
            "counts": {str(index): counts for index, counts in experts.counts.items()},
            "passes": experts.passes,
            "paces": self._paces.state(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from ``state``."""
        experts = self._experts
        self._paces, experts.passes = Paces.of(state["paces"]), state["passes"]
        for index, counts in state["counts"].items():
            experts.counts[int(index)][:] = counts
        experts.set_cold({int(index): cold for index, cold in state["cold"].items()})

    def _choose(self, counts: dict[int, list[float]]) -> None:
        experts = self._experts
        experts.set_cold(
            {index: coldest(counts[index], self._paces, self._cold) for index in experts.streamed}
        )
