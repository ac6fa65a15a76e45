"""The adapters that a launch is given: which halves each has, and a hash of its content."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from ktbridge.adapter import Adapter, read_adapter
from ktbridge.adapter.adapter import Layout
from ktbridge.adapter.manifest import MANIFEST_FILE, hash_file
from ktbridge.codes import problem
from ktbridge.errors import KtbridgeError, Problem, ProblemsError
from ktbridge.serve.request import OPTION_OF_LAYOUT, ServeRequest


@dataclass(frozen=True)
class Source:
    """One adapter directory. ``name`` is what requests select it by; None for a bare expert one.

    ``layers`` are those with expert LoRA, ``nonexpert`` describes the rest.
    ``digest`` is a SHA-256 over names and contents of its files.
    """

    name: str | None
    path: Path
    layout: Layout
    layers: tuple[int, ...]
    nonexpert: bool
    base_model: str | None
    digest: str

    @property
    def expert(self) -> bool:
        return bool(self.layers)


def read_sources(request: ServeRequest) -> tuple[tuple[Source, ...], list[Problem]]:
    """Open every adapter of the request; also the problems of those that can't be opened or don't fit
    their option.

    Reads each file once, for its hash.
    """
    given: list[tuple[str | None, str, str | None]] = [
        (name, directory, None) for name, directory in request.adapters.items()
    ]
    if request.expert_adapter is not None:
        given.append((None, request.expert_adapter, "expert"))
    given += [
        (name, directory, "nonexpert") for name, directory in request.nonexpert_adapters.items()
    ]
    given += [(name, directory, "merged") for name, directory in request.merged_adapters.items()]
    sources: list[Source] = []
    problems: list[Problem] = []
    for name, directory, layout in given:
        try:
            adapter = read_adapter(directory)
        except ProblemsError as error:
            problems += error.problems
            continue
        except KtbridgeError as error:
            step = error.next_step or None
            problems.append(problem("KTB951", directory, error.sentence, next_step=step))
            continue
        if layout is not None and adapter.layout != layout:
            step = f"pass it as {OPTION_OF_LAYOUT[adapter.layout]}"
            found = f"has the {adapter.layout} layout"
            problems.append(problem("KTB951", directory, found, f"the {layout} layout", step))
            continue
        sources.append(_source(name, adapter))
    return tuple(sources), problems


def _source(name: str | None, adapter: Adapter) -> Source:
    return Source(
        name=name,
        path=adapter.path.resolve(),
        layout=adapter.layout,
        layers=adapter.expert_layers(),
        nonexpert=bool(adapter.nonexpert),
        base_model=adapter.base_model,
        digest=content_digest(adapter.path),
    )


def content_digest(directory: Path) -> str:
    """SHA-256 over the names and contents of the files that make an adapter what it is."""
    digest = hashlib.sha256()
    for path in sorted(directory.iterdir()):
        if path.suffix == ".safetensors" or path.name in ("adapter_config.json", MANIFEST_FILE):
            digest.update(f"{path.name}\0{hash_file(path)}\n".encode())
    return digest.hexdigest()
