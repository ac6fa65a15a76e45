"""Open an adapter directory: find its files, detect its layout, classify its tensors.

``scan_adapter`` never raises on content: anything unusable becomes a Problem, so that ``validate``
can list everything at once. ``read_adapter`` is the same but raises errors. Only headers are read.
"""

from __future__ import annotations

import copy
import os
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path

from ktbridge.adapter.adapter import (
    AUTOMODEL_FILE,
    CONFIG_FILE,
    FUSED_FILE,
    MAX_ALPHA,
    MLX_FILE,
    MODEL_FILE,
    WRAPPER,
    Adapter,
    ExpertStack,
    Layout,
    Part,
    is_number,
)
from ktbridge.adapter.checks import many
from ktbridge.adapter.keys import CANONICAL, is_expert_like, parse_key, peft_key, plain_name
from ktbridge.adapter.manifest import MANIFEST_FILE, MAX_BYTES
from ktbridge.codes import problem
from ktbridge.errors import KtbridgeError, Problem, ProblemsError, did_you_mean_path, has_errors
from ktbridge.files.digests import take_stamps
from ktbridge.model import TensorFile, open_tensor_file
from ktbridge.model.jsonfile import read_json_file

_SHARD = re.compile(r"(adapter_model|fused_expert_lora)-(\d+)-of-(\d+)\.safetensors")

_STACKED = re.compile(
    r"\.experts\.(?:(?:gate_proj|up_proj|down_proj|gate_up_proj|w[123])|[0-9]{1,6}\.gate_up_proj)$"
)

LOST = '"lora" taken out'  # what PEFT does where the adapter's name is "lora"
SPARSE = 1 << 30  # bytes from which a file must have more than a twentieth of its size on the disk
MAX_LAYERS = 10_000  # two lists of what lies between layers are made of a number in a name
MAX_ARTIFACTS = 10_000  # files that a manifest may list


def read_adapter(path: str | os.PathLike[str]) -> Adapter:
    """Open an adapter directory of any layout.

    Raises KtbridgeError when the directory can't be used at all: missing, without configuration or
    weights, pickled, truncated. ``validate_adapter`` checks its content.

    Example::

        adapter = read_adapter("raw")
        print(adapter.layout, adapter.rank, adapter.alpha, adapter.expert_layers())
        gate_a = adapter.expert_tensor(0, "gate_lora_a")
        print(gate_a.dtype, gate_a.shape)  # BF16 (E, r, H)
    """
    return require(path, *scan_adapter(path))


def require(path: str | os.PathLike[str], adapter: Adapter | None, problems: Sequence[Problem]) -> Adapter:
    """The adapter of a scan; KtbridgeError if there is none or anything is an error."""
    errors = [finding for finding in problems if finding.severity == "error"]
    if len(errors) == 1:
        raise KtbridgeError(f"{errors[0].where} {errors[0].found}", errors[0].next_step)
    if adapter is None or errors:
        raise ProblemsError(f"{path} can't be read as an adapter", errors)
    return adapter


def scan_adapter(
    path: str | os.PathLike[str], config: dict[str, object] | None = None
) -> tuple[Adapter | None, list[Problem]]:
    """Open an adapter and collect the problems with its files; None if nothing is usable.

    ``config`` replaces a missing adapter_config.json; its rank is taken from the tensors.
    """
    path = Path(path).expanduser()
    problems: list[Problem] = []
    try:
        return _scan(path, problems, config), problems
    except OSError as error:
        found = f"can't be read: {error.strerror}"
        step = f"chmod a+rX {shlex.quote(str(path))}"
        return None, [*problems, problem("KTB001", str(path), found, next_step=step)]


