"""A defect of sglang-kt before 0.7.0 that no log shows: prompts computed with keys that aren't rotated.

Its fused kernel rotates queries in place, and keys only on their way into the cache. A backend that reads
a prompt's keys from the cache (fa3, torch_native) is right; one that reads them from the layer (triton,
flashinfer) computes every prompt without RoPE on the keys. Only models whose attention uses that kernel are
affected: of those that KT serves, Qwen3-MoE. Observed with 0.6.4 and triton: logprobs 0.4 nats off, equal to
those of a model without rotated keys to within rounding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ktbridge.adapter.engines import ENGINE, version_order
from ktbridge.codes import problem
from ktbridge.errors import Problem
from ktbridge.serve.sglang.facts import Facts
from ktbridge.serve.sglang.flags import EngineFlag, value_of

_MENDED = version_order("0.7.0")
_MODEL_TYPE = "qwen3_moe"
_FROM_THE_CACHE = ("fa3", "torch_native")
_HOPPER = "9."


def check_attention(flags: Sequence[EngineFlag], facts: Facts, version: str) -> Iterator[Problem]:
    """KTB967 where ``version`` would compute this model's prompts wrongly on these GPUs."""
    if version_order(version) >= _MENDED or facts.model.model_type != _MODEL_TYPE:
        return
    stored = value_of(flags, "--kv-cache-dtype")
    if stored is not None and stored.value not in ("auto", "bf16", "bfloat16"):
        return  # the fused kernel is for a bfloat16 cache alone
    given = value_of(flags, "--prefill-attention-backend") or value_of(flags, "--attention-backend")
    if given is None:
        # The engine's default: fa3 on Hopper, others elsewhere.
        if facts.gpus and all(gpu.capability.startswith(_HOPPER) for gpu in facts.gpus):
            return
        where, found = (
            "--attention-backend",
            "is left to the engine, which takes fa3 on Hopper alone",
        )
    elif given.value in _FROM_THE_CACHE:
        return
    else:
        where, found = given.name, f"is {given.value}"
    found += (
        f": {ENGINE} {version} computes prompts of {_MODEL_TYPE} with it as if keys had no position"
    )
    yield problem("KTB967", where, found, " or ".join(_FROM_THE_CACHE))
