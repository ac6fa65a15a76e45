"""LLaMA-Factory's inference YAML: which model and adapter, and which engine answers.

Read as strictly as a training configuration: unknown keys and wrong values are reported all at once. Keys of
LLaMA-Factory that mean nothing to a server are noted.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from ktbridge.adapter.dialects import READABLE
from ktbridge.codes import Problems
from ktbridge.errors import Problem, UsageError, did_you_mean
from ktbridge.files.yamlfile import read_yaml, shown
from ktbridge.sft.config import KtConfig, TrainConfig
from ktbridge.sft.config.fields import (
    Count,
    Flag,
    Fraction,
    Number,
    Text,
    UpTo4096,
    Values,
    one_of,
    option,
    options,
)
from ktbridge.sft.config.foreign import IN_BLOCK, OUTSIDE, Foreign
from ktbridge.sft.config.load import parse_keys

_ENGINES = {"huggingface": "local", "sglang": "sglang", "ktransformers": "sglang", "vllm": None}
_NOTED = {
    "template": "conversations are written with the tokenizer's own chat template",
    "kt_optimize_rule": "the engine places the modules itself",
    "chunk_size": "the engine divides tokens among threads itself",
}
_ACCEPTED = ("use_kt", "finetuning_type", "stage")
"""What such files usually have, and what holds anyway."""
_PER_REQUEST = ("default_system", "do_sample", "temperature", "top_p", "max_new_tokens")
_KNOWN = {"kt_config", *options(TrainConfig), *options(KtConfig)}
"""Keys of training, which a file may share with it."""


@dataclass(frozen=True)
class InferenceConfig:
    """The keys that mean something, by LLaMA-Factory's names."""

    model_name_or_path: Text = option()
    adapter_name_or_path: Text | None = option(None)
    adapter_format: Annotated[str, one_of("auto", *READABLE)] = option("auto")
    infer_backend: Annotated[str, one_of(*_ENGINES)] | None = option(None)
    trust_remote_code: Flag = option(False)
    cpu_infer: UpTo4096 | None = option(None)
    default_system: Text | None = option(None)
    do_sample: Flag = option(True)
    temperature: Number | None = option(None)
    top_p: Fraction | None = option(None)
    max_new_tokens: Count | None = option(None)


@dataclass(frozen=True)
class Inference:
    """What a file asks of `ktbridge chat` or `serve`; None: their choice. ``engine``: local or sglang."""

    model: str
    adapter: str | None
    from_format: str
    engine: str | None
    trust_remote_code: bool
    threads: int | None
    system: str | None
    temperature: float | None
    top_p: float | None
    max_tokens: int | None
    notes: tuple[Problem, ...]


def load_inference(path: str | Path, chat: bool = True) -> Inference:
    """Read an inference YAML; its paths are relative to the file, or else to the working directory.

    Without ``chat`` it is for a server, where each request has its own sampling.

    Raises ``ProblemsError`` with every unknown key, wrong value and directory that isn't there, and
    ``UsageError`` for a missing file or text that isn't YAML.
    """
    path = Path(path)
    if not path.is_file():
        raise UsageError(
            f"there is no inference YAML {str(path)!r}.",
            "Give a file with model_name_or_path, as LLaMA-Factory's examples/inference have them.",
        )
    problems = Problems(str(path), "KTC002", "KTC004")
    values = {str(key): value for key, value in read_yaml(path).items()}
    own = _own(values, problems)
    main = parse_keys(InferenceConfig, own, Foreign(()), "", problems)
    _resolve(main, path.resolve().parent, problems)
    config = InferenceConfig(**{"model_name_or_path": "", **main})
    _check_backend(config, problems)
    problems.raise_if_any("the configuration has {count}; nothing was started.")
    greedy = not config.do_sample
    for key in () if chat else _PER_REQUEST:
        if key in main:
            problems.warn(
                key, f"{shown(main[key])}: each request brings its own", "", "Leave it out."
            )
    return Inference(
        model=config.model_name_or_path,
        adapter=config.adapter_name_or_path,
        from_format=config.adapter_format,
        engine=_ENGINES[config.infer_backend] if config.infer_backend else None,
        trust_remote_code=config.trust_remote_code,
        threads=config.cpu_infer or None,
        system=config.default_system,
        temperature=0.0 if greedy else config.temperature,
        top_p=config.top_p,
        max_tokens=config.max_new_tokens,
        notes=tuple(problems.warnings),
    )


def _own(values: Values, problems: Problems) -> Values:
    """The keys of ``InferenceConfig``; others are noted, or unknown."""
    own: Values = {}
    known = (*options(InferenceConfig), *_NOTED, *_ACCEPTED)
    for key, value in values.items():
        if key in options(InferenceConfig):
            own[key] = value
        elif key in _NOTED:
            problems.warn(key, f"{shown(value)}: {_NOTED[key]}", "", "Leave it out.")
        elif key in _ACCEPTED:
            continue
        elif key in _KNOWN or OUTSIDE.foreign(key, known) or IN_BLOCK.foreign(key, known):
            problems.warn(key, f"{shown(value)}: a server has no use for it", "", "Leave it out.")
        else:
            step = did_you_mean(key, known) or "docs/predict.md lists the keys."
            problems.error(key, "unknown key", "", step, code="KTC001")
    return own


def _resolve(main: Values, root: Path, problems: Problems) -> None:
    """Make paths absolute; a model that isn't here may be an id in the local Hub cache."""
    for key in ("model_name_or_path", "adapter_name_or_path"):
        if key not in main:
            continue
        name = main[key].strip()
        own = os.path.expanduser(name)  # unlike Path's, it takes any name, as os.path.exists does
        places = [root / own, Path.cwd() / own]
        place = next((place for place in places if os.path.exists(place)), None)
        if place is not None:
            main[key] = str(place)
        elif "," in name and key.startswith("adapter"):
            problems.error(key, "several adapters", "one", "Merge the others first.")
        elif key.startswith("adapter") or name.startswith(("/", ".", "~")):
            found = f"there is no {' or '.join(str(each) for each in dict.fromkeys(places))}"
            problems.error(key, found, code="KTC006")


def _check_backend(config: InferenceConfig, problems: Problems) -> None:
    if config.infer_backend == "vllm":
        adapter = config.adapter_name_or_path
        step = f"vLLM serves it by itself: `vllm serve {config.model_name_or_path}`."
        if adapter:
            step = (
                f"`ktbridge convert {adapter} --to vllm --output DIR` makes what vLLM loads: `vllm serve "
                f"{config.model_name_or_path} --enable-lora --lora-modules NAME=DIR`."
            )
        expected = "huggingface (the embedded engine), sglang or ktransformers (SGLang-KT)"
        problems.error("infer_backend", "vllm, which ktbridge doesn't start", expected, step)
    if config.infer_backend == "huggingface":
        found = (
            "huggingface: the embedded engine answers, transformers' model on ktbridge's kernels"
        )
        problems.warn("infer_backend", found)
    if config.infer_backend == "huggingface" and config.trust_remote_code:
        found = "true: models are transformers' own classes, and no code of a checkpoint is run"
        problems.warn("trust_remote_code", found, "", "Leave it out.")
    if not config.do_sample and config.temperature:
        found = f"{config.temperature:g} with do_sample: false"
        problems.warn("temperature", found, "one of the two", "Leave one out.", "KTC005")
