"""The grammar of every tensor key an adapter may hold: one parser, one builder per layout.

=============  ====================================================================  ==========
kind           key                                                                   from
=============  ====================================================================  ==========
fused          layers.L.experts.{gate,up,down}_lora_{a,b}                            KT training
expert         [prefix.]layers.L.mlp.experts.E.{gate,up,down}_proj.lora_{A,B}.weight serving
lora           [base_model.model.]MODULE.lora_{A,B}.weight                           PEFT
peft-fused     MODULE.experts[.base_layer].lora_{A,B}.weight                         PEFT >= 0.17
sglang-3d      MODULE.experts.{gate,up,down}_proj.lora_{A,B}.weight, three axes      SGLang
lora-experts   MODULE.lora_experts.E.le_{gate,up,down}.weight                        another method
dora           MODULE.lora_magnitude_vector[.weight]                                 PEFT DoRA
lora-bias      MODULE.lora_{A,B}.bias                                                PEFT
embedding      MODULE.lora_embedding_{A,B}                                           PEFT
other          anything else: a whole weight, or not ours
=============  ====================================================================  ==========

Only the shape distinguishes sglang-3d from lora, so this parser returns lora, and the code that opens
the file corrects it, as it does for LoRA that ``is_expert_like`` and of no kind here ("unread").
``MODULE`` is the module's path in the base model. PEFT's ``base_model.model.``, KT's ``orig_module``
wrapper, Mixtral's w1/w3/w2 and all that ``plain_name`` takes out are aliases and parse to the same
:class:`Key`.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Literal, NamedTuple

from ktbridge.model.families import BLOCKS, PROJECTIONS, ROUTER

Kind = Literal[
    "fused", "expert", "lora", "peft-fused", "sglang-3d", "lora-experts", "dora", "lora-bias",
    "embedding", "unread", "other",
]  # fmt: skip

PEFT_PREFIX = "base_model.model."
HALVES = ("A", "B")
FUSED_NAMES = tuple(f"{projection}_lora_{half}" for projection in PROJECTIONS for half in "ab")

_BLOCK = f"(?:{'|'.join(BLOCKS)})"
# No leading zeros: "layers.01" and "layers.1" must not be two names of one layer.
_NUMBER = "(0|[1-9][0-9]{0,5})"
_FUSED = re.compile(rf"layers\.{_NUMBER}\.experts\.(gate|up|down)_lora_([ab])")
_LORA = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])\.weight", re.DOTALL)
_EXPERT_MODULE = re.compile(
    rf"(?:[^\n]*\.)?layers\.{_NUMBER}\.{_BLOCK}\.experts\.{_NUMBER}"
    r"\.(gate_proj|up_proj|down_proj|w1|w3|w2)"
)
_EXPERTS = re.compile(rf"(?:base_model\.model\.)?((?:[^\n]*\.)?layers\.{_NUMBER}\.{_BLOCK}\.experts)")
LAYER = re.compile(rf"(?:^|\.)layers\.{_NUMBER}\.")
"""The layer in a module's or tensor's name, with its number."""
_LE = re.compile(r"\.lora_experts\.[0-9]+\.le_(?:gate|up|down)\.")
_HALF = {"lora_A": "A", "lora_B": "B"}
CANONICAL = {
    "gate_proj": "gate",
    "up_proj": "up",
    "down_proj": "down",
    "w1": "gate",
    "w3": "up",
    "w2": "down",
}
# Names that may follow a wrapper's "module" within a layer. No model calls a part of itself so beside them.
ATTENTION_BLOCKS = ("self_attn", "linear_attn", "attn", "attention", "mixer", "cross_attn")
_CHILDREN = frozenset({*BLOCKS, *ATTENTION_BLOCKS, "experts", "gate", "router"})
_PARENTS = frozenset({"base_model", "model", "language_model"})
# torch.compile, FSDP 1, checkpoint wrappers, Lightning, fairscale, Opacus.
_WRAPPER = re.compile(r"_orig_mod|_[a-z_]*wrapped_module|_(?:forward|fpw)_module|_module")
# A name that may be more than a module's path: cheap, as most have nothing of it.
_ODD = re.compile(
    r"(?:^|\.)(?:module|_orig_mod|_[a-z_]*module)\.|[^\n]\.base_model\.model\.|(?<!\.lora)_[AB]\.weight$"
    r"|\.lora_(?:[AB]|embedding_[AB]|magnitude_vector)\.(?!(?:weight|bias)$)"
)
_NAMED = re.compile(
    r"(.+\.lora_(?:[AB]|embedding_[AB]|magnitude_vector))\.(?!(?:weight|bias)$)([^.]+)(\.weight|\.bias)?",
    re.DOTALL,
)
_LOST = re.compile(r"([^\n]+\.[a-z][a-z0-9_]*)_([AB])\.weight")
# Modules of routed experts, however tools spell them, and not shared experts.
_EXPERT_SEGMENT = re.compile(
    r"(?!shared?_)(?:[a-z]+_)*experts?(?:_[a-z]+)*(?:_?[0-9]+)?"
    r"|switch_(?:mlp|glu|linear)|ffn_[a-z_]+_exps|(?:gate|up|down|gate_up)_projs"
)
_MOE_BLOCK = re.compile(r"(?:[a-z]+_)*moe(?:_[a-z]+)*")
_MLP_BLOCK = re.compile(rf"{_BLOCK}|ffn|ff|{_MOE_BLOCK.pattern}")
_VISION = frozenset(
    {"visual", "vision", "vision_tower", "vision_model", "vision_encoder", "image_encoder"}
    | {"audio", "audio_tower", "audio_model", "audio_encoder"}
)
_DRAFT = frozenset({"mtp", "mtp_layers", "nextn", "draft", "eagle"})


class Key(NamedTuple):
    """A parsed key. ``module`` lacks PEFT's prefix; ``layer``/``expert`` are -1 where not given."""

    kind: Kind
    module: str = ""
    half: str = ""
    layer: int = -1
    expert: int = -1
    projection: str = ""

    @property
    def leaf(self) -> str:
        """The module's leaf name, as PEFT's target_modules lists it ("q_proj")."""
        return self.module.rpartition(".")[2]

    @property
    def suffix(self) -> str:
        """The module's path within its layer ("self_attn.q_proj")."""
        return self.module.rpartition(f"layers.{self.layer}.")[2]

    @property
    def is_vision(self) -> bool:
        """Return whether the module belongs to a vision or audio tower rather than to the text model."""
        return not _VISION.isdisjoint(self.module.split("."))

    @property
    def is_draft(self) -> bool:
        """Return whether the module belongs to a multi-token-prediction (draft) block."""
        return not _DRAFT.isdisjoint(self.module.split("."))


