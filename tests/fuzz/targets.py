"""What is fuzzed: each target reads bytes as one kind of file or reply, by the public function that does.

A target's ``read`` returns what came of it, in a word; anything that it raises is a finding: something other
than a KtbridgeError in a sentence, a sentence that is none, more than five seconds, or more than 300 MB.
``scripts/fuzz_readers.py`` feeds them; the suite replays ``tests/fuzz/corpus``.
"""

from __future__ import annotations

import json
import random
import resource
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from fuzz import attacks

from ktbridge.errors import KtbridgeError

MEGABYTES = 300
CORPUS = Path(__file__).with_name("corpus")
YAML_TOKENS = (
    "&a ", "*a", "<<: *a", "<<: [*a, *a]", "? ", "- ", ": ", "{", "}", "[", "]", "|\n", ">\n", "!!int ",
    "!!float ", "!!binary ", "!!set ", "!!omap ", "!!timestamp ", "!!python/object:os.system ",
    "%YAML 9.9\n", "---\n", "...\n", "'", '"', '"\\ud800"', "\x00", "\x1b", "\u202e", "2001-99-99", "0x",
    "0b2", "1:60:60", ".inf", ".nan", "null", "9" * 5000, "\t", "#", "true", "~", "&a [*a]", "&a {<<: *a}",
    "1e999", "[" * 500, "- " * 500,
)  # fmt: skip


@dataclass(frozen=True)
class Target:
    """``read`` never raises unless there is a finding; ``mutate`` damages with an eye to the format."""

    read: Callable[[bytes], str]
    seeds: tuple[bytes, ...]
    mutate: Callable[[bytes, random.Random], bytes]


def check(target: Target, data: bytes) -> str:
    """Read ``data`` in bounded time and memory. Raises for a finding."""
    before = _peak()
    with attacks.deadline():
        outcome = target.read(data)
    if (grown := _peak() - before) > MEGABYTES:
        raise AssertionError(f"{grown} MB more memory than any file before it")
    return outcome


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


Read = Callable[[], object]


def _told(read: Read) -> str:
    """ "taken", or "refused" where ``read`` raised a KtbridgeError, which must be a sentence."""
    try:
        read()
    except KtbridgeError as error:
        attacks.check_sentence(error)
        return "refused"
    return "taken"


# -- files of adapters and models --------------------------------------------------------------------------


def _tensors(folder: Path) -> Target:
    victim = attacks.Victim(folder)
    single = folder / "single.safetensors"
    good = [data for path, data in victim.files.items() if path.suffix == ".safetensors"]

    def read(data: bytes) -> str:
        return attacks.check_tensor_file(single, data)

    return Target(read, tuple(good), attacks.mutate_tensor_file)


def _document(
    cases: Sequence[tuple[Path, Read]],
    mutate: Callable[[bytes, random.Random], bytes] | None = None,
) -> Target:
    """The first byte of the data chooses one of ``cases``; the rest replaces its file, which is then read."""
    files = {path: path.read_bytes() for path, _ in cases}

    def replaced(data: bytes) -> str:
        path, read = cases[data[0] % len(cases) if data else 0]
        path.write_bytes(data[1:])
        try:
            return f"{path.name} {_told(read)}"
        finally:
            path.write_bytes(files[path])

    def damaged(data: bytes, rng: random.Random) -> bytes:
        number = data[0] % len(cases) if data else 0
        path, _ = cases[number]
        content = data[1:] or files[path]
        if mutate is not None:
            return bytes([number]) + mutate(content, rng)
        if path.suffix == ".safetensors":
            return bytes([number]) + attacks.mutate_tensor_file(files[path], rng)
        return bytes([number]) + _mutate_json(content, rng)

    seeds = tuple(bytes([number]) + files[path] for number, (path, _) in enumerate(cases))
    return Target(replaced, seeds, damaged)


def _mutate_json(data: bytes, rng: random.Random) -> bytes:
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        return attacks.mutate_bytes(data, rng)
    return attacks.mutate_document(document, rng)


def _mutate_lines(data: bytes, rng: random.Random) -> bytes:
    """Damage to one line of a file of JSON lines."""
    lines = data.split(b"\n")
    number = rng.randrange(len(lines))
    lines[number] = _mutate_json(lines[number], rng)
    return b"\n".join(lines)


def _mutate_yaml(data: bytes, rng: random.Random) -> bytes:
    """Tokens between lines and words, values replaced, lines repeated, indented or removed."""
    lines = data.decode("utf-8", "replace").split("\n")
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(lines))
        token, kind = rng.choice(YAML_TOKENS), rng.randrange(6)
        if kind == 0:
            key, sign, _value = lines[at].partition(": ")
            lines[at] = f"{key}{sign}{token}"
        elif kind == 1:
            key, sign, value = lines[at].partition(": ")
            lines[at] = f"{key}{sign}{token}{value}"
        elif kind == 2:
            lines.insert(at, token)
        elif kind == 3:
            lines.insert(at, rng.choice(lines))
        elif kind == 4:
            lines[at] = rng.choice(("  ", "    ", "- ")) + lines[at]
        elif len(lines) > 1:
            del lines[at]
    text = "\n".join(lines).encode("utf-8", "surrogatepass")
    return attacks.mutate_bytes(text, rng) if rng.random() < 0.1 else text