def _scan(path: Path, problems: list[Problem], stand_in: dict[str, object] | None) -> Adapter | None:
    if path.suffix == ".gguf" and path.is_file():
        problems.append(_gguf(path))
        return None
    if not path.is_dir():
        found = "is a file, not an adapter directory" if path.exists() else "does not exist"
        step = did_you_mean_path(path) or None
        if (path.parent / CONFIG_FILE).is_file() and path.exists():
            step = f"give its directory: {path.parent}"
        problems.append(problem("KTB001", str(path), found, "an adapter directory", next_step=step))
        return None
    read = {CONFIG_FILE, MANIFEST_FILE}
    entries = sorted(path.iterdir())
    problems += check_links(
        one for one in entries if one.name in read or one.suffix in (".safetensors", ".gguf")
    )
    if has_errors(problems):
        return None
    if (mlx := _mlx(path)) is not None:
        problems.append(mlx)
        return None
    stamps = take_stamps((path / CONFIG_FILE, path / MANIFEST_FILE))
    absent = stand_in is not None and not (path / CONFIG_FILE).exists()
    config = dict(stand_in or {}) if absent else _read_config(path, problems)
    if config is None:
        return None
    manifest = _read_manifest(path, problems)
    adapter = Adapter(path, config, manifest)
    adapter.stamps = stamps
    for name in _weight_files(path, problems):
        try:
            file = open_tensor_file(path / name)
            refuse_sparse(file.path)
            adapter.files.append(file)
            stamps[file.path] = file.stamp
        except KtbridgeError as error:
            text = error.sentence.removeprefix(f"{path / name} ")
            step = _fetch(error) or _readable(path / name)
            problems.append(problem("KTB005", str(path / name), text, next_step=step))
    if has_errors(problems):
        return None
    twice: list[tuple[Part, Part]] = []
    names: set[str] = set()
    for file in adapter.files:
        twice += _classify(adapter, file, names)
    if len(names) > 1:
        problems.append(_several(path, names))
        return None
    if far := [part for part in _parts(adapter) if part.key.layer >= MAX_LAYERS]:
        found, expected = f"is of layer {far[0].key.layer}", f"layers up to {MAX_LAYERS - 1}"
        problems += many("KTB675", far, found, expected)
        return None
    if twice:
        found = f"gives again what {twice[0][1].where} gives"
        problems += many("KTB014", [part for part, _ in twice], found, "each tensor once")
    if not adapter.experts and not adapter.nonexpert and not adapter.leftovers:
        problems.append(problem("KTB003", str(path), "has no LoRA tensors"))
        return None
    if absent:
        config["r"] = _rank_of(adapter)
    _read_automodel(adapter, problems)
    adapter.layout = layout_of(adapter)
    return adapter


def _parts(adapter: Adapter) -> Iterator[Part]:
    for stack in adapter.experts.values():
        yield from stack.sources
    yield from adapter.nonexpert.values()
    yield from adapter.leftovers


def refuse_sparse(file: Path) -> None:
    """All of an adapter is read: KtbridgeError for a giant that is mostly holes."""
    status = file.stat()
    held = 512 * getattr(status, "st_blocks", 0)
    if status.st_size > SPARSE and 0 < 20 * held < status.st_size:
        raise KtbridgeError(
            f"{file} is {status.st_size} bytes long, of which only {held} are on the disk",
            "copy or save the file again",
        )


def _rank_of(adapter: Adapter) -> int | None:
    """The rank of the first A matrix."""
    parts = [stack.sources[0] for (_, _, half), stack in adapter.experts.items() if half == "A"]
    parts += [part for part in adapter.nonexpert.values() if part.key.half == "A"]
    shapes = [part.entry.shape for part in parts if len(part.entry.shape) > 1]
    return shapes[0][-2] if shapes else None


def _read_automodel(adapter: Adapter, problems: list[Problem]) -> None:
    """NeMo AutoModel's own configuration, by which experts may have another rank than r."""
    file = adapter.path / AUTOMODEL_FILE
    if not file.is_file():
        return
    adapter.automodel = _read_json(file, "KTB002", problems)
    if (adapter.automodel or {}).get("moe_rank_scaling") and adapter.experts:
        rank = _rank_of(adapter)
        adapter.config = {**adapter.config, "rank_pattern": {r".*\.experts\..*": rank}}