class Spelling(NamedTuple):
    """A key as PEFT saves it, and what was taken out of it or put back.

    ``wrappers``: names that a framework's wrappers have in a path. ``adapter``: the adapter's name, which a
    state dict in memory has in its keys. ``lost``: PEFT took "lora" out, as the adapter's name (its #2699).
    """

    name: str
    wrappers: tuple[str, ...] = ()
    adapter: str = ""
    lost: bool = False


def parse_key(name: str) -> Key:
    """Parse any tensor key; never fails: an unknown key has kind "other"."""
    name = plain_name(name).name
    # Fast path for expert keys: adapters have tens of thousands of them and few others.
    return _plain_expert_key(name) or _parse_any(name)


def plain_name(name: str) -> Spelling:
    """Take wrappers' names and an adapter's name out of a key, wherever they are in it.

    ``module`` is DDP's and DeepSpeed's name as well as one that a model may use: it goes only where what is
    left is a path that models have.
    """
    if _ODD.search(name) is None:
        return Spelling(name)
    parts: list[str] = []
    wrappers: dict[str, None] = {}
    given = name.split(".")
    for place, part in enumerate(given):
        after = given[place + 1 :]
        if after and (_WRAPPER.fullmatch(part) or (part == "module" and _wraps(parts, after))):
            wrappers[part] = None
        else:
            parts.append(part)
    while start := _peft_root(parts):
        wrappers[".".join(parts[:start])] = None
        del parts[:start]
    plain, adapter, lost = ".".join(parts), "", False
    if named := _NAMED.fullmatch(plain):
        stem, adapter, end = named.groups()
        plain = stem + (end or "")
    elif ".lora_" not in plain and (short := _LOST.fullmatch(plain)):
        plain, lost = f"{short[1]}.lora_{short[2]}.weight", True
    return Spelling(plain, tuple(wrappers), adapter, lost)


def _peft_root(parts: list[str]) -> int:
    """The place from which a path is PEFT's, if another model holds PEFT's: Lightning's, TRL's, PEFT's."""
    pairs = range(1, len(parts) - 2)
    return next((n for n in pairs if parts[n : n + 2] == ["base_model", "model"]), 0)


