"""Limits that keep ktbridge/ readable: the length of modules, parameters, types that mean something."""

import ast
from collections.abc import Iterator
from pathlib import Path

import ktbridge

ROOT = Path(ktbridge.__file__).parent
TREES = {path.relative_to(ROOT).as_posix(): path.read_text() for path in sorted(ROOT.rglob("*.py"))}
# More than 8 parameters: what people call from outside or by keywords alone, and kernels.
WIDE = {
    "adapter/raw.py:write_raw_adapter",
    "cli/eval.py:command",
    "cli/verify.py:command",
    "eval/judging/run.py:judge_run",
    "eval/run.py:collect",
    "experts/backends/kt_kernel.py:__init__",
    "experts/gpu/executor.py:__init__",
    "experts/gpu/triton_kernels.py:_activation_backward",
    "experts/gpu/triton_kernels.py:_add_kept",
    "experts/gpu/triton_kernels.py:_fill",
    "experts/gpu/triton_kernels.py:_keep",
    "experts/gpu/triton_routing.py:_count",
    "experts/gpu/triton_routing.py:_place",
    "experts/gpu/triton_lora.py:_gather_thin",
    "experts/gpu/triton_lora.py:_activation_thin",
    "experts/gpu/triton_lora.py:_activation_backward_thin",
    "experts/gpu/triton_lora.py:_border",
    "experts/gpu/triton_lora.py:_write_borders",
    "experts/gpu/triton_lora.py:_put",
    "experts/gpu/triton_lora.py:_gradient",
    "experts/inject.py:wrap_experts",
    "experts/layer.py:__init__",
    "experts/layer.py:from_tensors",
    "verify/run.py:verify",
}


def functions() -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for place, text in TREES.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield f"{place}:{node.name}", node


def parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    names = [each.arg for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    return len(names) - (names[:1] in (["self"], ["cls"]))


def test_modules_are_short() -> None:
    """A lower limit makes splinters: what reads top to bottom stays in one file."""
    assert {place for place, text in TREES.items() if len(text.splitlines()) > 600} == set()


def test_functions_have_few_parameters() -> None:
    assert {name for name, node in functions() if parameters(node) > 8} == WIDE


def test_any_stands_where_nothing_is_known() -> None:
    count = {
        place: sum(
            isinstance(node, ast.Name) and node.id == "Any" for node in ast.walk(ast.parse(text))
        )
        for place, text in TREES.items()
    }
    assert sum(count.values()) < 350
    assert sum(number for place, number in count.items() if place.startswith("eval/")) < 50
