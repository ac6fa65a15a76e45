"""Hints to install ktbridge and what its parts need, from where it was installed; what some models need."""

from __future__ import annotations

import functools
import importlib
import json
import platform
import re
import shlex
import urllib.parse
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from ktbridge.errors import KtbridgeError, UsageError

_NAME = "ktbridge"
LINEAR_ATTENTION = ("flash-linear-attention", "fla-core", "triton", "tilelang")
"""Packages that decide how linear attention is computed; fla-core is the first one's other name."""
_KERNELS = ("flash-linear-attention", "fla-core")
_COMPLETE = (0, 6)  # the first release whose convolution and gated norm are taken, too
_NEEDS_KERNELS = "train, plan, predict and serving without SGLang-KT"
_IN_EXTRAS = {
    "hub": "huggingface_hub tqdm",
    "gguf": "gguf",
    "fla": "fla",
    "liger": "liger_kernel",
    "eval": "aiohttp anyio httpx2 jieba jinja2 jsonschema markupsafe openai regex rouge_score sacrebleu",
    "serve": "accelerate aiohttp anyio h11 httpx2 huggingface_hub jinja2 openai peft "
    "safetensors starlette tokenizers torch transformers uvicorn",
    "train": "accelerate datasets huggingface_hub jinja2 matplotlib peft PIL pyarrow safetensors "
    "tokenizers torch transformers trl",
}
"""Modules that each extra of pyproject.toml installs, the smallest extra first."""
_WRONG_TRITON = ((3, 4), (3, 7, 1))  # from, and below; on GPUs of this capability:
_HOPPER = "9.0"


def install_hint(extra: str = "all") -> str:
    """The command that installs ``extra`` ("train", "serve", "eval", "gguf", "all", or "train,serve").

    "pip install -e '/home/u/ktbridge[train]'" where the checkout is known from the installed package's
    metadata; else "pip install 'ktbridge[train]'", for which pip takes the ktbridge that is installed.
    """
    found = _checkout()
    if found is None:
        return f"pip install '{_NAME}[{extra}]'"
    path, editable = found
    return f"pip install {'-e ' if editable else ''}{shlex.quote(f'{path}[{extra}]')}"


def extra_with(module: str, wanted: str = "") -> str | None:
    """The smallest extra that installs a module ("torch.nn" counts as torch); None where no extra does.

    ``wanted``, the extras of a command ("train,serve"), goes before it if it has the module.
    """
    top = module.partition(".")[0]
    having = [extra for extra, modules in _IN_EXTRAS.items() if top in modules.split()]
    if not having:
        return None
    brings = wanted.replace("demo", "demo,train,serve,eval").split(",")
    return wanted if set(having) & set(brings) else having[0]


def reinstall_hint() -> str:
    """The command that rebuilds and reinstalls ktbridge without its dependencies.

    Never one that asks an index: ktbridge isn't on PyPI, and whoever takes the name could run code.
    """
    found = _checkout()
    if found is None:
        return "pip install --force-reinstall --no-deps its wheel, or . in its checkout"
    path, editable = found
    return f"pip install --force-reinstall --no-deps {'-e ' if editable else ''}{shlex.quote(path)}"


def without_kernels(error: ImportError | None = None) -> KtbridgeError:
    """The error where the C++ kernels are needed, and aren't there or fail to load with ``error``."""
    if error is not None and not isinstance(error, ModuleNotFoundError):
        return KtbridgeError(f"the kernels don't load: {error}", reinstall_hint())
    machine, system = platform.machine(), platform.system()
    if (system, machine) == ("Linux", "x86_64"):
        step = "install the ktbridge wheel for x86-64 Linux, or build it with a C++ compiler"
        if _checkout():
            step = f"with a C++ compiler and without KTBRIDGE_PURE, {reinstall_hint()}"
    else:
        step = f"use an x86-64 machine with Linux: there are no kernels for {system} on {machine}"
    return KtbridgeError(f"this installation has no kernels, which {_NEEDS_KERNELS} need", step)


_VERSION = re.compile(
    r"v?(\d{1,9}(?:\.\d{1,9}){0,5})"
    r"(?P<suffix>(?:[._-]?(?:a|b|c|rc|alpha|beta|pre|preview|post|rev|r|dev)[._-]?\d*){0,3})"
    r"(?:\+[a-z0-9._-]+)?",
    re.IGNORECASE | re.ASCII,
)
_POST = re.compile(r"(?:post|(?<![a-z])r(?:ev)?)[._-]?(\d{0,9})", re.IGNORECASE | re.ASCII)


