"""Abuse of everything that reads files: hostile documents, and what must hold when they are read.

Used by the suite (hypothesis picks the random numbers) and by ``scripts/fuzz_readers.py`` (atheris,
or a plain loop). ``Victim`` holds a small valid adapter and base model, and reads them by everything.
Whatever happens must be one sentence, soon.
"""

from __future__ import annotations

import copy
import json
import os
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import safetensors
from rawadapter import random_bits, write_raw
from tensorfiles import write_tensor_file

from ktbridge.adapter import Tensor, ValidationReport, read_adapter, validate_adapter
from ktbridge.adapter.merge import plan_merge
from ktbridge.errors import KtbridgeError, ProblemsError
from ktbridge.model import open_checkpoint, open_tensor_file, read_model_config
from ktbridge.model.tensorfile import DTYPE_BITS

SECONDS = 5  # more than any small file may take


class Late(BaseException):
    """Something took too long. Not an Exception: readers must not turn it into a sentence."""


# Values that break readers. A Token is written into the document as it is.


class Token(str):
    """JSON text that json.dumps would not write."""

    __slots__ = ()


HOSTILE: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 1.5, 2**31, 2**40, 2**63, 2**64, 10**30, -(2**63) - 1, "", "a",
    "0", "nan", "../x", "../../../etc/passwd", "/etc/passwd", "/dev/zero", "\x00", "a\x00b", "\x1b[2J",
    "a\nb", "x" * 300, "é" * 200, "__metadata__", "__class__", [], {}, [[]], [{}], [0] * 40,
    [2**40] * 3, ["a", 1], {"a": {"a": {}}}, {"": 0},
    Token("NaN"), Token("Infinity"), Token("-Infinity"), Token("1e400"), Token("-0"), Token("-0.0"),
    Token("1e-400"), Token("01"), Token("0x10"), Token("9" * 5000), Token('"\\ud800"'),
    Token('"\\udc00\\ud800"'), Token("[" * 3000), Token("[" * 500 + "]" * 500),
    Token("{\"a\":" * 3000), Token("'a'"), Token("//"), Token(""), Token('"\\u0000"'),
    Token("1.0"), Token("2E0"), Token("4,4"), Token('"a":1'),
)  # fmt: skip


def dump(value: Any, twice: str | None = None) -> str:
    """JSON with tokens as they are; every object's key ``twice`` is written two times."""
    if isinstance(value, Token):
        return str(value)
    if isinstance(value, list):
        return "[" + ",".join(dump(item, twice) for item in value) + "]"
    if not isinstance(value, dict):
        return json.dumps(value)
    pairs = []
    for key, item in value.items():
        name = str(key) if isinstance(key, Token) else json.dumps(key)
        pairs += [f"{name}:{dump(item, twice)}"] * (2 if key == twice else 1)
    return "{" + ",".join(pairs) + "}"


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) in a document."""
    items: Any = ()
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list):
        items = list(enumerate(value))
    for key, item in items:
        yield value, key
        yield from places(item)


def mutate_document(document: Any, rng: random.Random) -> bytes:
    """A valid document with some of its values, keys or nesting replaced, as bytes."""
    document = json.loads(json.dumps(document))
    twice = None
    for _ in range(rng.randint(1, 3)):
        found = list(places(document))
        if not found:
            break
        container, key = rng.choice(found)
        kind = rng.randrange(6)
        if kind <= 2:
            container[key] = copy.deepcopy(rng.choice(HOSTILE))
        elif kind == 3:
            del container[key]
        elif kind == 4 and isinstance(container, dict):
            new = rng.choice(HOSTILE)
            container[new if isinstance(new, str) else f"k{new}"] = container.pop(key)
        elif isinstance(key, str):
            twice = key
    if rng.random() < 0.02:
        document = copy.deepcopy(rng.choice(HOSTILE))
    data = dump(document, twice).encode("utf-8", "surrogatepass")
    return mutate_bytes(data, rng) if rng.random() < 0.15 else data


def mutate_bytes(data: bytes, rng: random.Random) -> bytes:
    """Flipped, cut, inserted, repeated or overwritten bytes."""
    buffer = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(buffer) + 1)
        kind = rng.randrange(5)
        if kind == 0 and at < len(buffer):
            buffer[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del buffer[at:]
        elif kind == 2:
            buffer[at:at] = rng.randbytes(rng.randint(1, 9))
        elif kind == 3:
            buffer[at:at] = buffer[at : at + 20]
        elif len(buffer) >= 8:
            size = rng.choice((0, 1, len(buffer), 100_000_000, 100_000_001, 2**40, 2**63, 2**64 - 1))
            buffer[:8] = size.to_bytes(8, "little")
    return bytes(buffer)


def mutate_tensor_file(data: bytes, rng: random.Random) -> bytes:
    """A safetensors file with its header's JSON or its bytes damaged; the length often fits."""
    if rng.random() < 0.25:
        return mutate_bytes(data, rng)
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    if rng.random() < 0.5:
        nudge_entry(header, rng)
        text = dump(header).encode("utf-8", "surrogatepass")
    else:
        text = mutate_document(header, rng)
    text += b" " * rng.choice((0, 0, 1, -len(text) % 8))
    declared = len(text) + rng.choice((0, 0, 0, 0, 1, -1))
    return max(declared, 0).to_bytes(8, "little") + text + data[8 + length :]


