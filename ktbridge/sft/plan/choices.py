"""Compare the devices that may compute the experts: GPU memory and pace of each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ktbridge.errors import UsageError
from ktbridge.experts.gpu.share import Outside
from ktbridge.sft.plan.memory import Setting, predict
from ktbridge.sft.plan.modes import obstacle, possible, refuse_on_gpu, with_tokens
from ktbridge.sft.plan.parts import Experts, Pace, total
from ktbridge.sft.plan.target import Target


@dataclass(frozen=True)
class Choice:
    """``setting`` is None if the mode is unavailable, for the reason in ``why``."""

    name: str
    setting: Setting | None
    pace: Pace | None = None
    why: str = ""

    def described(self, taken: Setting) -> Experts:
        """For the plan, which is made for ``taken``."""
        made = self.setting
        return Experts(
            name=self.name,
            chosen=made is not None and made == taken,
            gpu=total(predict(made), "GPU") if made else None,
            tokens_per_pass=made.batch.tokens if made else None,
            tokens_per_second=self.pace.tokens_per_second if self.pace else None,
            why=self.why,
        )


def compare(setting: Setting, target: Target, measure: bool) -> tuple[Choice, ...]:
    """The CPU's kernels and, if ``kt_experts`` allows it, the GPU; timed here if ``measure``.

    Raises ``UsageError`` if the GPU is requested and unavailable.
    """
    config = setting.config
    closed = obstacle(config, setting.cuda)
    refuse_on_gpu(config, closed)
    if closed or config.kt_config.kt_experts == "cpu":
        tokens = config.tokens_per_pass
        made = setting if tokens == "auto" else with_tokens(setting, int(tokens))
        found: list[tuple[str, Setting | str]] = [("cpu", made)]
    else:
        assert target.gpu_memory is not None
        found = list(possible(setting, target.gpu_memory, target.memory))
    choices = [
        Choice(name, None, why=made) if isinstance(made, str) else Choice(name, made)
        for name, made in found
    ]
    return tuple(_timed(choices, target.memory)) if measure else tuple(choices)


def _timed(choices: Sequence[Choice], memory: int | None) -> Iterator[Choice]:
    """The choices with their pace on this machine, whose ``memory`` may be used for it."""
    from ktbridge.sft.plan.measure import measure_gpu_layer
    from ktbridge.sft.plan.outside import measure_outside
    from ktbridge.sft.plan.speed import measure, pace_of

    machine = None
    outside: dict[int, Outside | None] = {}  # by tokens of a pass
    for choice in choices:
        made = choice.setting
        if made is None:
            yield choice
            continue
        machine = machine or measure(made, memory)
        tokens = made.batch.tokens
        if made.cuda and tokens not in outside:
            outside[tokens] = measure_outside(made, tokens)
        others = outside.get(tokens)
        if made.placed is None:
            yield replace(choice, pace=pace_of(made, machine, outside=others))
            continue
        times = measure_gpu_layer(made, tokens)
        if times is None:
            yield replace(choice, why="not timed: there is no GPU here")
        else:
            yield replace(choice, pace=pace_of(made, machine, times, others))


def choose(choices: tuple[Choice, ...], wanted: str) -> Choice:
    """What is ``wanted``; for "auto" the fastest, or where none was timed what needs the CPU least.

    Raises ``UsageError`` if the requested mode is unavailable.
    """
    if wanted != "auto":
        found = next(each for each in choices if each.name == wanted)
        if found.setting is None:
            raise UsageError(f"kt_experts: {wanted}: {found.why}", "Set kt_experts: auto.")
        return found
    there = [each for each in choices if each.setting is not None]
    if all(each.pace is not None for each in there):
        return max(there, key=lambda each: each.pace.tokens_per_second if each.pace else 0.0)
    return there[-1]
