"""llama.cpp's GGUF adapters, through the ``gguf`` package (PyPI), which is imported when needed.

Experts are stacked tensors ``blk.L.ffn_{gate,up,down}_exps.weight.lora_{a,b}`` [E,r,in], [E,out,r];
everything else has llama.cpp's name of the base tensor, taken from gguf's tensor map.
llama.cpp scales by ``adapter.lora.alpha`` / the tensor's own rank (1 where there is no alpha), so
halves of different rank fit as long as their alphas agree, or differ by a power of two.

An adapter's rows must be permuted as the base model's converter permutes them: q and k rows of
llama-type models (Mixtral) are permuted here; the value heads of linear attention (Qwen3.5,
Qwen3-Next) and kv_b_proj of DeepSeek are reordered in ways not implemented here, and are refused.
DeepSeek's other attention projections are multiplied without LoRA, which is refused as well (KTB630).
References: llama.cpp's convert_lora_to_gguf.py, conversion scripts, src/llama-adapter.cpp, src/models.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ktbridge.adapter.adapter import CONFIG_FILE, Adapter, Slot, is_number
from ktbridge.adapter.blocks import BITS, Block
from ktbridge.adapter.checks.inventory import check_tensors
from ktbridge.adapter.formats.raw_form import Request, fail_if, local_config, one_scale, raw_form
from ktbridge.adapter.keys import PEFT_PREFIX, PROJECTIONS, Key, parse_key, peft_key
from ktbridge.adapter.lora_config import build_config
from ktbridge.adapter.manifest import MANIFEST_FILE
from ktbridge.adapter.outputs import Output, Rows, piece
from ktbridge.adapter.scan import check_links, refuse_sparse
from ktbridge.codes import problem
from ktbridge.errors import KtbridgeError, Problem, UsageError
from ktbridge.files.digests import take_stamps
from ktbridge.install import install_hint
from ktbridge.model import FAMILIES, ModelConfig, family_of
from ktbridge.model.jsonfile import read_json_file
from ktbridge.model.tensorfile import DTYPE_BITS

if TYPE_CHECKING:
    from ktbridge.adapter.blocks import Bits

GGUF_FILE = "adapter_model.gguf"
_MODULES = (
    *(f"self_attn.{name}_proj" for name in ("q", "k", "v", "o", "q_a", "q_b", "kv_b")),
    "self_attn.kv_a_proj_with_mqa",
    "mlp.shared_expert_gate",
    *(f"mlp.{name}_proj" for name in PROJECTIONS),
    *(f"linear_attn.{name}" for name in ("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b")),
    "linear_attn.out_proj",
)
_NAME = re.compile(r"blk\.([0-9]{1,6})\.([a-z_0-9]+)\.weight\.lora_([ab])")
_EXPERTS = {f"ffn_{name}_exps": name for name in PROJECTIONS}


class _Graph(NamedTuple):
    """llama.cpp's graph of an architecture: its names of modules, and what it does with their weights.

    ``unapplied``: multiplied without LoRA, so an adapter to them loads and does nothing. ``moved``: stored
    in another arrangement. ``rotated``: q and k have rows permuted for ggml's rotary embedding.
    """

    shared: str = "shared_expert"
    router: str = "mlp.gate"  # llama.cpp has one name for both
    unapplied: tuple[str, ...] = ()
    moved: tuple[str, ...] = ()
    rotated: bool = False


# Graphs that differ from the usual. src/models/deepseek2.cpp of llama-cpp-python 0.3.36; `make test-llama`
# measures what isn't applied.
_GRAPHS = {
    "deepseek2": _Graph(
        shared="shared_experts",
        unapplied=("q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"),
        moved=("kv_b_proj",),
    ),
    "glm4moe": _Graph(shared="shared_experts"),
    "gpt-oss": _Graph(router="mlp.router"),
    "llama": _Graph(rotated=True),
}
_MOVED = "llama.cpp rearranges this module's weights, and an adapter to it would have to follow"


# Limits of a header.
_MAX_BYTES = 1 << 24  # of a header
_MAX_TENSORS = 20_000  # five times what the adapter of all modules of a hundred layers has
_MAX_FIELDS = 1_000
_MAX_ITEMS = 10_000  # of all arrays together
_MAX_NAME = 1_000  # bytes
_MAX_DIMENSIONS = 4  # ggml's own
_SCALARS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # bytes by type
_STRING, _ARRAY = 8, 9


def _graph(architecture: str) -> _Graph:
    return _GRAPHS.get(architecture, _Graph())


def _package() -> Any:
    try:
        import gguf
    except ModuleNotFoundError as error:
        raise KtbridgeError(
            "reading and writing GGUF needs the Python package gguf, which is not installed",
            install_hint("gguf"),
        ) from error
    return gguf


def write_gguf(adapter: Adapter) -> tuple[list[Output], list[Problem]]:
    """One GGUF file, with adapter_config.json beside it."""
    package, base = _package(), adapter.base
    family = family_of(base.model_type) if base else None
    architecture = family.llama_cpp if family else ""
    if base is None or not architecture:
        what = f"for {base.model_type!r}" if base else "without the base model's config.json"
        step = "pass --base-model with a model directory of a supported family"
        found = f"can't be named as llama.cpp names tensors {what}"
        return [], [problem("KTB720", str(adapter.path), found, next_step=step)]
    # llama.cpp divides alpha by each tensor's rank: only the alphas must match.
    rank, alpha, factor, problems = one_scale(adapter, same_rank=False)
    names = _names(package, architecture, max((*adapter.expert_layers(), base.num_layers)) + 1)
    experts, nonexpert = adapter.blocks()
    pieces = [
        piece(f"blk.{layer}.ffn_{projection}_exps.weight.lora_{half.lower()}", block)
        for (layer, projection, half), block in sorted(experts.items())
    ]
    problems += [*_unapplied(adapter, architecture), *_other_experts(adapter, base)]
    for key, block in sorted(nonexpert.items()):
        parsed = parse_key(key)
        if parsed.leaf in _graph(architecture).unapplied:
            continue
        name = names.get(_plain(parsed))
        reason = _refused(parsed, architecture)
        if name is None or reason:
            if parsed.half == "A":
                found = reason or f"has no name in llama.cpp's {architecture}"
                step = "leave the module out of training, or merge it into the base model"
                problems.append(problem("KTB720", f"{adapter.path}: {key}", found, next_step=step))
            continue
        if parsed.half == "B":
            block = _permuted(block, parsed, architecture, base, back=False)
            block = block.scaled(factor, f"{adapter.path}: {key}")
        pieces.append(piece(f"{name}.weight.lora_{parsed.half.lower()}", block))
    modules = [*adapter.expert_modules(), *adapter.nonexpert_modules()]
    config = build_config(adapter, rank, alpha, modules)
    metadata = {
        "general.architecture": architecture,
        "general.type": "adapter",
        "general.name": Path(str(adapter.base_model or "adapter")).name,
        "adapter.type": "lora",
        "adapter.lora.alpha": alpha,
        # Our own keys: llama.cpp has none for these, and loaders ignore unknown keys.
        "ktbridge.base_model": str(adapter.base_model or ""),
        "ktbridge.module_prefix": adapter.module_prefix(),
    }
    if float(np.float32(alpha)) != alpha:
        found = f"alpha {alpha!r} is not a float32, which is what GGUF holds"
        where, step = str(adapter.path / CONFIG_FILE), "choose another format"
        problems.append(problem("KTB720", where, found, next_step=step))
    output = Output("gguf", config, {GGUF_FILE: pieces}, rank, alpha)
    output.header = partial(_header, metadata)
    output.alignment = package.GGUF_DEFAULT_ALIGNMENT
    return [output], problems


def _unapplied(adapter: Adapter, architecture: str) -> Iterator[Problem]:
    """KTB630, once for all modules whose LoRA llama.cpp would load and never apply."""
    keys = [part.key for part in adapter.nonexpert.values()]
    found = {(k.leaf, k.layer) for k in keys if k.leaf in _graph(architecture).unapplied}
    if found:
        names = ", ".join(sorted({leaf for leaf, _ in found}))
        layers = len({layer for _, layer in found})
        where = f"{layers} layer{'s' * (layers > 1)}"
        what = f"LoRA of {names} in {where}, which llama.cpp's {architecture} never applies"
        yield problem("KTB630", str(adapter.path), what)


def _other_experts(adapter: Adapter, base: ModelConfig) -> Iterator[Problem]:
    """KTB604: llama.cpp compares no number of experts; too many are ignored, too few end the process."""
    counts = {stack.count for stack in adapter.experts.values()}
    if base.num_experts and counts - {base.num_experts}:
        found = f"LoRA for {', '.join(map(str, sorted(counts)))} experts"
        yield problem("KTB604", str(adapter.path), found, f"{base.num_experts} experts")


def _header(metadata: dict[str, object], name: str, rows: Rows) -> bytes:
    """Return what precedes the first tensor: ``metadata`` by key, and a row per tensor."""
    package = _package()
    with TemporaryDirectory() as folder:
        path = Path(folder) / name
        writer = package.GGUFWriter(path, metadata["general.architecture"])
        for key, value in metadata.items():
            if key == "general.architecture":
                continue  # the writer's own
            if isinstance(value, str):
                writer.add_string(key, value)
            else:
                writer.add_float32(key, value)
        for key, dtype, shape in rows:
            # raw_dtype is the real type; the numpy dtype only keeps the writer from unpacking bytes.
            kind = package.GGMLQuantizationType[dtype]
            nbytes = math.prod(shape) * DTYPE_BITS[dtype] // 8
            writer.add_tensor_info(key, shape, np.dtype("u2"), nbytes, raw_dtype=kind)
        try:
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
        finally:
            writer.close()
        header = path.read_bytes()
    return header + bytes(-len(header) % package.GGUF_DEFAULT_ALIGNMENT)


def read_gguf(request: Request) -> tuple[Adapter, list[Problem]]:
    """A GGUF adapter: a file, or the one ``.gguf`` file in a directory.

    Raises KtbridgeError for anything but a LoRA adapter whose tensors are BF16, F16 or F32.
    """
    package, path = _package(), request.path
    file = path
    if path.is_dir():
        files = sorted(path.glob("*.gguf"))
        if len(files) != 1:
            raise UsageError(f"{path} has {len(files)} .gguf files", "name the file itself")
        file = files[0]
    if not file.is_file():  # opening a pipe would block forever
        found = "is not a regular file" if file.exists() else "does not exist"
        raise KtbridgeError(f"{file} {found}", "pass a GGUF file")
    fail_if(file, [*check_links([file] if path.is_dir() else [])])
    refuse_sparse(file)
    stamps = take_stamps((file,))
    try:
        check_header(file)
        with np.errstate(all="ignore"):  # sizes in a malicious file overflow
            reader = package.GGUFReader(file)
            fields = {name: field.contents() for name, field in reader.fields.items()}
            tensors = list(reader.tensors)
    except OSError as error:
        raise KtbridgeError(f"{file} can't be read: {error.strerror}") from error
    except (ValueError, IndexError, KeyError, OverflowError, MemoryError, TypeError) as error:
        raise KtbridgeError(
            f"{file} is not a GGUF file that can be read: {error}", "copy or convert it again"
        ) from error
    kind = (fields.get("general.type"), fields.get("adapter.type"))
    if kind != ("adapter", "lora"):
        raise KtbridgeError(f"{file} is not a LoRA adapter", "pass an adapter, not a model")
    made, warnings = _arranged(package, file, request, fields, tensors)
    made.stamps = stamps
    return made, warnings


def _arranged(
    package: Any, file: Path, request: Request, fields: dict[str, object], tensors: list[Any]
) -> tuple[Adapter, list[Problem]]:
    config = _beside(request.path, CONFIG_FILE)
    named = config.get("base_model_name_or_path") or fields.get("ktbridge.base_model")
    base_model = str(named) if named else None
    base = local_config(request.base_model, base_model)
    prefix = fields.get("ktbridge.module_prefix")
    if not isinstance(prefix, str):
        prefix = base.prefix if base else "model."
    architecture = str(fields.get("general.architecture"))
    if architecture not in {family.llama_cpp for family in FAMILIES} - {""}:
        raise KtbridgeError(f"{file} is for {architecture!r}, a family we don't know", "")
    modules = {name: module for module, name in _names(package, architecture, _layers(tensors)).items()}
    alpha = fields.get("adapter.lora.alpha")
    experts: dict[Slot, Block] = {}
    nonexpert: dict[str, Block] = {}
    ranks = [0, 0]  # of experts and of all others, by the first tensor
    findings: list[Problem] = []
    for tensor in tensors:
        match = _NAME.fullmatch(tensor.name)
        block = _block(file, tensor)
        where = f"{file}: {tensor.name}"
        if match is None or block is None:
            what = "has no place in a LoRA adapter" if match is None else "is quantized"
            findings.append(problem("KTB201" if match is None else "KTB303", where, what))
            continue
        layer, name, half = int(match[1]), match[2], match[3].upper()
        if len(block.shape) != (3 if name in _EXPERTS else 2):
            findings.append(problem("KTB302", where, f"has shape {list(block.shape)}"))
            continue
        if name in _EXPERTS:
            experts[layer, _EXPERTS[name], half] = block
            ranks[0] = ranks[0] or block.shape[1 if half == "A" else 2]
            continue
        module = modules.get(f"blk.{layer}.{name}")
        if module is None:
            findings.append(problem("KTB201", where, f"is no module of {architecture} we know"))
            continue
        key = peft_key(f"{prefix}{module.removeprefix('model.')}", half)
        if reason := _refused(parse_key(key), architecture):
            step = "convert the adapter from its training output"
            findings.append(problem("KTB720", where, reason, next_step=step))
            continue
        if half == "B":
            block = _permuted(block, parse_key(key), architecture, base, back=True)
        nonexpert[key] = block
        ranks[1] = ranks[1] or block.shape[0 if half == "A" else 1]
    if not tensors:
        findings.append(problem("KTB003", str(file), "has no LoRA tensors"))
    fail_if(file, findings)
    rank, rest = ranks[0] or ranks[1], ranks[1] or ranks[0]
    # llama.cpp: no alpha means a scale of one.
    alphas = [float(alpha) if is_number(alpha) else float(each) for each in (rank, rest)]
    told = {**config, "r": rest, "lora_alpha": alphas[1], "base_model_name_or_path": base_model}
    told |= dict.fromkeys({"use_rslora"} & {*told}, False)
    made = raw_form(Adapter(file, told, _beside(request.path, MANIFEST_FILE)), "gguf")
    made.manifest = {**(made.manifest or {}), "lora": {"rank": rank, "alpha": alphas[0]}}
    made.prefix, made.tensors_in = prefix, len(tensors)
    made.hold(experts, nonexpert)
    fail_if(file, [*check_tensors(made)])
    return made, [replace(item, severity="warning") for item in _unapplied(made, architecture)]


def _beside(path: Path, name: str) -> dict[str, object]:
    """A JSON file of our own directories; other GGUF adapters are single files."""
    if not path.is_dir() or not (path / MANIFEST_FILE).is_file() or not (path / name).is_file():
        return {}
    return read_json_file(path / name)


def _layers(tensors: list[Any]) -> int:
    layers = [int(match[1]) for t in tensors if (match := _NAME.fullmatch(t.name))]
    return min(max(layers, default=0) + 1, 10_000)


def _block(file: Path, tensor: Any) -> Block | None:
    dtype = tensor.tensor_type.name
    if dtype not in BITS:
        return None
    bits = np.dtype(BITS[dtype])
    shape = tuple(int(size) for size in reversed(tensor.shape.tolist()))
    offset = int(tensor.data_offset)

    def load() -> Bits:
        # Not mapped: truncating a mapped file would kill the process (SIGBUS).
        values = np.fromfile(file, bits, math.prod(shape), offset=offset)
        if values.size != math.prod(shape):
            raise KtbridgeError(f"{file} ends inside {tensor.name}", "copy or convert it again")
        return values.reshape(shape)

    return Block(dtype, shape, load)


def _names(package: Any, architecture: str, layers: int) -> dict[str, str]:
    """model.layers.L.self_attn.q_proj -> blk.L.attn_q, for modules that can have LoRA."""
    kinds = package.MODEL_ARCH_NAMES
    arch = next((key for key, name in kinds.items() if name == architecture), None)
    if arch is None:
        raise KtbridgeError(
            f"the installed gguf package doesn't know {architecture!r}", "pip install -U gguf"
        )
    table = package.get_tensor_name_map(arch, layers)
    names: dict[str, str] = {}
    graph = _graph(architecture)
    of_shared = [f"mlp.{graph.shared}.{name}_proj" for name in PROJECTIONS]
    for layer in range(layers):
        for module in (*_MODULES, graph.router, *of_shared):
            hf = f"model.layers.{layer}.{module}"
            name = table.get_name(hf)
            if name is not None:
                names[hf] = name
    return names


def _plain(key: Key) -> str:
    """The module path as in text-only models, as gguf's tensor map expects it."""
    module = re.sub(r"^.*?(?=layers\.[0-9])", "model.", key.module)
    return module.replace(".block_sparse_moe.", ".mlp.")


