"""Checks for upstream SGLang: what ends its server, and what it leaves out without a word.

SGLang wraps the modules that target_modules names, whose sizes it must know, and each tensor of a layer must
belong to one of them. q, k and v are one module there, gate and up another; their LoRA is put together when
it is loaded, by names alone. `make test-loaders` compares these checks with SGLang's own code; there KTB648
is shown with the fusion asked for, as SGLang leaves it off on a CPU.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from shlex import quote

from ktbridge.adapter.adapter import CONFIG_FILE, Adapter
from ktbridge.adapter.checks import Serving, check_layouts
from ktbridge.adapter.keys import CANONICAL
from ktbridge.adapter.manifest import MAX_BYTES
from ktbridge.codes import problem
from ktbridge.errors import KtbridgeError, Problem
from ktbridge.model import ModelConfig
from ktbridge.model.jsonfile import read_json_file

_EVERYTHING = ("all", "all-linear")
# Modules that are parts of one in SGLang's models (`get_normalized_target_modules`).
_WHOLE = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj"),
    **dict.fromkeys(("gate_proj", "up_proj"), "gate_up_proj"),
    **dict.fromkeys(("q_a_proj", "kv_a_proj_with_mqa"), "fused_qkv_a_proj_with_mqa"),
    **dict.fromkeys(("wq_b", "wk", "weights_proj"), "indexer"),
}
# Those it knows the size of (`get_default_hidden_dim`, and Qwen3.5's own `get_hidden_dim`).
_COMMON = {"qkv_proj", "o_proj", "gate_up_proj", "down_proj", "embed_tokens", "lm_head"}
_LATENT = {"fused_qkv_a_proj_with_mqa", "q_b_proj", "kv_b_proj"}
_HYBRID = {"out_proj", "in_proj_qkvz"}
# A part, and what must be there beside it.
_PARTNERS = {
    "q_proj": "v_proj",
    "v_proj": "q_proj",
    "k_proj": "q_proj",
    "up_proj": "gate_proj",
    "q_a_proj": "kv_a_proj_with_mqa",
    "kv_a_proj_with_mqa": "q_a_proj",
}
_MERGE = "train without it, or merge the adapter"


def _check_adapters(serving: Serving) -> Iterator[Problem]:
    """KTB101, KTB106, KTB644 to KTB646, KTB648, KTB649: what ends SGLang's server, and what it drops."""
    for adapter in serving.served:
        yield from _served(adapter, serving.base)


def _check_family(serving: Serving) -> Iterator[Problem]:
    """KTB647: a family of which nothing was run."""
    base = serving.base
    if base is not None and base.family is not None and not base.family.sglang_run:
        found = f"is of {base.family.name}, of which nothing was run in {serving.newest.title}"
        yield problem("KTB647", str(base.path), found)


def _served(adapter: Adapter, base: ModelConfig | None) -> Iterator[Problem]:
    where = str(adapter.path / CONFIG_FILE)
    if "peft_type" not in adapter.config and not adapter.nonexpert:
        yield problem("KTB101", where, "has no peft_type", "LORA")
    yield from _added_tokens(adapter, base)
    modules = {part.key.module for part in adapter.nonexpert.values() if part.key.layer >= 0}
    targets = adapter.config.get("target_modules")
    named = targets if isinstance(targets, list) else []
    if targets in _EVERYTHING:
        named = sorted(_sized(base))
    elif not named or not all(isinstance(target, str) for target in named):
        expected = f"a list of module names, or {' or '.join(_EVERYTHING)}"
        yield problem("KTB106", where, f"target_modules is {targets!r}"[:200], expected)
        return
    projections = {projection for _, projection, _ in adapter.experts}
    yield from unserved(str(adapter.path), named, modules, projections, base)
    shared = any(".shared_expert" in module for module in modules)
    if base is not None and (adapter.experts or shared) and _fuses(base):
        found = "has a shared expert, which SGLang makes one more routed expert on NVIDIA's GPUs"
        yield problem("KTB648", str(base.path), found)


