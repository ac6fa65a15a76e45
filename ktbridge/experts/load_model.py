"""Loading a checkpoint into transformers; its experts are mapped where the kernels can read them.

The routed experts stay on the CPU, whatever device the rest goes to.
"""

from __future__ import annotations

import base64
import binascii
import json
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from tokenizers import AddedToken, Tokenizer
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    FineGrainedFP8Config,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers import __version__ as transformers_version
from transformers.convert_slow_tokenizer import TikTokenConverter
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils import logging

from ktbridge.adapter.keys import LAYER
from ktbridge.codes import problem
from ktbridge.errors import KtbridgeError, ProblemsError
from ktbridge.experts import compat
from ktbridge.experts.mapped import MappedExperts, UnmappableError, leave_experts_out
from ktbridge.experts.modules import ModuleExperts, experts_modules
from ktbridge.model import check_served, read_model_config
from ktbridge.model.families import transformers_type
from ktbridge.model.jsonfile import read_json_file

_UNREADABLE = (
    OSError,
    ArithmeticError,
    AttributeError,
    LookupError,
    TypeError,
    ValueError,
    RuntimeError,
    SafetensorError,
    ImportError,
    StrictDataclassError,  # of configurations since transformers 5
)
"""Errors that transformers raises over files and fields that it can't make a model or tokenizer of."""

CPU = torch.device("cpu")


def load_model(
    path: Path, dtype: torch.dtype, attention: str | None = None, whole: bool = False
) -> PreTrainedModel:
    """Load the language model in ``path`` on the CPU, experts and all, in eval mode, without gradients.

    ``whole``: with the vision tower around it.

    Raises KtbridgeError when it does not load, or when weights are missing that transformers would
    fill with random numbers.
    """
    with readable_load_errors(path):
        cls, config = model_class(model_config(path), whole)
        return _loaded(cls, path, config, dtype, _attending(attention))


def load_for_kernels(
    path: Path | str,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device = CPU,
    experts: Path | None = None,
    attention: str | None = None,
    whole: bool = False,
) -> PreTrainedModel:
    """Load the language model in ``path`` for ``wrap_experts``; experts are mapped if kernels can read them.

    Else they are loaded, in bfloat16. ``dtype`` is that of everything else, ``device`` where it
    goes, ``experts`` names another checkpoint of the same experts to map, ``attention`` transformers'
    attention implementation (default: its own choice). ``whole``: with the vision tower around it. Raises as
    ``load_model``.
    """
    path = Path(path)
    try:
        return load_mapped(path, dtype, device, experts, attention, whole)
    except UnmappableError:
        if experts is not None:
            raise  # asked for by name, and the ones in `path` may be stored otherwise
        model = load_model(path, dtype, attention, whole)
    for _, module in experts_modules(model):
        ModuleExperts(module).detach_loaded()
    nn.Module.to(model, device)
    return model


def load_mapped(
    path: Path,
    dtype: torch.dtype,
    device: torch.device = CPU,
    experts: Path | None = None,
    attention: str | None = None,
    whole: bool = False,
) -> PreTrainedModel:
    """Load the model without its routed experts, which ``wrap_experts`` then reads where the files have them.

    ``dtype`` and ``device`` are those of everything else; the experts keep the checkpoint's storage.
    Until it is wrapped the model can't run. Raises ``UnmappableError`` where the kernels can't read the
    checkpoint's experts in place, and KtbridgeError as ``load_model`` does.
    """
    mapped = MappedExperts(experts or path)
    with readable_load_errors(path):
        own, config = model_class(model_config(path), whole)
        with leave_experts_out(own) as cls:
            options = _unquantized(config, mapped) | _attending(attention)
            if device != CPU:
                options["device_map"] = {"": device}
            model = _loaded(cls, path, config, dtype, options)
    for name, module in experts_modules(model):
        match = LAYER.search(name)
        if match is None:
            raise UnmappableError(f"{name} of {path} is not in a decoder layer", "load it with transformers")
        ModuleExperts(module).attach(mapped.layer(int(match.group(1))))
    object.__setattr__(model, "expert_files", mapped)  # not a tensor, whatever its type
    return model


def release_layers(model: torch.nn.Module, layers: Iterable[int]) -> None:
    """Let go of the mapped pages of these decoder layers' experts, of a model from ``load_mapped``."""
    for module in model.modules():  # it may be wrapped
        files = getattr(module, "expert_files", None)
        if isinstance(files, MappedExperts):
            for layer in layers:
                files.release(layer)
            return