def _refused(key: Key, architecture: str) -> str:
    moved = ".linear_attn." in key.module or key.leaf in _graph(architecture).moved
    return _MOVED if moved else ""


def _permuted(block: Block, key: Key, architecture: str, base: ModelConfig | None, *, back: bool) -> Block:
    """q and k rows permuted for ggml's rotary embedding, for architectures that use it."""
    if not _graph(architecture).rotated or key.leaf not in ("q_proj", "k_proj"):
        return block
    name = "num_attention_heads" if key.leaf == "q_proj" else "num_key_value_heads"
    text = base.text if base else {}
    heads = text.get(name) or text.get("num_attention_heads")
    if type(heads) is not int or heads <= 0 or block.shape[0] % (2 * heads):
        raise KtbridgeError(
            f"{PEFT_PREFIX}{key.module} can't be permuted without the base model's {name}",
            "pass --base-model with the model's directory",
        )
    half = block.shape[0] // heads // 2
    split = (heads, half, 2) if back else (heads, 2, half)
    return block.then(block.shape, lambda bits: bits.reshape(*split, -1).swapaxes(1, 2).reshape(block.shape))


def check_header(file: Path) -> None:
    """Walk the header before gguf's reader does, which makes arrays for every number in it.

    That follows arrays in arrays without end, too: a header of some megabytes would take gigabytes, or end in
    RecursionError. Raises ValueError for a header that isn't whole, or is more than an adapter's; OSError of
    the file. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
    """
    size = file.stat().st_size
    with open(file, "rb") as stream:
        _Header(stream.read(_MAX_BYTES), size).check()