def _added_tokens(adapter: Adapter, base: ModelConfig | None) -> Iterator[Problem]:
    """SGLang takes added_tokens.json, which trainers save with the tokenizer, for tokens that LoRA adds."""
    file = adapter.path / "added_tokens.json"
    if not file.is_file():
        return
    try:
        added = read_json_file(file, most=MAX_BYTES)
    except KtbridgeError as error:
        text = error.sentence.removeprefix(f"{file} ")
        yield problem("KTB649", str(file), text, "a table of tokens", next_step=f"rm {quote(str(file))}")
        return
    size = None if base is None else base.text.get("vocab_size")
    if type(size) is not int:
        if added:
            found = f"has {len(added)} tokens: whether they are beyond the base's vocabulary isn't known"
            step = "add --base-model (a config.json is enough)"
            yield problem("KTB649", str(file), found, severity="warning", next_step=step)
        return
    beyond = sorted(name for name, number in added.items() if not isinstance(number, int) or number >= size)
    if beyond:
        found = f"has {len(beyond)} tokens beyond the vocabulary, first {beyond[0]!r:.60}"
        yield problem("KTB649", str(file), found, f"numbers below {size}")


def unserved(
    where: str,
    targets: Collection[str],
    modules: Iterable[str],
    projections: Collection[str],
    base: ModelConfig | None,
) -> Iterator[Problem]:
    """Yield what of an adapter ends SGLang's server, and what it would drop.

    ``targets``: target_modules. ``modules``: paths of the layers' modules that have LoRA, without the routed
    experts, of which ``projections`` have ("gate", "up", "down").
    """
    known = _sized(base)
    wholes = {target: _whole(target) for target in targets}
    unsized = sorted(target for target, whole in wholes.items() if whole not in known)
    if unsized:
        found = f"targets {', '.join(unsized[:6])}, whose size SGLang doesn't know"
        renamed = {*unsized} <= {"w1", "w2", "w3"}
        command = f"ktbridge convert {quote(where)} --to sglang-3d --output D"
        step = command if renamed else _MERGE
        yield problem("KTB644", where, found, next_step=step)
    # Tensors of w1, w3 and w2 are taken under the other names.
    covered = {*wholes.values(), *(_whole(f"{CANONICAL.get(name)}_proj") for name in targets)}
    places = [(module.rpartition(".")[2], module) for module in modules]
    places += [(f"{name}_proj", f"the experts' {name}_proj") for name in projections]
    stray = sorted(place for leaf, place in places if _whole(leaf) not in covered)
    yield from _ends(where, stray, "is in no module that target_modules names")
    pair = {"gate_up_proj", "down_proj"}
    if projections and not pair <= covered:
        lacking = " and ".join(sorted(pair - covered))
        found = f"doesn't target {lacking}: SGLang leaves the routed experts as they are"
        yield problem("KTB645", where, found, "both gate_proj or up_proj, and down_proj")
    owners: dict[str, set[str]] = defaultdict(set)
    for leaf, place in places:
        owners[place.removesuffix(leaf)].add(leaf)
    alone = defaultdict(list)
    for owner, leaves in owners.items():
        for leaf in sorted(leaves & _PARTNERS.keys()):
            if _PARTNERS[leaf] not in leaves:
                alone[_PARTNERS[leaf]].append(f"{owner}{leaf}")
    for partner, lonely in alone.items():
        yield from _ends(where, sorted(lonely), f"has no {partner} beside it")


def _ends(where: str, modules: list[str], found: str) -> Iterator[Problem]:
    if modules:
        if len(modules) > 1:
            found += f" ({len(modules)} modules like it)"
        yield problem("KTB646", f"{where}: {modules[0]}", found)


def _whole(module: str) -> str:
    leaf = module.rpartition(".")[2]
    return _WHOLE.get(leaf, leaf)


def _sized(base: ModelConfig | None) -> set[str]:
    """The modules that SGLang has sizes for: of this model, or of any where it isn't known."""
    if base is None or base.family is None or not base.family.sglang_run:
        return _COMMON | _LATENT | _HYBRID | {"indexer"}
    if base.family.sglang_hybrid:
        return _COMMON | _HYBRID
    return _COMMON | _LATENT if "kv_lora_rank" in base.text else _COMMON


def _fuses(base: ModelConfig) -> bool:
    """True if its class makes the shared expert a routed one (`shared_experts_fusion_disable_reason`)."""
    fuses = base.family.sglang_fuses if base.family is not None else None
    if fuses is None or not base.text.get("n_shared_experts"):
        return False
    return fuses[0] in ("", *base.architectures) and fuses[1] in (0, base.num_experts)


CHECKS = (check_layouts, _check_adapters, _check_family)
