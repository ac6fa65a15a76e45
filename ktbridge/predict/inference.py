"""LLaMA-Factory's inference YAML: which model and adapter, and which engine answers.

Read as strictly as a training configuration, by its reader: unknown keys and wrong values are reported all at
once. Keys of training, and keys of LLaMA-Factory that mean nothing to a server, are noted.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from ktbridge.adapter.formats import READABLE
from ktbridge.codes import Problems
from ktbridge.errors import Problem, UsageError
from ktbridge.files.yamlfile import read_yaml, show_value
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
from ktbridge.sft.config.foreign import IN_BLOCK, OUTSIDE, Foreign, ForeignKey
from ktbridge.sft.config.load import parse_keys

_ENGINES = {"huggingface": "local", "sglang": "sglang", "ktransformers": "sglang", "vllm": None}
_ACCEPTED = ("use_kt", "finetuning_type", "stage")
"""Keys that such files usually have, and that hold anyway."""
_PER_REQUEST = ("default_system", "do_sample", "temperature", "top_p", "max_new_tokens")


@dataclass(frozen=True)
class Inference:
    """The keys that mean something, by LLaMA-Factory's names; None: the command's own choice."""

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
    notes: tuple[Problem, ...] = ()

    @property
    def engine(self) -> str | None:
        """The engine that answers: local or sglang."""
        return _ENGINES[self.infer_backend] if self.infer_backend else None


_UNUSED = Foreign(
    ForeignKey(tuple(keys), why, "Leave it out.")
    for keys, why in (
        (
            (
                "kt_config",
                *(key for kind in (TrainConfig, KtConfig) for key in options(kind)),
                *(key for table in (OUTSIDE, IN_BLOCK) for row in table.rows for key in row.keys),
            ),
            "a server has no use for it",
        ),
        (["template"], "conversations are written with the tokenizer's own chat template"),
        (["kt_optimize_rule"], "the engine places the modules itself"),
        (["chunk_size"], "the engine divides tokens among threads itself"),
    )
)
"""Keys that are noted: those of training, which a file may share with it, and some of a server's."""


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
    given = {str(key): each for key, each in read_yaml(path).items() if key not in _ACCEPTED}
    main = parse_keys(Inference, given, _UNUSED, "", problems, page="docs/predict.md")
    _resolve(main, path.resolve().parent, problems)
    config = Inference(**{"model_name_or_path": "", **main})
    if config.infer_backend == "vllm":
        _refuse_vllm(config, problems)
    if config.infer_backend == "huggingface":
        found = "huggingface: the embedded engine answers, transformers' model on ktbridge's kernels"
        problems.warn("infer_backend", found)
        if config.trust_remote_code:
            found = "true: models are transformers' own classes, and no code of a checkpoint is run"
            problems.warn("trust_remote_code", found, "", "Leave it out.")
    if not config.do_sample and config.temperature:
        found = f"{config.temperature:g} with do_sample: false"
        problems.warn("temperature", found, "one of the two", "Leave one out.", "KTC005")
    problems.raise_if_any("the configuration has {count}; nothing was started.")
    for key in () if chat else [key for key in _PER_REQUEST if key in main]:
        problems.warn(key, f"{show_value(main[key])}: each request brings its own", "", "Leave it out.")
    temperature = config.temperature if config.do_sample else 0.0
    return replace(config, temperature=temperature, notes=tuple(problems.warnings))


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
            found = f"there is no {' or '.join(map(str, dict.fromkeys(places)))}"
            problems.error(key, found, code="KTC006")


def _refuse_vllm(config: Inference, problems: Problems) -> None:
    model, adapter = config.model_name_or_path, config.adapter_name_or_path
    step = f"vLLM serves it by itself: `vllm serve {model}`."
    if adapter:
        step = (
            f"`ktbridge convert {adapter} --to vllm --output DIR` makes what vLLM loads: `vllm serve {model} "
            "--enable-lora --lora-modules NAME=DIR`."
        )
    expected = "huggingface (the embedded engine), sglang or ktransformers (SGLang-KT)"
    problems.error("infer_backend", "vllm, which ktbridge doesn't start", expected, step)
