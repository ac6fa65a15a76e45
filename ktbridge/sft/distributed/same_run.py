"""A comparison of all processes before the first step: each must train the same run.

A process with other rows or another learning rate takes part in every exchange as the right one does, and the
run ends well with another adapter. So each describes its run in parts, name -> short text or digest, twice:
once it has joined, and once it has prepared its rows. All get what all have said, and all end where one
differs. ``failing_together`` tells the others why a process could not prepare.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import TYPE_CHECKING

import ktbridge
from ktbridge.codes import problem
from ktbridge.errors import KtbridgeError, Problem, ProblemsError
from ktbridge.files import digests
from ktbridge.install import LINEAR_ATTENTION, version_of
from ktbridge.model import find_model
from ktbridge.model.identity import fingerprint
from ktbridge.sft.config.fields import options
from ktbridge.sft.distributed import ANSWER_SECONDS, exchange_texts, joined, start
from ktbridge.sft.launch import World, several_launchers, world
from ktbridge.sft.model import choose_device
from ktbridge.sft.resume import FINGERPRINT_FILE, HELD_OUT, checkpoints_dir, resumable

if TYPE_CHECKING:
    from datasets import Dataset

    from ktbridge.sft.config import TrainConfig
    from ktbridge.sft.prepare import Prepared

Parts = dict[str, str]
"""Inputs of one process's run: names of its parts, and a short text or a digest of each."""

_PACKAGES = (
    "torch", "transformers", "peft", "trl", "accelerate", "tokenizers", "datasets", "flash-attn", "kernels",
    *LINEAR_ATTENTION,
)  # fmt: skip
_LAUNCH = ("FSDP_", "ACCELERATE_USE_", "ACCELERATE_MIXED_PRECISION", "ACCELERATE_DYNAMO_")
"""Variables of `accelerate launch` begin so, which say how the model is shared out."""
_TOKENIZER = (
    "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "merges.txt", "tokenizer.model", "tiktoken.model",
)  # fmt: skip
_HOST, _FAILED, _DISK = "host", "failed", "disk"
_SHOWN = 80  # characters of a value
_HASH = 12


class _State:
    compared = False
    over = False
    """True once all know that the run starts, or that it doesn't: nobody waits to be told."""


def join(config: TrainConfig) -> World:
    """Join the other processes of this run, once, and compare what is known before rows are read.

    Does nothing for a process that is alone. Raises what ``start`` raises, and ``ProblemsError`` on every
    rank where one would train otherwise than the others.
    """
    parts = {} if joined() or world().size == 1 else describe_start(config)
    here = start(config.ddp_timeout, config.use_cpu)
    if here.size > 1 and not _State.compared:
        _State.compared = True
        compare_hosts(parts or describe_start(config))
    return here


def compare_prepared(config: TrainConfig, ready: Prepared) -> list[Problem]:
    """Compare what all ranks have prepared, wait for those that still do, and return notes.

    Raises ``ProblemsError`` on every rank where one has prepared otherwise or couldn't.
    """
    if world().size == 1:
        return []
    compare_hosts(describe_prepared(config, ready), config.ddp_timeout)
    _State.over = True
    if not config.save_steps or config.save_only_model:
        return []
    notes = _unseen_disk(_look_at_disk(config))
    if notes and config.load_best_model_at_end and os.environ.get("ACCELERATE_USE_FSDP"):
        # Each rank loads its own shards of the best step.
        notes = [replace(note, severity="error") for note in notes]
        raise ProblemsError("load_best_model_at_end needs a disk that all ranks see.", notes)
    return notes


@contextmanager
def failing_together() -> Iterator[None]:
    """Context of ``prepare``: where it fails, the other ranks are told, which would wait."""
    try:
        yield
    except KtbridgeError as error:
        tell(error)
        raise


def tell(error: KtbridgeError) -> None:
    """Tell the other ranks, once, why this one can't start; it joins for that if no launcher sees its end."""
    if _State.over or world().size == 1 or not (joined() or several_launchers()):
        return
    _State.over = True
    with suppress(KtbridgeError):  # our own message is the one that counts
        start(ANSWER_SECONDS)
        found = error.problems[:3] if isinstance(error, ProblemsError) else ()
        text = "; ".join([error.sentence.rstrip("."), *map(str, found)])
        exchange_texts({_HOST: socket.gethostname(), _FAILED: text}, ANSWER_SECONDS)