def nudge_entry(header: dict[str, Any], rng: random.Random) -> None:
    """Make offsets overlap, leave holes, or disagree with the shape or the dtype."""
    names = [name for name in header if name != "__metadata__"]
    entry = header[rng.choice(names)]
    kind = rng.randrange(4)
    if kind == 0:
        entry["data_offsets"][rng.randrange(2)] += rng.choice((-2, -1, 1, 2, 2**31, 2**62, 2**63))
    elif kind == 1:
        entry["shape"] = [rng.choice((0, 1, 2, 4, 2**16, 2**40)) for _ in range(rng.randrange(5))]
    elif kind == 2:
        entry["dtype"] = rng.choice((*DTYPE_BITS, "F128", "bf16", ""))
    else:
        other = header[rng.choice(names)]
        entry["data_offsets"] = list(other["data_offsets"])


def theirs(data: bytes) -> str:
    """safetensors' own verdict: "" when it takes the file, else its complaint."""
    try:
        safetensors.deserialize(data)
    except safetensors.SafetensorError as error:
        return str(error)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


# Why we may refuse what safetensors takes: each of these is a decision, and nothing else is one.
STRICTER = {
    "appears twice": "its parser keeps one of two entries of a name, and which one is an accident",
    "other than dtype, shape": "it ignores unknown fields of an entry",
    "not a table of strings": "it takes null for no metadata",
    "not a list of sizes": "it has no limit on dimensions; ours is 32",
    "does not begin with": "it takes white space before the brace, which the format rules out",
    "nested too deeply": "unknown fields may be nested in its view",
}
# Why we may take what it refuses.
LAXER = {
    "-0": "minus zero is a whole number to Python",
}


def check_tensor_file(path: Path, data: bytes) -> str:
    """Read a damaged file with both readers; return which of them took it."""
    path.write_bytes(data)
    with deadline():
        try:
            file = open_tensor_file(path)
        except KtbridgeError as error:
            check_sentence(error)
            complaint = theirs(data)
            reason = error.sentence
            assert complaint or any(part in reason for part in STRICTER), reason
            return "neither" if complaint else "theirs"
        end = 0
        for name, entry in file.entries.items():
            assert end <= entry.start <= entry.end <= len(data)
            end = entry.end
            bytes(file.tensor(name).data)
        complaint = theirs(data)
        if complaint:
            assert b"-0" in data, complaint
            return "ours"
        sizes = {name: len(view["data"]) for name, view in safetensors.deserialize(data)}
        assert sizes == {name: entry.nbytes for name, entry in file.entries.items()}
        return "both"


def check_sentence(error: KtbridgeError) -> None:
    """One printable line of bounded length; every collected problem likewise."""
    texts = [error.sentence, error.next_step]
    if isinstance(error, ProblemsError):
        for item in error.problems:
            texts += [item.where, item.found, item.expected, item.next_step]
    for text in texts:
        check_text(text)
    assert error.sentence.strip()


def check_report(report: ValidationReport) -> None:
    """Every problem is printable text of bounded length, and the report is JSON."""
    for item in report.problems:
        for text in (item.where, item.found, item.expected, item.next_step):
            check_text(text)
    json.dumps(report.as_dict(), allow_nan=False, ensure_ascii=False).encode()


def check_text(text: str) -> None:
    assert "Traceback" not in text
    assert len(text) < 20_000, text[:200]
    text.encode("utf-8")


@contextmanager
def deadline() -> Iterator[None]:
    """Fail when something takes longer than any small file may; only in the main thread.

    Seconds of this process's work, so that a busy machine fails nothing; what only waits has a minute.
    """

    def late(_signal: int, _frame: FrameType | None) -> None:
        raise Late(f"took more than {SECONDS} s")

    before = [signal.signal(kind, late) for kind in (signal.SIGPROF, signal.SIGALRM)]
    signal.setitimer(signal.ITIMER_PROF, SECONDS, SECONDS)
    signal.setitimer(signal.ITIMER_REAL, 60, SECONDS)
    try:
        yield
    finally:
        for timer in (signal.ITIMER_PROF, signal.ITIMER_REAL):
            signal.setitimer(timer, 0)
        for kind, handler in zip((signal.SIGPROF, signal.SIGALRM), before, strict=True):
            signal.signal(kind, handler)