def _gguf(path: Path) -> Problem:
    step = f"ktbridge convert {shlex.quote(str(path))} --from gguf --to raw --output D"
    return problem("KTB016", str(path), "is a GGUF adapter", next_step=step)


def _fetch(error: KtbridgeError) -> str | None:
    """Next step for a Git LFS pointer; None for other errors."""
    return error.next_step if " lfs pull" in error.next_step else None


def _mlx(path: Path) -> Problem | None:
    """The problem with a directory that mlx-lm wrote; None for any other."""
    if not (path / MLX_FILE).is_file() or (path / MODEL_FILE).exists():
        return None
    try:
        config = read_json_file(path / CONFIG_FILE, most=MAX_BYTES)
    except KtbridgeError:
        config = {}
    base = "" if isinstance(config.get("model"), str) else " --base-model BASE"
    step = f"ktbridge convert {shlex.quote(str(path))} --from mlx --to raw --output D{base}"
    return problem("KTB019", str(path), f"is an MLX adapter ({MLX_FILE})", next_step=step)


def _elsewhere_found(path: Path, code: str, found: str, expected: str) -> Problem:
    """A directory without an adapter of its own, and those in it, at most two deep, that have one."""
    files = (*path.glob(f"*/{CONFIG_FILE}"), *path.glob(f"*/*/{CONFIG_FILE}"))
    inside, step = sorted(str(file.parent) for file in files), None
    if inside:
        listed = ", ".join(inside[:6]) + (", …" if len(inside) > 6 else "")
        found = f"{found}; there are adapters in {listed}"
        step = f"give one of these directories: ktbridge validate {shlex.quote(inside[-1])}"
    elif (path / "config.json").is_file() and not (path / MODEL_FILE).exists():
        found = f"is a model: it {found}"
        step = "give an adapter's directory here: this one is for the base model's place"
    return problem(code, str(path), found, expected, next_step=step)


def _readable(path: Path) -> str | None:
    """Next step for a file without read permission; None for other errors."""
    return None if os.access(path, os.R_OK) else f"chmod a+r {shlex.quote(str(path))}"


def _read_config(path: Path, problems: list[Problem]) -> dict[str, object] | None:
    file = path / CONFIG_FILE
    if not file.is_file():
        gguf = sorted(path.glob("*.gguf"))
        if gguf:
            problems.append(_gguf(gguf[0]))
            return None
        found = f"has no {CONFIG_FILE}"
        problems.append(_elsewhere_found(path, "KTB001", found, CONFIG_FILE))
        return None
    return _read_json(file, "KTB002", problems)


def _read_json(file: Path, code: str, problems: list[Problem]) -> dict[str, object] | None:
    try:
        return read_json_file(file, most=MAX_BYTES)
    except KtbridgeError as error:
        text = error.sentence.removeprefix(f"{file} ")
        step = _fetch(error) or _readable(file)
        problems.append(problem(code, str(file), text, "a JSON object", next_step=step))
        return None


def _read_manifest(path: Path, problems: list[Problem]) -> dict[str, object] | None:
    file = path / MANIFEST_FILE
    if not file.exists():
        return None
    manifest = _read_json(file, "KTB010", problems)
    if manifest is None:
        return None
    version, status = manifest.get("version"), manifest.get("status")
    if version != 1 or status != "ready":
        found = f"has version {version!r:.80}, status {status!r:.80}"
        problems.append(problem("KTB010", str(file), found, "version 1, status 'ready'"))
    artifacts, lora = manifest.get("artifacts"), manifest.get("lora")
    if isinstance(artifacts, dict) and len(artifacts) > MAX_ARTIFACTS:
        found, expected = f"lists {len(artifacts)} files", f"at most {MAX_ARTIFACTS}"
        problems.append(problem("KTB010", str(file), found, expected))
        return None
    alpha = lora.get("alpha") if isinstance(lora, dict) else None
    if is_number(alpha) and alpha > MAX_ALPHA:
        found = f"lora alpha is {alpha:g}"
        problems.append(problem("KTB103", str(file), found, "a positive number up to 1e6"))
    return manifest