def describe_start(config: TrainConfig) -> Parts:
    """Return the parts that are known before rows are read: settings, packages, launch, base model."""
    parts = {
        f"{prefix}{key}": _text(getattr(values, key))
        for prefix, values in (("", config), ("kt_config.", config.kt_config))
        for key, option in options(type(values)).items()
        if not option.each_host
    }
    parts["number of processes"] = str(world().size)
    parts["device"] = choose_device(config).type
    parts["version of ktbridge"] = f"{ktbridge.__version__}, code {_own_code()}"
    parts |= {f"version of {name}": version_of(name) or "not installed" for name in _PACKAGES}
    parts |= {key: value for key, value in os.environ.items() if key.startswith(_LAUNCH)}
    for name, path in (
        ("base model", config.model_name_or_path),
        ("kt_config.kt_weight_path", config.kt_config.kt_weight_path),
    ):
        if path:
            parts |= _described(name, lambda path=path: _model(find_model(path)))  # type: ignore[misc]
    if adapter := config.adapter_name_or_path:
        parts |= _described("adapter_name_or_path", lambda: _adapter(Path(adapter)))
    return parts


def describe_prepared(config: TrainConfig, ready: Prepared) -> Parts:
    """Return the parts that ``prepare`` has found: rows as tokens, steps, checkpoint."""
    fitted, held = ready.fitted, ready.held_out
    parts = {
        "rows": f"{len(fitted.dataset):,} sequences, digest {digest_of_tokens(fitted.dataset)}",
        "held-out rows": "none",
        "image processor": _short(json.dumps(ready.fingerprint.get("image processor"))),
        "steps": str(ready.steps),
        "steps between evaluations": str(ready.eval_steps),
        "step to go on from": str(ready.resumption.step),
        "checkpoint": "none",
    }
    if held is not None:
        parts["held-out rows"] = f"{len(held.dataset):,} sequences, digest {digest_of_tokens(held.dataset)}"
    if ready.stream or ready.vision:  # of which the tokens don't tell all
        parts["rows as read"] = _short(str(ready.fingerprint["rows"]))
        parts["held-out rows as read"] = _short(json.dumps(ready.fingerprint.get(HELD_OUT)))
    if place := ready.resumption.checkpoint:
        digest = _short(digests.of_file(place / FINGERPRINT_FILE))
        without = "" if resumable(place) else ", without the optimizer's state"
        parts["checkpoint"] = f"{place.name}, digest {digest}{without}"
    return parts


def compare_hosts(parts: Mapping[str, str], seconds: float | None = None) -> None:
    """Exchange each rank's ``parts``; the others come within ``seconds``, by default ``ANSWER_SECONDS``.

    Raises ``ProblemsError`` with a problem for each part in which ranks differ from rank 0, and
    ``KtbridgeError`` for a rank that has failed or is lost.
    """
    found = exchange_texts({_HOST: socket.gethostname(), **parts}, seconds or ANSWER_SECONDS)
    _State.over = any(_FAILED in theirs for theirs in found) or bool(differences(found))
    for rank, theirs in enumerate(found):
        if _FAILED in theirs:
            raise KtbridgeError(
                f"rank {rank} on {theirs[_HOST]} can't start: {theirs[_FAILED]}",
                "Its own message says more. Mend it there, then start all again.",
            )
    if problems := differences(found):
        raise ProblemsError(
            "the processes of this run would not train the same; nothing was started.", problems
        )


def differences(found: Sequence[Mapping[str, str]]) -> list[Problem]:
    """Return a problem for each part in which ranks of a host have another value than rank 0."""
    main = found[0]
    there: dict[tuple[str, str, str], list[int]] = {}
    for rank, theirs in enumerate(found):
        for name in sorted((main.keys() | theirs.keys()) - {_HOST}):
            if main.get(name) != theirs.get(name):
                key = (name, theirs[_HOST], theirs.get(name, "not set"))
                there.setdefault(key, []).append(rank)
    return [
        problem(
            "KTC090",
            f"{_ranks(ranks)} on {host}: {name}",
            value,
            f"{main.get(name, 'not set')}, as rank 0 on {main[_HOST]} has",
            _step(name),
        )
        for (name, host, value), ranks in there.items()
    ]