def load_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer in ``path``. Raises KtbridgeError when it does not load.

    Without its files transformers would silently make an empty one.
    """
    if not any(any(path.glob(names)) for names in ("*token*", "vocab*", "*.model")):
        raise KtbridgeError(
            f"{path} has no tokenizer.",
            "Copy tokenizer.json, tokenizer_config.json and chat_template.jinja of the model into it.",
        )
    with readable_load_errors(path, "tokenizer"):
        if (path / FILE).is_file() and not (path / "tokenizer.json").is_file():
            return kimi_tokenizer(path)
        return AutoTokenizer.from_pretrained(path, trust_remote_code=False)


def model_config(path: Path) -> PreTrainedConfig:
    """Read transformers' configuration of the model in ``path``, without running code that came with it."""
    settings = read_json_file(path / "config.json")
    model_type = str(settings.get("model_type"))
    alias = transformers_type(model_type)
    if alias == model_type:
        return AutoConfig.from_pretrained(path, trust_remote_code=False)
    return CONFIG_MAPPING[alias].from_dict({**settings, "model_type": alias, "auto_map": None})


def model_class(
    config: PreTrainedConfig, whole: bool = False
) -> tuple[type[PreTrainedModel], PreTrainedConfig]:
    """Return the class of a configuration's language model, and the part of the configuration it takes.

    As transformers' own Auto classes choose: the text model alone where it can be had from a multimodal
    checkpoint, else the multimodal model around it; ``whole``: that one in any case.
    """
    text_first = (AutoModelForCausalLM, AutoModelForImageTextToText)
    for auto in text_first[::-1] if whole else text_first:
        cls = compat.find_model_class(auto, config)
        if cls is not None:
            text = config.sub_configs.get("text_config")
            own = text is not None and cls.config_class == text
            return cls, config.get_text_config() if own else config
    raise ValueError(f"transformers has no language model for {config.model_type}")


def _unquantized(config: PreTrainedConfig, mapped: MappedExperts) -> dict[str, object]:
    """Return options to load what isn't an expert in plain floats, from a quantized checkpoint."""
    quantized = getattr(config, "quantization_config", None)
    if not quantized:
        return {}
    method = quantized.get("quant_method") if isinstance(quantized, dict) else None
    if method == "fp8":
        return {"quantization_config": FineGrainedFP8Config(dequantize=True)}
    packed = [name for name in mapped.checkpoint if name.endswith((".weight_packed", "_blocks"))]
    if any(".experts." not in name for name in packed):
        raise UnmappableError(
            f"{mapped.path} has packed weights outside its routed experts",
            "dequantize the checkpoint to bfloat16 first",
        )
    del config.quantization_config  # nothing but experts is quantized, and those are ours to read
    return {}


def _attending(attention: str | None) -> dict[str, object]:
    return {"attn_implementation": attention} if attention else {}


def _loaded(
    cls: type[PreTrainedModel],
    path: Path,
    config: PreTrainedConfig,
    dtype: torch.dtype,
    options: Mapping[str, Any],
) -> PreTrainedModel:
    logging.disable_progress_bar()  # callers show progress themselves
    before = logging.get_verbosity()
    logging.set_verbosity_error()  # the experts that are left out are no surprise
    try:
        loaded: Any = cls.from_pretrained(
            path, config=config, dtype=dtype, output_loading_info=True, **options
        )
    finally:
        logging.set_verbosity(before)
    model: PreTrainedModel = loaded[0]
    if missing := sorted(loaded[1]["missing_keys"]):
        raise KtbridgeError(
            f"the model in {path} lacks {missing[0]} ({len(missing)} weights in all).",
            "download or save the model again",
        )
    model.eval().requires_grad_(False)
    return model


@contextmanager
def readable_load_errors(path: Path, what: str = "model") -> Iterator[None]:
    """Raise KtbridgeError for whatever transformers raises over ``what`` in ``path``."""
    try:
        yield
    except _UNREADABLE as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise KtbridgeError(
            f"the {what} in {path} cannot be loaded: {first}",
            "check that it holds config.json, safetensors weights and a tokenizer",
        ) from error


def make_skeleton(base: Path, whole: bool = False) -> PreTrainedModel:
    """Make the language model in ``base`` as its class does, all tensors on the "meta" device.

    ``whole``: with the vision tower around it.

    Raises KtbridgeError as ``check_served`` does, and where the installed transformers doesn't know it.
    """
    check_served(read_model_config(base))
    model_type = read_json_file(base / "config.json").get("model_type")
    if transformers_type(str(model_type)) not in CONFIG_MAPPING:
        raise KtbridgeError(
            f"{base} is a model of type {model_type!r}, which transformers {transformers_version} doesn't "
            "know.",
            "Install a transformers version that has it, or use a model of a family it has.",
        )
    with readable_load_errors(base):
        cls, own = model_class(model_config(base), whole)
        with torch.device("meta"):
            return cls(own)