def _adapter(folder: Path) -> Target:
    """adapter_config.json and kt_adapter_manifest.json, read by validate and by a plan of convert."""
    from ktbridge.adapter import plan_convert, read_adapter, validate_adapter

    victim = attacks.Victim(folder)
    place = victim.adapter

    def validate() -> None:
        attacks.check_report(validate_adapter([place], base_model=victim.base, structure_only=True))

    calls: tuple[Read, ...] = (
        validate,
        lambda: read_adapter(place),
        lambda: plan_convert(place, merged_output_dir=folder / "out").as_dict(),
    )
    documents = [path for path in victim.files if path.parent == place and path.suffix == ".json"]
    return _document(list(product(documents, calls)))


def _model(folder: Path) -> Target:
    """config.json and the index of a checkpoint."""
    from ktbridge.model import open_checkpoint, read_model_config

    victim = attacks.Victim(folder)
    base = victim.base
    cases: list[tuple[Path, Read]] = [
        (base / "config.json", lambda: read_model_config(base)),
        (base / "model.safetensors.index.json", lambda: open_checkpoint(base).check()),
    ]
    return _document(cases)


def _directory(folder: Path) -> Target:
    """Every file of an adapter and its base, read by everything: validate, convert's and merge's plans."""
    victim = attacks.Victim(folder)
    cases = [(path, victim.read) for path in victim.files]
    return _document(cases)


def _gguf(folder: Path) -> Target:
    """An adapter in llama.cpp's format, validated and converted to PEFT's."""
    from ktbridge.adapter import convert_adapter

    victim = attacks.Victim(folder)
    made, path, out = folder / "gguf", folder / "bad.gguf", folder / "out"
    convert_adapter(victim.adapter, output_dir=made, to="gguf", base_model=str(victim.base))
    good = (made / "adapter_model.gguf").read_bytes()

    def read(data: bytes) -> str:
        path.write_bytes(data)
        return _told(lambda: convert_adapter(path, output_dir=out, to="peft-fused", overwrite=True))

    return Target(read, (good,), _mutate_gguf)


def _mutate_gguf(data: bytes, rng: random.Random) -> bytes:
    """Sizes, counts, types and names replaced where they lie: GGUF is a run of little-endian numbers."""
    buffer = bytearray(data)
    for _ in range(rng.randint(1, 3)):
        wide = rng.choice((4, 8))
        if len(buffer) < wide:
            break
        at = rng.randrange(len(buffer) - wide + 1)
        value = rng.choice(
            (0, 1, 2, 3, 8, 9, 30, len(data), 2**16, 2**31, 2**32 - 1, 2**40, 2**63, 2**64 - 1)
        )
        buffer[at : at + wide] = (value % (1 << 8 * wide)).to_bytes(wide, "little")
    return attacks.mutate_bytes(bytes(buffer), rng) if rng.random() < 0.3 else bytes(buffer)


# -- YAML, benches, what a run stores ----------------------------------------------------------------------


def _recipe(folder: Path) -> Target:
    """recipe.yaml, the training configuration, and LLaMA-Factory's inference YAML."""
    from ktbridge.cli.run import command_options, training_keys
    from ktbridge.predict.inference import load_inference
    from ktbridge.recipe import read_recipe
    from ktbridge.sft.config import load_config

    options, trained = command_options(), training_keys()
    files = {
        "recipe.yaml": b"name: tuned\ntrain:\n  config: train.yaml\n  lora_rank: 8\nserve:\n  port: 1\n"
        b"eval:\n  bench: [smoke]\nsweep:\n  lora_rank: [8, 16]\n",
        "train.yaml": b"model_name_or_path: base\ndataset: [a, b]\noutput_dir: out\nlora_rank: 8\n"
        b"learning_rate: 1.0e-4\nbf16: true\nlora_target: q_proj,v_proj\nkt_config:\n  experts: cpu\n",
        "chat.yaml": b"model_name_or_path: base\ninfer_backend: huggingface\ntemperature: 0.5\n",
    }  # fmt: skip
    recipe, train, chat = _written(folder, files)
    cases: list[tuple[Path, Read]] = [
        (recipe, lambda: read_recipe(recipe, options, trained)),
        (train, lambda: load_config(train)),
        (chat, lambda: load_inference(chat)),
    ]
    return _document(cases, _mutate_yaml)


