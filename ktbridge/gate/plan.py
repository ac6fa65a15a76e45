"""From a request to the commands of a gate, in order, and the digests of what they read."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ktbridge import __version__
from ktbridge.eval.bench import Bench
from ktbridge.files import digests
from ktbridge.gate.verdict import BenchInput, DirectoryInput, GateInputs, ModelInput
from ktbridge.model import fingerprint
from ktbridge.recipe import Step
from ktbridge.recipe.plan import URL
from ktbridge.server_api.served_names import adapter_name, base_name

NAME = "gated"
"""The name by which the embedded engine serves the adapter."""
EVALUATION = "eval"
VALIDATION_FILE = "validate.json"
VERIFICATION_FILE = "verify.json"
PAGE_FILE = "verify.html"
_READS: Mapping[str, tuple[str, ...]] = {
    "validate": ("adapter", "base_model"),
    "verify": ("adapter", "base_model", "merged"),
    "eval": ("adapter", "base_model", "merged", "benches", "files"),
}


@dataclass(frozen=True)
class GateRequest:
    """A request to judge an adapter; paths are absolute.

    It has ``merged``, or ``server`` with ``model``, or neither: then the embedded engine serves the adapter.
    ``engine`` is the contract that the adapter is validated against. ``evaluation`` are words for
    `ktbridge eval` but arms and output; none: nothing is evaluated.
    """

    adapter: Path
    base_model: Path
    merged: Path | None = None
    server: str | None = None
    model: str | None = None
    engine: str | None = None
    from_format: str = "auto"
    strict: bool = False
    evaluation: Sequence[str] = ()

    @property
    def hashed(self) -> list[Path]:
        """The directories of which every file is hashed."""
        return [path for path in (self.adapter, self.merged) if path is not None]


def plan_gate(request: GateRequest) -> list[Step]:
    """Return the commands of a gate, in order; behind a server's step follow those that ask it.

    A merged checkpoint is compared with its base without a server; its evaluation serves both, one after
    the other, and the condition of --fail-on is held against the last.
    """
    adapter, base = str(request.adapter), str(request.base_model)
    both = ("--adapter", adapter, "--base-model", base)
    form = () if request.from_format == "auto" else ("--from", request.from_format)
    words = ("validate", adapter, "--base-model", base, *form)
    words += ("--engine", request.engine) if request.engine else ()
    words += ("--strict",) if request.strict else ()
    steps = [_with_document("validate", (*words, "--json"), VALIDATION_FILE)]
    served = os.path.basename(base.rstrip("/"))
    if request.merged is not None:
        words = ("verify", "--merged", str(request.merged), *both, *form, "--html", PAGE_FILE)
        steps.append(_with_document("verify", (*words, "--json"), VERIFICATION_FILE))
        if request.evaluation:
            merged = _serve("serve-merged", str(request.merged), f"{served}-merged")
            steps += [merged, _evaluate("eval-merged", request, {"full": f"{served}-merged"}, merged)]
            plain = _serve("serve-base", base, served)
            steps += [plain, _evaluate("eval-base", request, {"base": served}, plain)]
        return steps
    server = None
    if request.server is None:
        server = _serve("serve", base, served, "--adapter", f"{NAME}={adapter}", *form)
        steps.append(server)
    model = request.model or adapter_name(served, NAME)
    words = ("verify", "--server", request.server or URL, "--model", model, *both, *form, "--json")
    steps.append(_with_document("verify", words, VERIFICATION_FILE, server))
    if request.evaluation:
        arms = {"base": base_name(served), "full": model} if server else {}
        steps.append(_evaluate("eval", request, arms, server))
    return steps


def _with_document(key: str, words: tuple[str, ...], document: str, server: Step | None = None) -> Step:
    return Step(key, words, server, writes=(document,), log=document)


def _serve(key: str, model: str, name: str, *more: str) -> Step:
    words = ("serve", "--base-model", model, "--served-model-name", name, *more)
    return Step(key, (*words, "--engine", "local", "--port", "0"))


def _evaluate(key: str, request: GateRequest, arms: Mapping[str, str], server: Step | None) -> Step:
    """Return the evaluation of ``arms`` (name -> served model); without any, of all that a server offers."""
    asked = [word for arm, model in arms.items() for word in ("--arm", f"{arm}={model}@{URL}")]
    asked = asked or ["--server", request.server or URL]
    evaluation = list(request.evaluation)
    if key == "eval-merged":  # half of the arms: conditions are held against both, by the next step
        evaluation = [
            word
            for before, word in zip(["", *evaluation], evaluation, strict=False)
            if "--fail-on" not in (before, word.partition("=")[0])
        ]
    words = ("eval", *evaluation, *asked, "--output", EVALUATION)
    return Step(key, words, server, (), (EVALUATION,), evaluation=True)


def read_inputs(
    request: GateRequest,
    benches: Sequence[Bench],
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> GateInputs:
    """Hash what a gate reads: adapter and merged checkpoint whole, the base by its fingerprint.

    ``on_progress`` gets bytes hashed and bytes in all. Raises OSError for a file that can't be read and
    KtbridgeError for a base without config.json or with weights that can't be read.
    """
    files = {directory: [*_files_of(directory)] for directory in request.hashed}
    sizes = {file: file.stat().st_size for found in files.values() for file in found}
    done, total = 0, sum(sizes.values())
    found: dict[Path, DirectoryInput] = {}
    for directory, members in files.items():
        hashes = {}
        for file in members:
            name = file.name if file == directory else file.relative_to(directory).as_posix()
            hashes[name] = digests.of_file(file)
            done += sizes[file]
            on_progress(done, total)
        found[directory] = DirectoryInput(path=str(directory), sha256=hashes)
    base = fingerprint(request.base_model)
    return GateInputs(
        adapter=found[request.adapter],
        base_model=ModelInput(
            path=str(request.base_model),
            config_sha256=base.config_sha256,
            tensors_sha256=base.tensors_sha256,
            values_sha256=base.values_sha256,
        ),
        merged=found[request.merged] if request.merged is not None else None,
        server=request.server,
        benches=[BenchInput(name=bench.name, sha256=bench.sha256) for bench in benches],
        files={str(file): digests.of_file(file) for file in _named_files(request.evaluation)},
    )


def _named_files(words: Sequence[str]) -> Iterator[Path]:
    """Yield the files that words of `ktbridge eval` name, as FILE, NAME=FILE or --OPTION=FILE."""
    for word in words:
        for name in dict.fromkeys((word, word.rpartition("=")[2])):
            if os.path.isfile(name):
                yield Path(name)


def list_read(request: GateRequest) -> list[Path]:
    """Return the files of the adapter and of the merged checkpoint."""
    return [file for directory in request.hashed for file in _files_of(directory)]


def _files_of(directory: Path) -> Iterator[Path]:
    """Yield the files below a directory in order of their names, but hidden ones; or the one file it is."""
    if directory.is_file():
        yield directory
        return
    for path in sorted(directory.rglob("*")):
        inner = path.relative_to(directory)
        if path.is_file() and not any(part.startswith(".") for part in inner.parts):
            yield path


def digest_gate_step(step: Step, request: GateRequest, inputs: GateInputs) -> str:
    """Return the digest of a step's words, of its server's, and of what both read.

    "" for a step that asks a server or a judge of somebody else: what it has loaded may change behind its
    address.
    """
    asks_judge = any(word.partition("=")[0] == "--judge" for word in step.words)
    if asks_judge or (request.server is not None and step.command != "validate"):
        return ""
    both = [step, step.server] if step.server else [step]
    read = inputs.model_dump()
    return digests.of_json(
        [
            __version__,
            *(word for each in both for word in each.words),
            *(read[name] for name in _READS[step.command]),
        ]
    )