# --- Kimi's tokenizer ---------------------------------------------------------------------------------
#
# Moonshot's models ship tiktoken's file (a line for each token: its bytes in base64, and its rank) and Python
# code that says where text is split before tokens are merged. That code isn't run: the pattern is known here,
# and compared with what the file says.

FILE = "tiktoken.model"
_CASED = r"\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_START, _END = r"[^\r\n\p{L}\p{N}]?", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
SPLITS = (
    r"[\p{Han}]+",
    rf"{_START}[\p{{Lu}}\p{{Lt}}{_CASED}*[\p{{Ll}}{_CASED}+{_END}",
    rf"{_START}[\p{{Lu}}\p{{Lt}}{_CASED}+[\p{{Ll}}{_CASED}*{_END}",
    r"\p{N}{1,3}",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"\s*[\r\n]+",
    r"\s+(?!\S)",
    r"\s+",
)
"""Pieces that text is split into, the first that matches: ``pat_str`` of tokenization_kimi.py."""
_RESERVED = 256
"""Ids for special tokens that follow the ranks; those without a name are ``<|reserved_token_ID|>``."""


def kimi_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """Make the tokenizer of a Kimi checkpoint. Raises ``ProblemsError`` for a damaged or another one."""
    settings = read_json_file(path / "tokenizer_config.json")
    _check_splits(path, settings)
    tokenizer: Tokenizer = _Ranks(vocab_file=str(path / FILE), pattern="|".join(SPLITS)).converted()
    base = tokenizer.get_vocab_size()
    named = settings.get("added_tokens_decoder")
    added = {int(key): value for key, value in named.items()} if isinstance(named, dict) else {}
    if below := [number for number in added if number < base]:
        raise _unreadable(path / "tokenizer_config.json", f"special token {below[0]} is one of {base} ranks")
    end = max([base + _RESERVED, *(number + 1 for number in added)])
    tokenizer.add_tokens([_special(added, number) for number in range(base, end)])
    with tempfile.TemporaryDirectory() as made:
        tokenizer.save(str(Path(made) / "tokenizer.json"))
        kept = {key: value for key, value in settings.items() if key not in ("auto_map", "tokenizer_class")}
        if not isinstance(kept.get("model_max_length"), int):
            kept.pop("model_max_length", None)  # 10^30: none
        (Path(made) / "tokenizer_config.json").write_text(json.dumps(kept), encoding="utf-8")
        if (path / "chat_template.jinja").is_file():
            shutil.copy(path / "chat_template.jinja", made)
        made_here = PreTrainedTokenizerFast.from_pretrained(made)
    made_here.name_or_path = str(path)
    return made_here


def _special(added: dict[int, dict[str, object]], number: int) -> AddedToken:
    token = added.get(number, {"content": f"<|reserved_token_{number}|>", "special": True})
    return AddedToken(str(token["content"]), special=bool(token.get("special", True)), normalized=False)


def _check_splits(path: Path, settings: dict[str, object]) -> None:
    """Raise where the checkpoint's own code splits text otherwise, or doesn't say how."""
    code = [file for file in path.glob("tokenization_*.py") if file.is_file()]
    if not code and "kimi" in str(settings.get("auto_map")):
        return
    if not any(all(part in file.read_text("utf-8") for part in SPLITS) for file in code):
        named = ", ".join(file.name for file in code)
        found = f"{named or 'no tokenization_*.py, nor kimi in auto_map'}: other splits than Kimi's"
        other = problem("KTC060", str(path), found, "Kimi's tokenizer")
        raise ProblemsError(f"the tokenizer in {path} can't be built from {FILE}.", [other])


def _unreadable(path: Path, found: str) -> ProblemsError:
    expected = "tiktoken's ranks 0, 1, 2, … and special tokens above them"
    damaged = problem("KTC061", str(path), found, expected)
    return ProblemsError(f"the tokenizer in {path.parent} can't be built from {FILE}.", [damaged])


class _Ranks(TikTokenConverter):
    """transformers' converter, which would need tiktoken's package to read the file."""

    @staticmethod
    def load_tiktoken_bpe(tiktoken_url: str) -> dict[bytes, int]:
        ranks: dict[bytes, int] = {}
        path = Path(tiktoken_url)
        for number, line in enumerate(path.read_bytes().splitlines(), 1):
            if not line.strip():
                continue
            try:
                token, rank = line.split()
                ranks[base64.b64decode(token, validate=True)] = int(rank)
            except (ValueError, binascii.Error) as error:
                raise _unreadable(path, f"line {number} is {line[:40]!r}") from error
        if sorted(ranks.values()) != list(range(len(ranks))) or len(ranks) < 256:
            raise _unreadable(path, f"{len(ranks)} tokens, with ranks left out or twice there")
        return ranks