class _Header:
    """``data``: the file's beginning; ``size``: all of its bytes."""

    def __init__(self, data: bytes, size: int) -> None:
        self._data, self._size = data, size
        self._at = 0
        self._order = "<"
        self._items = 0

    def check(self) -> None:
        if self._take(4) != b"GGUF":
            raise ValueError("it doesn't begin with GGUF")
        version = self._number("I")
        if version & 0xFFFF == 0:  # the other byte order
            self._order = ">"
        tensors, fields = self._number("Q"), self._number("Q")
        for count, most, what in ((tensors, _MAX_TENSORS, "tensors"), (fields, _MAX_FIELDS, "fields")):
            if count > most:
                raise ValueError(f"it has {count:,} {what}; an adapter has at most {most:,}")
        for _ in range(fields):
            self._text(_MAX_NAME)
            self._value(self._number("I"))
        for _ in range(tensors):
            self._tensor()

    def _value(self, kind: int) -> None:
        if kind in _SCALARS:
            self._take(_SCALARS[kind])
        elif kind == _STRING:
            self._text(_MAX_BYTES)
        elif kind == _ARRAY:
            kind, count = self._number("I"), self._number("Q")
            self._items += count
            if self._items > _MAX_ITEMS:
                raise ValueError(f"it has an array of {count:,} items, which no adapter has")
            if kind == _ARRAY:
                raise ValueError("it has an array of arrays, which no adapter has")
            for _ in range(count):
                self._value(kind)
        else:
            raise ValueError(f"it has a field of the unknown type {kind}")

    def _tensor(self) -> None:
        name = self._text(_MAX_NAME)
        count = self._number("I")
        if count > _MAX_DIMENSIONS:
            raise ValueError(f"{name} has {count:,} dimensions; {_MAX_DIMENSIONS} are the most")
        elements = 1
        for _ in range(count):
            elements *= self._number("Q")
        self._take(4)
        offset = self._number("Q")
        # No type takes less than a bit per element.
        if offset > self._size or not 0 < elements <= 8 * self._size:
            raise ValueError(f"{name} has {elements:,} elements at byte {offset:,}, not in the file")

    def _text(self, most: int) -> str:
        size = self._number("Q")
        if size > most:
            raise ValueError(f"it has a text of {size:,} bytes; {most:,} are the most")
        return self._take(size).decode()

    def _number(self, kind: str) -> int:
        number: int = struct.unpack(self._order + kind, self._take(struct.calcsize(kind)))[0]
        return number

    def _take(self, count: int) -> bytes:
        end = self._at + count
        if end > len(self._data):
            if end <= self._size:
                raise ValueError(f"its header is longer than {_MAX_BYTES:,} bytes")
            raise ValueError(f"it ends inside what begins at byte {self._at}")
        taken, self._at = self._data[self._at : end], end
        return taken