def digest_of_tokens(dataset: Dataset) -> str:
    """Return a digest of all columns of prepared rows, in their order: token ids, labels, lengths."""
    import pyarrow as pa

    digest = hashlib.sha256()

    def add(values: pa.Array) -> None:
        if pa.types.is_list(values.type) or pa.types.is_large_list(values.type):
            digest.update(values.value_lengths().cast("int64").fill_null(-1).to_numpy(False).tobytes())
            add(values.flatten())
        elif pa.types.is_integer(values.type):
            digest.update(values.cast("int64").fill_null(-1).to_numpy(False).tobytes())
        else:
            digest.update(json.dumps(values.to_pylist(), default=str).encode())

    for table in dataset.with_format("arrow").iter(1000):
        for name in sorted(table.column_names):
            digest.update(name.encode())
            add(table[name].combine_chunks())
    return digest.hexdigest()[:_HASH]


def _step(name: str) -> str:
    if name.startswith("version of"):
        return "Install the same versions on all hosts."
    if name.startswith(("checkpoint", "step to go on from")):
        return (
            "Put output_dir on a disk that all hosts share, or copy the whole directory of checkpoints to "
            "each host."
        )
    if name.startswith(("base model", "rows", "held-out rows", "adapter", "kt_config.kt_weight_path")):
        return "Copy the files of one host to the others."
    return "Start all processes with the same configuration."


def _look_at_disk(config: TrainConfig) -> list[dict[str, str]]:
    """Return each rank's host, and whether it sees a file that rank 0 has just made beside ``output_dir``."""
    host = {_HOST: socket.gethostname()}
    place = checkpoints_dir(config)
    with ExitStack() as stack:
        name = ""
        if world().rank == 0:
            place.parent.mkdir(parents=True, exist_ok=True)
            made = NamedTemporaryFile(dir=place.parent, prefix=f".{place.name}.")  # noqa: SIM115
            name = Path(stack.enter_context(made).name).name
        name = exchange_texts({_DISK: name}, ANSWER_SECONDS)[0][_DISK]
        seen = (place.parent / name).exists()
        return exchange_texts({**host, _DISK: str(seen)}, ANSWER_SECONDS)


def _unseen_disk(found: Sequence[Mapping[str, str]]) -> list[Problem]:
    """Warn if ranks don't see what rank 0 writes: no later run on their host finds the checkpoints."""
    apart = [rank for rank, theirs in enumerate(found) if theirs[_DISK] != str(True)]
    if not apart:
        return []
    return [
        problem(
            "KTC091",
            "output_dir",
            f"{_ranks(apart)} on {found[apart[0]][_HOST]} can't see what rank 0 on {found[0][_HOST]} writes: "
            "checkpoints will lack these ranks' optimizer state, so no run can go on from them",
            "a disk that all hosts share",
        )
    ]


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def _described(name: str, describe: Callable[[], Parts]) -> Parts:
    """Return the parts of what ``name`` stands for, or why it can't be read."""
    try:
        return {f"{name}: {part}": value for part, value in describe().items()}
    except KtbridgeError as error:
        return {name: error.sentence[:_SHOWN]}
    except OSError as error:
        return {name: error.strerror or "can't be read"}


def _model(path: Path) -> Parts:
    found = fingerprint(path)
    parts = {
        "config.json": _short(json.dumps(found.config, sort_keys=True)),
        "names and shapes of tensors": _short(found.tensors_sha256 or "no weights"),
        "sampled values of tensors": _short(found.values_sha256 or "no weights"),
    }
    names = [name for name in _TOKENIZER if (path / name).is_file()]
    return parts | {name: digests.of_file(path / name)[:_HASH] for name in names}


def _adapter(path: Path) -> Parts:
    names = [each for each in path.iterdir() if each.suffix in (".safetensors", ".bin", ".json")]
    skip = {"trainer_state.json", FINGERPRINT_FILE}
    return {
        each.name: digests.of_file(each)[:_HASH]
        for each in sorted(names)
        if each.is_file() and each.name not in skip
    }


def _own_code() -> str:
    """Return a digest of the package's Python files: a checkout may be another one of the same version."""
    root = Path(ktbridge.__file__).parent
    files = sorted(root.rglob("*.py"))
    return _short("".join(f"{path.relative_to(root)} {digests.of_file(path)}" for path in files))


def _text(value: object) -> str:
    """Return a setting's value as a short text; of a long one the digest, too."""
    text = json.dumps(value, default=str)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}… (digest {_short(text)})"


def _short(text: str) -> str:
    return digests.of_text(text)[:_HASH]
