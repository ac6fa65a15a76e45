"""The choices of who computes the experts, compared: what each takes of the GPU, and its pace."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ktbridge.errors import UsageError
from ktbridge.sft.plan.memory import Setting, predict
from ktbridge.sft.plan.modes import possible
from ktbridge.sft.plan.parts import Experts, Pace, total
from ktbridge.sft.plan.target import Target


@dataclass(frozen=True)
class Choice:
    """``setting`` is None where it can't be had, for the reason in ``why``."""

    name: str
    setting: Setting | None
    pace: Pace | None = None
    why: str = ""

    def told(self, taken: Setting) -> Experts:
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
    """cpu, stream and resident on a GPU of ``target``; timed on this machine's where ``measure``."""
    assert target.gpu_memory is not None
    config = setting.config
    if config.kt_config.kt_experts == "cpu":
        rows = None
        if config.tokens_per_pass != "auto":
            rows = max(1, int(config.tokens_per_pass) // (setting.lengths.longest * setting.sides))
        found: list[tuple[str, Setting | str]] = [("cpu", replace(setting, rows=rows))]
    elif config.kt_config.kt_backend == "kt-kernel" or config.device_rules:
        found = [("cpu", setting)]
    else:
        found = list(possible(setting, target.gpu_memory, target.memory))
    if not measure:
        return tuple(
            Choice(name, None, why=made) if isinstance(made, str) else Choice(name, made)
            for name, made in found
        )
    from ktbridge.sft.plan.measure import measure_gpu_layer
    from ktbridge.sft.plan.speed import measure as measure_machine
    from ktbridge.sft.plan.speed import pace_of

    choices, machine = [], None
    for name, made in found:
        if isinstance(made, str):
            choices.append(Choice(name, None, why=made))
            continue
        machine = machine or measure_machine(made, target.memory)
        if made.share is None:
            choices.append(Choice(name, made, pace_of(made, machine)))
            continue
        whole = len(made.share.resident) == made.expert_sizes.layers
        times = measure_gpu_layer(made, made.batch.tokens, streamed=not whole)
        pace = pace_of(made, machine, times) if times else None
        why = "" if times else "not timed: there is no GPU here"
        choices.append(Choice(name, made, pace, why))
    return tuple(choices)


def choose(choices: tuple[Choice, ...], wanted: str) -> Choice:
    """What is ``wanted``; for "auto" the fastest, or where none was timed what needs the CPU least.

    Raises ``UsageError`` where what is wanted can't be had.
    """
    if wanted != "auto":
        (found,) = [each for each in choices if each.name == wanted] or [choices[0]]
        if found.setting is None:
            raise UsageError(f"kt_experts: {wanted}: {found.why}", "Set kt_experts: auto.")
        return found
    there = [each for each in choices if each.setting is not None]
    if all(each.pace is not None for each in there):
        return max(there, key=lambda each: each.pace.tokens_per_second if each.pace else 0.0)
    return there[-1]