def version_order(text: str) -> tuple[tuple[int, ...], int]:
    """Sort key of a PEP 440 version: the release without the zeros at its end, and the post-release.

    ((0, 7), 1) for "0.7.0.post1"; a pre-release counts as its release. UsageError for what is no version.
    """
    match = _VERSION.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"{text!r} is not a version", "write it like 0.7.2")
    release = [int(part) for part in match[1].split(".")]
    while len(release) > 1 and release[-1] == 0:
        release.pop()
    post = _POST.search(match["suffix"])
    return tuple(release), int(post[1] or 0) if post else 0


def release_of(version: str) -> tuple[int, ...]:
    """The release of an installed version: (2, 13) for 2.13.0+cpu, () for one that can't be read."""
    with suppress(UsageError):
        return version_order(version)[0]
    return ()


def version_of(name: str) -> str | None:
    """The version of an installed distribution; None if it isn't."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


class Gap(NamedTuple):
    """A lack of packages. ``wrong``: what is computed would be wrong, or is refused; else it is slow."""

    found: str
    remedy: str
    wrong: bool = False


@functools.cache
def import_error(package: str) -> str | None:
    """The error of importing flash-linear-attention, installed as ``package``; None if there is none.

    transformers imports it too, and computes with torch where that fails, in silence.
    """
    if not version_of(package):
        return None
    try:
        importlib.import_module("fla")
    except Exception as error:  # whatever a package's own start raises
        return f"{type(error).__name__}: {error}".splitlines()[0][:200]
    return None


def has_linear_attention_kernels() -> bool:
    """Return whether transformers can take flash-linear-attention's GPU kernels: it is here, and imports."""
    return any(version_of(name) and import_error(name) is None for name in _KERNELS)


def linear_attention_gaps(
    capabilities: Sequence[str],
    versions: Mapping[str, str | None] | None = None,
    errors: Mapping[str, str] | None = None,
) -> list[Gap]:
    """List what keeps linear attention by a delta rule (Qwen3-Next, Qwen3.5, Kimi Linear) from GPU kernels.

    ``capabilities`` of the GPUs that are used, as NVIDIA writes them ("9.0"; "" where unknown); ``versions``
    of ``LINEAR_ATTENTION``, by default those that are installed, and then ``errors`` of importing them.
    transformers takes these packages where they can be imported and else computes with torch, in silence.
    """
    imports = versions is None and errors is None and capabilities
    if versions is None:
        versions = {name: version_of(name) for name in LINEAR_ATTENTION}
    name = next((name for name in _KERNELS if versions.get(name)), "")
    if imports and name and (error := import_error(name)):
        errors = {name: error}
    kernels = versions.get(name)
    if not capabilities:
        found = "without a GPU torch computes it, slowly (flash-linear-attention not installed)"
        step = "on a machine with a GPU, pip install flash-linear-attention"
        return [] if kernels else [Gap(found, step)]
    gaps = []
    triton, (first, fixed) = versions.get("triton"), _WRONG_TRITON
    wrong = (
        triton is not None
        and _HOPPER in capabilities
        and not versions.get("tilelang")
        and first <= release_of(triton) < fixed
    )
    if not kernels:
        found = "without flash-linear-attention torch computes it, many times slower than kernels"
        # Without tilelang it would refuse to run.
        gaps.append(Gap(found, f"pip install flash-linear-attention{' tilelang' if wrong else ''}"))
    elif release_of(kernels) < _COMPLETE:
        found = f"{name} {kernels} has no convolution for it: torch computes that, slowly"
        gaps.append(Gap(found, f"pip install --upgrade {name}"))
    for name, error in (errors or {}).items():
        found = f"{name} is installed, but fails to import, so torch computes it, many times slower: {error}"
        gaps.append(Gap(found, f"pip install --upgrade {name}, with what it needs"))
    if kernels and wrong:
        found = (
            f"Triton {triton} computes wrong gradients of it on Hopper GPUs: flash-linear-attention "
            "refuses to train with it, and older versions train on them"
        )
        step = "pip install tilelang, or a torch whose Triton is 3.7.1 or newer"
        gaps.append(Gap(found, step, wrong=True))
    return gaps


def _checkout() -> tuple[str, bool] | None:
    """The directory that ktbridge was installed from, and whether it is editable; None if unknown.

    pip writes direct_url.json (PEP 610) for installations from a path.
    """
    try:
        record = json.loads(metadata.distribution(_NAME).read_text("direct_url.json") or "{}")
        url = urllib.parse.urlsplit(record["url"])
        editable = bool(record.get("dir_info", {}).get("editable"))
        path = Path(urllib.parse.unquote(url.path))
    except (metadata.PackageNotFoundError, ValueError, KeyError, TypeError, AttributeError):
        return None
    if url.scheme != "file" or not (path / "pyproject.toml").is_file():
        return None
    return str(path), editable
