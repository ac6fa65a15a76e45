"""Experts on both: which of them the CPU computes, chosen anew as a run learns where its tokens go.

The choice is made after an optimizer step, from it and those before, and again at fixed steps. Early in a
run one step goes without the CPU: where that is no slower, the CPU is left out from then on.
The choice goes into checkpoints with all that the next one depends on, so a run that goes on repeats itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from time import perf_counter
from typing import Any

from ktbridge.experts.expert_call import kernel_seconds
from ktbridge.experts.gpu.cut import Paces, cold_seconds, coldest
from ktbridge.experts.gpu.executor import GpuExperts

_OFTEN = 32
"""Steps between choices, once there were some."""
_WATCHED = 3
"""The step by whose times the paces are corrected: nothing is compiled or allocated any more."""
_ALONE = _WATCHED + 1
"""The step without the CPU, after which the one with it is timed."""


class Hybrid:
    """Chooses the cold experts of ``experts`` by ``paces``; ``cold`` fixes how many of each layer."""

    def __init__(
        self, experts: GpuExperts, paces: Paces, rows: float, cold: int | None = None
    ) -> None:
        """``rows``: of a layer's experts in a pass, for the first choice, which spreads them evenly."""
        self._experts, self._paces, self._cold = experts, paces, cold
        self._before: dict[int, list[float]] = {}
        self._passes = self._kernels = 0.0
        self._began = 0.0
        self._alone: float | None = None
        """Seconds of the step without the CPU."""
        self._left_out = False
        counts = experts.counts
        self._choose({index: [rows / len(each)] * len(each) for index, each in counts.items()})

    @property
    def cold(self) -> int:
        """How many experts of how many layers' the CPU computes now."""
        return sum(map(len, self._experts.cold.values()))

    def end_step(self, step: int) -> None:
        """Choose for the steps to come, if it is time to; ``step`` optimizer steps have been made."""
        experts, took = self._experts, perf_counter() - self._began
        if step == _WATCHED and self._before:
            self._learn(self._before)
            self._before = {}
        if step == _ALONE:
            self._alone = took
        elif step == _ALONE + 1 and self._alone is not None and took >= self._alone:
            self._left_out = True
            self._choose({})
        due = step % _OFTEN == 0 or step & (step - 1) == 0 or step == _WATCHED
        if due and experts.passes and not self._left_out:
            passes = experts.passes
            self._choose(
                {index: [n / passes for n in counts] for index, counts in experts.counts.items()}
            )
            # What was counted long ago counts less.
            experts.passes /= 2
            for counts in experts.counts.values():
                counts[:] = [count / 2 for count in counts]
        if step == _WATCHED - 1:
            self._watch({index: list(counts) for index, counts in experts.counts.items()})
        if step == _WATCHED and self._cold is None:
            experts.set_cold({})
        self._began = perf_counter()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """What is computed within the block belongs to no step: it decides nothing."""
        began, kernels = perf_counter(), kernel_seconds()
        with self._experts.between.paused():
            yield
        self._began += perf_counter() - began
        self._kernels += kernel_seconds() - kernels

    def _watch(self, counts: dict[int, list[float]]) -> None:
        self._before, self._passes = counts, self._experts.passes
        self._kernels = kernel_seconds()
        self._experts.between.watch()

    def _learn(self, before: Mapping[int, Sequence[float]]) -> None:
        """Correct the paces by the step that was watched."""
        experts, paces = self._experts, self._paces
        outside = [experts.between.seconds(name) for name in ("forward", "backward")]
        experts.between.end()
        passes = max(1.0, experts.passes - self._passes)
        predicted = 0.0
        for index, cold in experts.cold.items():
            rows = [experts.counts[index][each] - before[index][each] for each in cold]
            predicted += passes * cold_seconds([each / passes for each in rows], paces)
        slower = (kernel_seconds() - self._kernels) / predicted if predicted else 1.0
        self._paces = replace(
            paces,
            forward=paces.forward.corrected(slower, outside[0]),
            backward=paces.backward.corrected(slower, outside[1]),
        )

    def state(self) -> dict[str, Any]:
        """For JSON: what makes the next steps the same in a run that goes on."""
        experts = self._experts
        return {
            "cold": {str(index): list(cold) for index, cold in experts.cold.items()},
            "counts": {str(index): list(counts) for index, counts in experts.counts.items()},
            "passes": experts.passes,
            "paces": self._paces.state(),
            "watched": {str(index): counts for index, counts in self._before.items()},
            "alone": self._alone,
            "left_out": self._left_out,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from ``state``."""
        experts = self._experts
        self._paces, experts.passes = Paces.of(state["paces"]), state["passes"]
        for index, counts in state["counts"].items():
            experts.counts[int(index)][:] = counts
        experts.set_cold({int(index): cold for index, cold in state["cold"].items()})
        self._alone, self._left_out = state["alone"], state["left_out"]
        self._began = perf_counter()
        if state["watched"]:
            self._watch({int(index): counts for index, counts in state["watched"].items()})

    def _choose(self, counts: dict[int, list[float]]) -> None:
        experts = self._experts
        experts.set_cold(
            {
                index: coldest(counts[index], self._paces, self._cold)
                for index in experts.streamed
                if not self._left_out
            }
        )
