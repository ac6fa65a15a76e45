"""What ktbridge/ is to have less of, and limits that keep it readable.

A number of ``AT_MOST`` only goes down: whoever lowers one writes the new number here.
"""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

import ktbridge

ROOT = Path(ktbridge.__file__).parent
TREES = {path.relative_to(ROOT).as_posix(): path.read_text() for path in sorted(ROOT.rglob("*.py"))}
AT_MOST = {
    "lines": 71_533,
    "modules": 296,
    "public names that several modules define": 11,
    "docstrings that begin with a relative clause": 5,
    "modules in circles of imports, for types too": 4,
    "uses of Any": 324,
}
SLACK = 0.03
"""What a number may be below its limit before the limit has to follow."""
RELATIVE = re.compile(r"(What|Whether|Where|How|Of|Those|That which|So many|Which)\b")
# More than 8 parameters: what people call from outside or by keywords alone, and kernels.
WIDE = {
    "adapter/raw.py:write_raw_adapter",
    "cli/gate.py:command",
    "cli/verify.py:command",
    "eval/judge/run.py:judge_run",
    "experts/gpu/triton_kernels.py:_activation_backward",
    "experts/gpu/triton_kernels.py:_add_kept",
    "experts/gpu/triton_kernels.py:_count",
    "experts/gpu/triton_kernels.py:_fill",
    "experts/gpu/triton_kernels.py:_keep",
    "experts/gpu/triton_kernels.py:_place",
    "experts/gpu/triton_lora.py:_activation_backward_thin",
    "experts/gpu/triton_lora.py:_activation_thin",
    "experts/gpu/triton_lora.py:_border",
    "experts/gpu/triton_lora.py:_gather_thin",
    "experts/gpu/triton_lora.py:_gradient",
    "experts/gpu/triton_lora.py:_put",
    "experts/gpu/triton_lora.py:_write_borders",
    "verify/run.py:verify",
}


@cache
def tree(place: str) -> ast.Module:
    return ast.parse(TREES[place])


def functions() -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for place in TREES:
        for node in ast.walk(tree(place)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield f"{place}:{node.name}", node


def parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    names = [each.arg for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    return len(names) - (names[:1] in (["self"], ["cls"]))


def is_public(node: ast.stmt) -> bool:
    named = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    return named and not node.name.startswith("_") and node.name not in ("command", "main")


def docstrings() -> Iterator[str]:
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module
    for place in TREES:
        for node in ast.walk(tree(place)):
            if isinstance(node, kinds) and (text := ast.get_docstring(node)):
                yield text


def uses_of_any(places: str = "") -> int:
    return sum(
        isinstance(node, ast.Name) and node.id == "Any"
        for place in TREES
        if place.startswith(places)
        for node in ast.walk(tree(place))
    )


def imports() -> dict[str, set[str]]:
    """What each module imports of ours outside functions, for types too."""
    names = {
        place: ("ktbridge." + place.removesuffix(".py").replace("/", ".")).removesuffix(".__init__")
        for place in TREES
    }
    graph: dict[str, set[str]] = {name: set() for name in names.values()}
    for place, name in names.items():
        for node in tree(place).body:
            inner = node.body if isinstance(node, ast.If) else [node]  # under TYPE_CHECKING
            for each in inner:
                if isinstance(each, ast.ImportFrom):
                    wholes = {f"{each.module}.{alias.name}" for alias in each.names}
                    graph[name] |= (wholes & graph.keys() or {each.module} & graph.keys()) - {name}
    return graph


def in_circles() -> int:
    """How many modules import themselves through others."""
    graph = imports()

    def reached(start: str) -> set[str]:
        found: set[str] = set()
        left = [start]
        while left:
            new = graph[left.pop()] - found
            found |= new
            left += new
        return found

    return sum(name in reached(name) for name in graph)


@cache  # not when tests are collected, which each process does
def counted() -> dict[str, int]:
    public = Counter(node.name for place in TREES for node in tree(place).body if is_public(node))
    return {
        "lines": sum(text.count("\n") for text in TREES.values()),
        "modules": len(TREES),
        "public names that several modules define": sum(n > 1 for n in public.values()),
        "docstrings that begin with a relative clause": sum(
            bool(RELATIVE.match(text)) for text in docstrings()
        ),
        "modules in circles of imports, for types too": in_circles(),
        "uses of Any": uses_of_any(),
    }


@pytest.mark.parametrize("what", AT_MOST)
def test_there_is_never_more(what: str) -> None:
    assert counted()[what] <= AT_MOST[what]
    assert counted()[what] >= int((1 - SLACK) * AT_MOST[what]), "lower its limit to what is left"


def test_modules_are_short() -> None:
    """A lower limit makes splinters: what reads top to bottom stays in one file."""
    assert {place for place, text in TREES.items() if len(text.splitlines()) > 600} == set()


def test_functions_have_few_parameters() -> None:
    assert {name for name, node in functions() if parameters(node) > 8} == WIDE


def test_any_stands_where_nothing_is_known() -> None:
    assert uses_of_any("eval/") < 50


def is_there(module: str, name: str) -> bool:
    try:
        return hasattr(import_module(module), name) or find_spec(f"{module}.{name}") is not None
    except ModuleNotFoundError:
        return False


def test_scripts_import_what_is_there() -> None:
    """`make test` runs no script, so nobody sees what a benchmark misses before it is measured with."""
    missing = set()
    for path in (Path(__file__).parents[1] / "scripts").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ktbridge"):
                names = (each.name for each in node.names if not is_there(node.module, each.name))
                missing |= {f"{path.name}: {node.module}.{name}" for name in names}
    assert not missing