def _wraps(before: list[str], after: list[str]) -> bool:
    """Return whether ``module`` between these is a wrapper's."""
    following = next((part for part in after if not _WRAPPER.fullmatch(part)), "")
    if "layers" not in before:
        inside = {"layers", "lm_head", "embed_tokens"}.intersection(after)
        return bool(inside) and _PARENTS.issuperset(before)
    if any(part.startswith("lora_") for part in before):
        return True
    if following.startswith("lora_"):
        return before[-1].endswith("_proj") or before[-1] in CANONICAL
    if before[-2] == "layers":
        return True
    experts = before[-1] == "experts" and following.isdigit()
    return experts or following in _CHILDREN or following.endswith("_proj")


def is_named(target: str, module: str) -> bool:
    """Return whether ``target`` is a module's full name or the end of it, at a dot."""
    return module == target or module.endswith(f".{target}")


def is_expert_like(module: str) -> bool:
    """Return whether a module's path looks like that of a routed expert, or of several."""
    path = module.split(".")
    rest = path[path.index("layers") + 2 :] if "layers" in path else path
    if not rest or any(part.startswith("share") for part in rest):
        return False
    if any(_EXPERT_SEGMENT.fullmatch(part) for part in rest):
        return True
    inside = next((n for n, part in enumerate(rest) if _MLP_BLOCK.fullmatch(part)), len(rest))
    if any(part.isdigit() for part in rest[inside:]):
        return True
    moe = any(_MOE_BLOCK.fullmatch(part) for part in rest[:-1])
    return moe and ROUTER.search(module) is None


def _plain_expert_key(name: str) -> Key | None:
    parts = name.rsplit(".", 4)
    if len(parts) != 5 or parts[4] != "weight":
        return None
    projection, half = CANONICAL.get(parts[2]), _HALF.get(parts[3])
    if projection is None or half is None:
        return None
    experts, layer = _experts_of(parts[0])
    expert = _number(parts[1])
    if layer < 0 or expert < 0:
        return None
    return Key("expert", f"{experts}.{parts[1]}.{parts[2]}", half, layer, expert, projection)


def _parse_any(name: str) -> Key:
    match = _LORA.fullmatch(name)
    if match:
        module, half = match.groups()
        if ".orig_module" in module:
            module = module.replace(".orig_module", "")
        expert = _EXPERT_MODULE.fullmatch(module)
        if expert:
            layer, number, projection = expert.groups()
            return Key("expert", module, half, int(layer), int(number), CANONICAL[projection])
        kind: Kind = "lora"
        if module.endswith((".experts", ".experts.base_layer")):
            kind = "peft-fused"
        elif "\n" in module or ".lora_" in module:
            return Key("other")
        return Key(kind, module, half, _layer_of(module))
    match = _FUSED.fullmatch(name)
    if match:
        layer, projection, half = match.groups()
        return Key("fused", "", half.upper(), int(layer), -1, projection)
    return _parse_foreign(name)


@lru_cache(maxsize=4096)
def _experts_of(path: str) -> tuple[str, int]:
    """The module that holds a layer's experts, and its layer; ("", -1) for any other path."""
    match = _EXPERTS.fullmatch(path)
    if match is None or ".lora_" in path:
        return "", -1
    return match.group(1).replace(".orig_module", ""), int(match.group(2))


@lru_cache(maxsize=4096)
def _number(text: str) -> int:
    return int(text) if re.fullmatch(_NUMBER, text) else -1


def _parse_foreign(name: str) -> Key:
    stem = name[len(PEFT_PREFIX) :] if name.startswith(PEFT_PREFIX) else name
    module = stem.partition(".lora_")[0]
    layer = _layer_of(stem)
    if _LE.search(stem):
        return Key("lora-experts", module, "", layer)
    if ".lora_magnitude_vector" in stem:
        return Key("dora", module, "", layer)
    if ".lora_embedding_" in stem:
        return Key("embedding", module, "", layer)
    if re.search(r"\.lora_[AB]\.bias$", stem):
        return Key("lora-bias", module, "", layer)
    return Key("other", stem.removesuffix(".weight"), "", layer)


def _layer_of(module: str) -> int:
    match = LAYER.search(module)
    return int(match.group(1)) if match else -1


def fused_key(layer: int, name: str) -> str:
    """``layers.3.experts.gate_lora_a``, for the name ``gate_lora_a``"""
    return f"layers.{layer}.experts.{name}"


def expert_key(layer: int, expert: int, projection: str, half: str) -> str:
    """``model.layers.3.mlp.experts.7.gate_proj.lora_A.weight``, as SGLang-KT expects it."""
    return f"model.layers.{layer}.mlp.experts.{expert}.{projection}_proj.lora_{half}.weight"


def peft_key(module: str, half: str) -> str:
    """``base_model.model.model.layers.3.self_attn.q_proj.lora_A.weight``"""
    return f"{PEFT_PREFIX}{module}.lora_{half}.weight"