def _weight_files(path: Path, problems: list[Problem]) -> list[str]:
    entries = sorted(path.iterdir())
    names = [entry.name for entry in entries if entry.is_file()]
    for entry in entries:  # a dangling link would silently drop half of the adapter
        ours = entry.name in (FUSED_FILE, MODEL_FILE) or _SHARD.fullmatch(entry.name)
        if ours and entry.name not in names:
            kind = "is a link to nowhere" if entry.is_symlink() else "is not a regular file"
            problems.append(problem("KTB005", str(entry), kind))
    found: list[str] = []
    for whole in (FUSED_FILE, MODEL_FILE):
        stem = whole.removesuffix(".safetensors")
        shards = [name for name in names if (match := _SHARD.fullmatch(name)) and match[1] == stem]
        if whole in names:
            found.append(whole)
            if shards:
                beside = f"lies beside {whole}, of which it would be a part"
                problems.append(problem("KTB014", str(path / shards[0]), beside, "one or the other"))
        elif shards:
            found += shards
            problems += _missing_shards(path, shards)
    full = [name for name in names if name.startswith("kt_full_experts")]
    if full:
        problems.append(problem("KTB006", str(path / full[0]), "holds fully trained experts"))
    elif "adapter_model.bin" in names:
        pickled, where = "is a pickle file", str(path / "adapter_model.bin")
        if found:
            step = "remove it: some loaders take it instead of the safetensors beside it"
            problems.append(problem("KTB004", where, pickled, severity="warning", next_step=step))
        else:
            problems.append(problem("KTB004", where, pickled))
    elif not found and (gguf := sorted(path.glob("*.gguf"))):
        problems.append(_gguf(gguf[0]))
    elif not found:
        expected = f"{MODEL_FILE} or {FUSED_FILE}"
        problems.append(_elsewhere_found(path, "KTB003", "has no adapter weights", expected))
    return found


def _missing_shards(path: Path, shards: list[str]) -> Iterator[Problem]:
    numbers = [match.groups() for name in shards if (match := _SHARD.fullmatch(name))]
    present = {int(number) for _, number, _ in numbers}
    total = max(int(count) for _, _, count in numbers)
    missing = sorted(set(range(1, total + 1)) - present)[:5] if total <= 100_000 else [total]
    if missing:
        found = f"has no shard {', '.join(map(str, missing))} of {total}"
        yield problem("KTB008", str(path), found)


@lru_cache(maxsize=4096)
def _elsewhere(experts: str) -> bool:
    """Return whether a path to a layer's experts is in a vision tower or a draft block."""
    key = parse_key(f"{experts}.experts.0.up_proj.lora_A.weight")
    return key.is_vision or key.is_draft