def _bench(folder: Path) -> Target:
    """The three files of a bench."""
    from ktbridge.eval.bench import load_bench

    item = {"id": "a", "slice": "chat", "messages": [{"role": "user", "content": "hi"}], "gold": "b",
            "checks": [{"scorer": "exact"}], "judge": ["Is it kind?"]}  # fmt: skip
    files = {
        "bench.yaml": b"name: one\nversion: 1\nlanguage: en\nmax_tokens: 9\nslices:\n  chat:\n"
        b"    label: Chat\n    primary: task\nsampling: {temperature: 0}\nmargin: 0.1\nnotes: [a]\n"
        b"checklists:\n  all:\n  - Is it?\n",
        "items.jsonl": json.dumps(item).encode() + b"\n",
        "persona.yaml": b"name: cat\naddress: {en: [master]}\ntics: {en: [meow]}\n"
        b"breaks: {en: ['as an AI']}\ntarget_rate: 0.5\nmax_tics_per_sentence: 2\n"
        b"weights: {address: 0.5, tic: 0.5}\n",
    }

    def mutate(data: bytes, rng: random.Random) -> bytes:
        return (_mutate_lines if data.lstrip()[:1] == b"{" else _mutate_yaml)(data, rng)

    cases = [(path, lambda: load_bench(folder)) for path in _written(folder, files)]
    return _document(cases, mutate)


def _run(folder: Path) -> Target:
    """What `ktbridge eval` stored: run.json, benches.json, answers.jsonl, judgements.jsonl."""
    from ktbridge.eval.store import ANSWERS, JUDGEMENTS, read_benches, read_ledger, read_run

    answer = {
        "key": "k", "arm": "base", "item": "i", "outcome": "ok", "text": "a", "thinking": "", "detail": "",
        "status": 200, "prompt_tokens": 1, "completion_tokens": 1, "seconds": 0.5,
        "turns": [{"role": "user", "content": "hi"}],
    }  # fmt: skip
    judged = {
        "key": "k", "form": "f", "item": "i", "of": "base", "outcome": "ok", "reply": "r", "detail": "",
        "attempts": 1, "prompt_tokens": 1, "completion_tokens": 1,
    }  # fmt: skip
    run = {
        "schema": "ktbridge.run/1",
        "arms": {},
        "probes": {"f": {"p": "0"}},
        "repeat": 1,
        "date": "2026-01-01",
    }
    files = {
        "run.json": run,
        "benches.json": {"schema": "ktbridge.benches/1", "benches": ["a", "b"]},
        "answers.jsonl": answer,
        "judgements.jsonl": judged,
    }
    reads: tuple[Read, ...] = (
        lambda: read_run(folder),
        lambda: read_benches(folder),
        lambda: read_ledger(folder, ANSWERS),
        lambda: read_ledger(folder, JUDGEMENTS),
    )
    paths = _written(folder, {name: json.dumps(value).encode() + b"\n" for name, value in files.items()})
    return _document(list(zip(paths, reads, strict=True)), _mutate_lines)


def _written(folder: Path, files: Mapping[str, bytes]) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return [folder / name for name in files]


# -- requests and replies ------------------------------------------------------------------------------------


def _request(folder: Path) -> Target:
    """Bodies of requests, as the embedded server reads them. pydantic's core can't be instrumented."""
    seeds = [json.dumps(attacks.REQUEST).encode()]
    seeds += [json.dumps({"model": "tiny", name: value}).encode() for name, value in attacks.REQUEST.items()]
    return Target(
        attacks.check_request, tuple(seeds), _mutate_request
    )  # fmt: skip


def _mutate_request(data: bytes, rng: random.Random) -> bytes:
    return attacks.mutate_request(rng) if rng.random() < 0.3 else _mutate_json(data, rng)


def _reply(folder: Path) -> Target:
    """What servers answer to eval, verify and chat."""
    from ktbridge.server_api.replies import (
        BadReplyError,
        describe_reply,
        read_completion,
        read_object,
    )

    reply = {
        "id": "1", "object": "chat.completion", "model": "m",
        "usage": {"prompt_tokens": 1, "completion_tokens": 2},
        "choices": [{"index": 0, "finish_reason": "stop",
                     "message": {"role": "assistant", "content": "hi", "reasoning_content": "so"}}],
    }  # fmt: skip

    def read(data: bytes) -> str:
        attacks.check_text(describe_reply(500, data))
        try:
            read_completion(read_object(data))
        except BadReplyError as error:
            attacks.check_text(str(error))
            return "refused"
        return "taken"

    return Target(read, (json.dumps(reply).encode(),), _mutate_json)


TARGETS: dict[str, Callable[[Path], Target]] = {
    "tensors": _tensors,
    "adapter": _adapter,
    "model": _model,
    "directory": _directory,
    "gguf": _gguf,
    "recipe": _recipe,
    "bench": _bench,
    "run": _run,
    "request": _request,
    "reply": _reply,
}
