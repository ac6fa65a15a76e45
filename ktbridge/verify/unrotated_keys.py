"""Attention with unrotated keys: simulates an engine that applies RoPE to queries only.

sglang-kt before 0.7.0 does so in prompts (``ktbridge.serve.sglang.preflight``). Most families of
transformers rotate both by one function of their modelling module; a copy of the attention's forward that
gets another function in its place is enough. Families that do it otherwise are not supported.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

ROTATE = "apply_rotary_pos_emb"


def rotating(layers: nn.Module) -> list[Any]:
    """The modules in ``layers`` whose forward calls their family's function (q, k, …) -> (q, k)."""
    return [module for module in layers.modules() if _rotates(type(module).forward)]


@contextmanager
def keys_left(modules: Sequence[Any], left: Sequence[bool]) -> Iterator[None]:
    """Context: ``modules`` leave keys unrotated in some parts of the batch.

    ``left`` has a flag per part; parts are equal and follow one another in the first dimension. Raises
    ValueError where keys are to be left and no module is known to rotate any.
    """
    if not any(left):
        yield
        return
    if not modules:
        raise ValueError("no module is known to rotate keys")
    for module in modules:
        module.forward = MethodType(_without_rotation(type(module).forward, left), module)
    try:
        yield
    finally:
        for module in modules:
            del module.forward


def _rotates(forward: Any) -> bool:
    # A decorated forward doesn't match its code; one that names two functions may call the other one.
    code = getattr(forward, "__code__", None)
    called = [name for name in code.co_names if name.startswith("apply_rotary")] if code else []
    if called != [ROTATE] or hasattr(forward, "__wrapped__"):
        return False
    rotate = forward.__globals__.get(ROTATE)
    return callable(rotate) and list(inspect.signature(rotate).parameters)[:2] == ["q", "k"]


def _without_rotation(forward: FunctionType, left: Sequence[bool]) -> FunctionType:
    """A copy of ``forward`` that rotates fewer keys."""
    rotate = forward.__globals__[ROTATE]

    def rotate_fewer(q: torch.Tensor, k: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        q, rotated = rotate(q, k, *args, **kwargs)
        parts = zip(left, k.chunk(len(left)), rotated.chunk(len(left)), strict=True)
        return q, torch.cat([plain if stay else turned for stay, plain, turned in parts])

    names = {**forward.__globals__, ROTATE: rotate_fewer}
    copy = FunctionType(
        forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__
    )
    copy.__kwdefaults__ = forward.__kwdefaults__
    return copy