class Victim:
    """A valid raw adapter and its base model in ``folder``; targets damage one file at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.base = folder / "base"
        self.adapter = folder / "adapter"
        self._make()
        self.files = {
            path: path.read_bytes() for place in (self.base, self.adapter) for path in sorted(place.iterdir())
        }

    def _make(self) -> None:
        modules = dict.fromkeys(("q_proj", "v_proj"), (4, 4))
        write_raw(
            self.adapter, layers=(0,), experts=1, rank=2, hidden=4, inter=2, alpha=4.0,
            modules=modules, base_model="base", rank_pattern={}, alpha_pattern={}, use_dora=False,
            modules_to_save=None, layers_to_transform=None,
        )  # fmt: skip
        shapes = {f"mlp.experts.0.{name}_proj": (2, 4) for name in ("gate", "up")}
        shapes |= {"mlp.experts.0.down_proj": (4, 2)}
        shapes |= {f"self_attn.{name}": shape for name, shape in modules.items()}
        rng = np.random.default_rng(0)
        weights = [
            Tensor(f"model.layers.0.{name}.weight", "BF16", shape, random_bits(rng, shape))
            for name, shape in shapes.items()
        ]
        self.base.mkdir()
        model = {
            "model_type": "qwen3_moe", "num_hidden_layers": 1, "hidden_size": 4,
            "moe_intermediate_size": 2, "num_experts": 1, "num_experts_per_tok": 1,
            "mlp_only_layers": [], "decoder_sparse_step": 1, "layer_types": ["full_attention"],
            "text_config": None, "tie_word_embeddings": False, "full_attention_interval": 1,
            "first_k_dense_replace": 0, "moe_layer_freq": 1, "mlp_layer_types": ["sparse"],
        }  # fmt: skip
        (self.base / "config.json").write_text(json.dumps(model))
        write_tensor_file(self.base / "model-1.safetensors", weights[::2], {"format": "pt"})
        write_tensor_file(self.base / "model-2.safetensors", weights[1::2])
        index = {one.name: f"model-{1 + n % 2}.safetensors" for n, one in enumerate(weights)}
        text = json.dumps({"metadata": {"total_size": 1}, "weight_map": index})
        (self.base / "model.safetensors.index.json").write_text(text)

    def read(self) -> None:
        """Everything that reads, in turn."""
        with deadline():
            check_report(validate_adapter([self.adapter]))
            calls: tuple[Callable[[], object], ...] = (
                lambda: read_adapter(self.adapter),
                lambda: read_model_config(self.base),
                lambda: open_checkpoint(self.base).check(),
                lambda: validate_adapter([self.adapter], base_model=self.base),
                lambda: plan_merge(self.adapter, base_model=self.base, output=self.folder / "out").as_dict(),
            )
            for call in calls:
                try:
                    call()
                except KtbridgeError as error:
                    check_sentence(error)


def scratch() -> str | None:
    """Memory-backed scratch space where there is some: millions of small files are written."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


REQUEST: dict[str, Any] = {
    "model": "tiny", "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
    "max_tokens": 3, "temperature": 0.5, "top_p": 0.9, "n": 1, "stop": ["a"], "seed": 1, "logprobs": True,
    "top_logprobs": 2, "stream": True, "stream_options": {"include_usage": True}, "prompt": ["a"],
    "logit_bias": {}, "tools": [], "response_format": {"type": "text"}, "chat_template_kwargs": {"a": 1},
    "echo": True, "user": "u", "presence_penalty": 0, "min_p": 0.1, "top_k": 3,
}  # fmt: skip


def mutate_request(rng: random.Random) -> bytes:
    """A request for an answer with some of its fields, of which some are damaged."""
    names = rng.sample(list(REQUEST), rng.randrange(len(REQUEST) + 1))
    chosen = {name: REQUEST[name] for name in {"model", *names}}
    return mutate_document(chosen, rng) if rng.random() < 0.9 else json.dumps(chosen).encode()


def check_request(data: bytes) -> str:
    """What the server makes of a request's body: "taken", or "refused" in one short sentence."""
    from ktbridge.serve.local.schema import (
        ApiError,
        ChatRequest,
        CompletionRequest,
        read_request,
    )

    taken = 0
    with deadline():
        for kind in (ChatRequest, CompletionRequest):
            error = None
            try:
                read_request(kind, data)
                taken += 1
            except ApiError as refused:
                error = refused
            if error is not None:
                assert error.status == 400
                assert 0 < len(str(error)) < 1000, error
    return "taken" if taken else "refused"