def _classify(adapter: Adapter, file: TensorFile, names: set[str]) -> Iterator[tuple[Part, Part]]:
    """Add a file's tensors to the adapter by role; yields duplicates, each with the first one.

    Those under other names than PEFT's are listed as well; the adapters' names in them go into ``names``.
    """
    for entry in file.entries.values():
        part = Part(file, entry, parse_key(entry.name))
        key = part.key
        other: Part | None = None
        if key.kind == "expert" and _elsewhere(entry.name.partition(".experts.")[0]):
            adapter.leftovers.append(part)  # its layer number is not the text model's
        elif key.kind in ("fused", "expert"):
            slot = (key.layer, key.projection, key.half)
            stack = adapter.experts.setdefault(slot, ExpertStack())
            if key.kind == "fused":
                other = stack.fused or next(iter(stack.parts.values()), None)
                stack.fused = stack.fused or part
            else:
                other = stack.fused or stack.parts.get(key.expert)
                stack.parts.setdefault(key.expert, part)
        elif key.kind == "lora" and _STACKED.search(key.module):
            adapter.leftovers.append(part._replace(key=key._replace(kind="sglang-3d")))
        elif key.kind == "lora" and is_expert_like(key.module):
            adapter.leftovers.append(part._replace(key=key._replace(kind="unread")))
        elif key.kind == "lora":
            other = adapter.nonexpert.setdefault(peft_key(key.module, key.half), part)
        else:
            adapter.leftovers.append(part)
        if other is not None and other is not part:
            yield part, other
        spelling = plain_name(entry.name)
        if spelling.name == entry.name:
            continue
        extra = [f"{WRAPPER} {name}" for name in spelling.wrappers]
        if spelling.adapter:
            names.add(spelling.adapter)
            extra.append(f"the adapter's name {spelling.adapter}")
        if spelling.lost:
            extra.append(LOST)
        for text in extra:
            adapter.respelled.setdefault(text, []).append(part)


def _several(path: Path, names: set[str]) -> Problem:
    """A state dict of a model with several adapters: they have the same keys but for their names."""
    listed = sorted(names)
    found = f"has {len(names)} adapters in one file, by the names in its keys: {', '.join(listed[:6])}"
    step = f"save them apart: model.save_pretrained(DIR, selected_adapters=[{listed[0]!r}])"
    return problem("KTB217", str(path), found, "one adapter", next_step=step)


def with_stacks(adapter: Adapter) -> Adapter:
    """The adapter with upstream SGLang's stacked tensors, which KT's engines don't read, as its experts'.

    They have the shapes of raw ones: gate and up A [E,r,H], B [E,I,r]; down A [E,r,I], B [E,H,r].
    """
    stacked = [part for part in adapter.leftovers if part.key.kind == "sglang-3d"]
    names = {part.key.leaf for part in stacked}
    if not stacked or not names <= CANONICAL.keys():
        return adapter
    whole = copy.copy(adapter)
    whole.leftovers = [part for part in adapter.leftovers if part not in stacked]
    whole.experts = dict(adapter.experts)
    for part in stacked:
        slot = (part.key.layer, CANONICAL[part.key.leaf], part.key.half)
        whole.experts.setdefault(slot, ExpertStack()).fused = part
    whole.layout = layout_of(whole)
    return whole


def layout_of(adapter: Adapter) -> Layout:
    """The layout by files and by the halves that are there."""
    if any(file.name.startswith("fused_expert_lora") for file in adapter.files):
        return "raw"
    if not adapter.experts:
        return "nonexpert"
    return "merged" if adapter.nonexpert else "expert"


# --- links: they may lead to files of the reader's own, which nobody meant to have read, copied or uploaded


def leads_out(path: Path) -> Path | None:
    """Return a link's target, if it is there, and neither in its directory nor in the Hub's cache.

    There a snapshot consists of links into its repository's blobs.
    """
    if not path.is_symlink() or not path.exists():
        return None
    target, place = Path(os.path.realpath(path)), Path(os.path.realpath(path.parent))
    within = [place]
    for above in place.parents:
        if above.name == "snapshots":
            within.append(above.parent / "blobs")
    return None if any(one in target.parents for one in within) else target


def check_links(paths: Iterable[Path]) -> Iterator[Problem]:
    """KTB930 for each link among ``paths`` that leads out."""
    for path in paths:
        if target := leads_out(path):
            copy = f"cp --remove-destination {shlex.quote(str(target))} {shlex.quote(str(path))}"
            step = f"if that is meant, put the file there: {copy}"
            found = f"is a link to {target}"
            yield problem("KTB930", str(path), found, "a file in its directory", next_step=step)
