"""The adapters of a launch: the halves that each has, their layout, and a cache of conversions.

The engine keeps a split copy of a merged adapter by path, time and size; it is pointed to a directory of
the cache, which is named by content (and the engine's own lies in /tmp under a predictable name).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ktbridge.adapter import convert_adapter, read_adapter, write_raw_adapter
from ktbridge.adapter.adapter import Layout
from ktbridge.adapter.checks.files import require_hashes
from ktbridge.adapter.engines import ENGINE, Contract, contracts_of
from ktbridge.adapter.keys import FUSED_NAMES, fused_key
from ktbridge.adapter.lora_config import expert_numbers, half_numbers
from ktbridge.adapter.manifest import MANIFEST_FILE, trained_on
from ktbridge.adapter.opening import RECIPE, is_intact
from ktbridge.codes import problem
from ktbridge.errors import KtbridgeError, Problem, ProblemsError
from ktbridge.files import digests
from ktbridge.serve.request import RequestedLayout, ServeRequest

ServedLayout = Literal["base", "expert", "nonexpert", "split", "merged"]


@dataclass(frozen=True)
class AdapterSource:
    """One adapter directory. ``name`` is what requests select it by; None for a bare expert one.

    ``layers`` are those with expert LoRA. ``nonexpert``: whether it has any other LoRA.
    ``digest`` is a SHA-256 over names and contents of its files; ``reading`` says that it was read from
    another tool's format.
    """

    name: str | None
    path: Path
    layout: Layout
    layers: tuple[int, ...]
    nonexpert: bool
    base_model: str | None
    digest: str
    reading: str = ""

    @property
    def expert(self) -> bool:
        return bool(self.layers)


def read_sources(request: ServeRequest) -> tuple[tuple[AdapterSource, ...], list[Problem]]:
    """Open every adapter of the request; also the problems of those that can't be opened or don't fit
    their option.

    Reads each file once, for its hash.
    """
    sources: list[AdapterSource] = []
    problems: list[Problem] = []
    # Whole adapters first: their order is part of the command line and of the cache's keys.
    for name, directory, layout in sorted(request.directories(), key=lambda given: bool(given[2])):
        try:
            adapter = request.open_adapter(directory, layout)
        except ProblemsError as error:
            problems += error.problems
            continue
        except KtbridgeError as error:
            step = error.next_step or None
            problems.append(problem("KTB951", directory, error.sentence, next_step=step))
            continue
        source = AdapterSource(
            name=name,
            path=adapter.path.resolve(),
            layout=adapter.layout,
            layers=adapter.expert_layers(),
            nonexpert=bool(adapter.nonexpert),
            base_model=adapter.base_model,
            digest=_content_digest(adapter.path),
            reading=adapter.reading,
        )
        sources.append(source)
    return tuple(sources), problems


def _content_digest(directory: Path) -> str:
    """SHA-256 over the names and contents of the files that make an adapter what it is."""
    names = ("adapter_config.json", MANIFEST_FILE)
    return digests.of_files(
        path for path in sorted(directory.iterdir()) if path.suffix == ".safetensors" or path.name in names
    )


# --- the layout they are served in -----------------------------------------------------------------


@dataclass(frozen=True)
class LayoutChoice:
    """Parts that are served: the source of the expert LoRA, those of the non-expert LoRA, the layout."""

    layout: ServedLayout
    expert: AdapterSource | None
    nonexpert: tuple[AdapterSource, ...]
    reasons: tuple[str, ...]
    problems: tuple[Problem, ...]


def granting(grants: Callable[[Contract], bool]) -> str:
    """The versions for which ``grants`` is true, as text."""
    names = [contract.name for contract in contracts_of(ENGINE) if grants(contract)]
    return f"{ENGINE} {', '.join(names)}" if names else f"no version of {ENGINE}"


def choose_layout(
    sources: Sequence[AdapterSource], requested: RequestedLayout, contract: Contract
) -> LayoutChoice:
    """Decide the layout; an unsupported one is a problem that names the versions supporting it."""
    experts = [source for source in sources if source.expert]
    nonexpert = tuple(source for source in sources if source.nonexpert)
    expert = experts[0] if experts else None
    problems: list[Problem] = []
    if len(experts) > 1:
        paths = " and ".join(str(source.path) for source in experts)
        found = f"{paths} both bring an expert LoRA; one server holds one"
        step = "serve the second from a second server"
        problems.append(problem("KTB952", "adapters", found, "one", step))
    layout: ServedLayout
    missing = ""
    if expert is None:
        layout = "nonexpert" if nonexpert else "base"
        reasons = ["there is no expert LoRA" if nonexpert else "there is no adapter"]
        missing = "an expert and a non-expert LoRA"
    elif not contract.expert:
        layout, expert, nonexpert, reasons = "base", None, (), []
        grants = granting(lambda row: row.expert)
        problems.append(_refusal(contract, "does not know --kt-expert-lora-path", grants))
    elif not nonexpert:
        layout = "expert"
        reasons = ["there is no non-expert LoRA: the expert directory is served alone"]
        missing = "a non-expert LoRA too"
    else:
        layout, reasons, refusals = _layout_of_both(len(nonexpert) > 1, requested, contract)
        problems += refusals
    if missing and requested != "auto":
        found = f"--layout {requested} needs {missing}"
        problems.append(_refusal(contract, found, "both", "leave --layout out"))
    return LayoutChoice(layout, expert, nonexpert, tuple(reasons), tuple(problems))


def _layout_of_both(
    several: bool, requested: RequestedLayout, contract: Contract
) -> tuple[ServedLayout, list[str], list[Problem]]:
    """The layout of an expert LoRA beside one or ``several`` non-expert ones, reasons, problems."""
    where = contract.title
    splitting = granting(lambda row: row.split)
    if requested == "split" or (requested == "auto" and (contract.split or several)):
        if contract.split:
            reason = f"{where} takes the expert and the non-expert LoRA side by side"
            return "split", [reason], []
        found = "refuses --kt-expert-lora-path together with --lora-paths"
        if several and requested == "auto":
            found += ", and several non-expert adapters need both"
        step = None if several else "use --layout merged"
        return "split", [], [_refusal(contract, found, splitting, step)]
    if several:
        found, expected = "one merged adapter is all a server takes", " with --layout split"
        return "merged", [], [_refusal(contract, found, splitting + expected, "give one adapter")]
    if not contract.merged:
        grants = granting(lambda row: row.merged)
        return "merged", [], [_refusal(contract, "does not take a merged adapter", grants)]
    if not contract.split:
        return "merged", [f"{where} takes both halves as one merged directory only"], []
    return "merged", [], []


def _refusal(contract: Contract, found: str, expected: str, step: str | None = None) -> Problem:
    return problem("KTB952", contract.title, found, expected, step)


# --- the cache of conversions ----------------------------------------------------------------------


@dataclass(frozen=True)
class Conversion:
    """``target``, in ``layout``, is made from one source, or from an expert and a non-expert one."""

    layout: str
    sources: tuple[Path, ...]
    target: Path
    base_model: str

    def as_dict(self) -> dict[str, object]:
        sources = [str(path) for path in self.sources]
        return {"layout": self.layout, "sources": sources, "target": str(self.target)}


def cached(sources: Sequence[AdapterSource], root: Path) -> Path:
    """The directory below ``root`` for what is made from ``sources``."""
    made_of = "".join(f"\0{source.layout}\0{source.digest}" for source in sources)
    return root / digests.of_text(RECIPE + made_of)[:24]


def convert(conversion: Conversion) -> bool:
    """Make ``conversion.target`` unless it exists and is complete. Returns whether it was made.

    Raises ProblemsError when the sources can't be converted, KtbridgeError when writing fails; the
    target is complete or unchanged.
    """
    if is_intact(conversion.target, conversion.layout):
        return False
    conversion.target.parent.mkdir(parents=True, exist_ok=True)
    source = conversion.sources[0]
    joined: Path | None = None
    try:
        if len(conversion.sources) == 2:
            joined = conversion.target.parent / f".joined-{os.getpid()}"
            _join(*conversion.sources, joined, conversion.base_model)
            source = joined
        convert_adapter(
            source,
            **{f"{conversion.layout}_output_dir": conversion.target},  # type: ignore[arg-type]
            base_model=conversion.base_model,
            overwrite=True,
        )
    finally:
        if joined is not None:
            shutil.rmtree(joined, ignore_errors=True)
    return True


def _join(expert: Path, nonexpert: Path, target: Path, base_model: str) -> None:
    """Join both halves of a split pair into one raw adapter, from which everything is converted."""
    experts, rest = read_adapter(expert), read_adapter(nonexpert)
    require_hashes(experts.path, rest.path)  # the joined adapter gets its own hashes
    fused = {
        fused_key(layer, name): experts.expert_tensor(layer, name)
        for layer in experts.expert_layers()
        for name in FUSED_NAMES
    }
    usual = half_numbers(experts, "expert")
    for layer, projection, _ in experts.experts:
        if any(n != usual for n in expert_numbers(experts, layer, projection)):
            raise KtbridgeError(
                f"{experts.path} has experts of several ranks or scales, and the engine serves one.",
                f"Fold them first: ktbridge convert {experts.path} --expert-output-dir D",
            )
    stored = (experts.manifest or {}).get("expert_weight_format")
    write_raw_adapter(
        target,
        expert=fused,
        nonexpert={key: rest.nonexpert_tensor(key) for key in rest.nonexpert_keys()},
        config=rest.config,
        base_model=base_model,
        rank=usual.rank,
        alpha=usual.plain_alpha,
        expert_weight_format=stored if isinstance(stored, str) else "bf16",
        fingerprint=trained_on(experts.manifest) or False,
        overwrite=True,
    )
