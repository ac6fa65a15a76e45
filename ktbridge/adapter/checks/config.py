"""Checks of adapter_config.json and the manifest: what engines ignore, misread or need."""

from __future__ import annotations

from collections.abc import Iterator
from shlex import quote

from ktbridge.adapter.adapter import CONFIG_FILE, MAX_ALPHA, Adapter, convert_step, is_number, last_part
from ktbridge.adapter.checks import Use, many
from ktbridge.adapter.keys import CANONICAL, is_named
from ktbridge.adapter.lora_config import (
    UNFOLDED,
    check_folding,
    check_trainer,
    numbers_of,
    patterns_of,
    peft_numbers,
)
from ktbridge.adapter.manifest import MANIFEST_FILE, WEIGHT_FORMATS
from ktbridge.codes import problem
from ktbridge.errors import KtbridgeError, Problem, has_errors
from ktbridge.model import Family

FOREIGN = ("peft-fused", "sglang-3d")
# Fields that change what the adapter computes and that no engine reads.
_UNREAD = (
    ("use_dora", "KTB110"),
    ("lora_bias", "KTB111"),
    ("modules_to_save", "KTB112"),
    ("fan_in_fan_out", "KTB113"),
    ("layer_replication", "KTB115"),
    ("target_parameters", "KTB115"),
    ("trainable_token_indices", "KTB115"),
    ("alora_invocation_tokens", "KTB115"),
    ("use_qalora", "KTB115"),
    ("use_bdlora", "KTB115"),
    ("arrow_config", "KTB115"),
    ("monteclora_config", "KTB115"),
    ("kasa_config", "KTB115"),
)
# Initializations that subtract their initial delta from the base weights.
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
# Names under which training may target routed experts: their LoRA is in the expert half.
_EXPERT_TARGETS = {*Family.names, "gate_up_proj", "w1", "w2", "w3", "experts"}


def check_foreign(adapter: Adapter) -> Iterator[Problem]:
    """Expert LoRA that must be converted before it can be served."""
    for kind, code, found in (
        ("peft-fused", "KTB208", "is expert LoRA in PEFT's fused layout"),
        ("sglang-3d", "KTB216", "is expert LoRA of all experts in one tensor"),
    ):
        parts = [part for part in adapter.leftovers if part.key.kind == kind]
        # The reader tells PEFT's layouts apart, by more than shapes.
        form = "" if kind == "peft-fused" else f"--from {kind} "
        step = convert_step(adapter, f"{form}--to raw --output D")
        yield from many(code, parts, found, "one tensor an expert", next_step=step)


def is_foreign(adapter: Adapter) -> bool:
    """Return whether the adapter holds expert LoRA of another tool's layout."""
    return any(part.key.kind in FOREIGN for part in adapter.leftovers)


def check_config(adapter: Adapter, use: Use) -> Iterator[Problem]:
    """Every finding about one directory's configuration and manifest."""
    where = str(adapter.path / CONFIG_FILE)
    yield from _basics(adapter, where, use)
    yield from _unread(adapter, where, use)
    if not is_foreign(adapter):  # there patterns describe expert LoRA, which has a rule of its own
        yield from _patterns(adapter, where, use)
        if not use.served:
            yield from check_trainer(adapter)
    yield from _manifest_agrees(adapter, use)
    if adapter.base_model is None:
        yield problem("KTB116", where, "names no base model")
    if adapter.config.get("use_rslora") and (use.served or adapter.nonexpert):
        if use.served:
            found, step = "use_rslora is true", convert_step(adapter)
            yield problem("KTB107", where, found, "use_rslora false", next_step=step)
        else:
            step = "nothing: ktbridge convert folds it where that is exact"
            found = "use_rslora is true for the non-expert LoRA"
            yield problem("KTB107", where, found, severity="info", next_step=step)
    yield from _targets(adapter, where, use)


def _basics(adapter: Adapter, where: str, use: Use) -> Iterator[Problem]:
    config = adapter.config
    if "peft_type" not in config and use.served and adapter.nonexpert:
        yield problem("KTB101", where, "has no peft_type", "LORA", next_step=convert_step(adapter))
    elif str(config.get("peft_type", "LORA")).upper() != "LORA":
        yield problem("KTB101", where, f"peft_type is {config['peft_type']!r}", "LORA")
    rank = config.get("r")
    if type(rank) is not int or rank <= 0:
        yield problem("KTB102", where, f"r is {rank!r}", "a positive integer")
    alpha = config.get("lora_alpha")
    vouched = adapter.layout == "raw" and not adapter.nonexpert and is_number(adapter.lora.get("alpha"))
    if not (is_number(alpha) and alpha <= MAX_ALPHA) and not (alpha is None and vouched):
        yield problem("KTB103", where, f"lora_alpha is {alpha!r}", "a positive number up to 1e6")


def _are_modules(adapter: Adapter) -> bool:
    """True if target_parameters are weights of modules that have LoRA here: PEFT's other name for them."""
    targets = adapter.config.get("target_parameters")
    modules = {part.key.module for part in adapter.nonexpert.values()}
    return isinstance(targets, list) and all(
        isinstance(target, str)
        and target.endswith(".weight")
        and any(is_named(target.removesuffix(".weight"), module) for module in modules)
        for target in targets
    )


def _unread(adapter: Adapter, where: str, use: Use) -> Iterator[Problem]:
    config = adapter.config
    followed = is_foreign(adapter) or (not use.served and _are_modules(adapter))
    for name, code in _UNREAD:
        if name == "target_parameters" and followed:
            continue
        if config.get(name):
            yield problem(code, where, f"{name} is set")
    bias = config.get("bias")
    if bias not in (None, "none"):
        yield problem("KTB111", where, f"bias is {bias!r}", "'none'")
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGES_BASE):
        yield problem("KTB114", where, f"init_lora_weights is {start!r}")


def _patterns(adapter: Adapter, where: str, use: Use) -> Iterator[Problem]:
    """Yield what isn't followed in patterns, and, if served as it is, what engines ignore of them."""
    config, told = adapter.config, False
    for name, code in (("rank_pattern", "KTB108"), ("alpha_pattern", "KTB109")):
        try:
            patterns_of(config, name)
        except KtbridgeError as error:
            yield problem(code, where, error.sentence[:300], next_step=error.next_step or None)
            told = True
    fields = [name for name in ("rank_pattern", "alpha_pattern") if config.get(name)]
    if told or not fields or not (is_number(config.get("lora_alpha")) and config.get("r")):
        return
    try:
        modules = {part.key.module: numbers_of(adapter, part.key) for part in adapter.tensors()}
        usual = peft_numbers({**config, "rank_pattern": None, "alpha_pattern": None}, "")
    except KtbridgeError as error:
        yield problem("KTB109", where, error.sentence[:300], next_step=error.next_step or None)
        return
    if not use.served:
        return
    modules.pop("", None)  # a raw tensor of all experts is no module of PEFT's
    foldable = not has_errors(check_folding(adapter))
    step = convert_step(adapter) if foldable else UNFOLDED.format(path=quote(str(adapter.path)))
    ranks = [module for module, own in modules.items() if own.rank != usual.rank]
    alphas = [module for module, own in modules.items() if own.alpha != usual.alpha]
    if ranks:
        found = f"rank_pattern gives {ranks[0]} rank {modules[ranks[0]].rank}{_and_more(ranks)}"
        yield problem("KTB108", where, found[:300], f"r, {usual.rank}", next_step=step)
    if alphas:
        found = f"alpha_pattern gives {alphas[0]} another alpha{_and_more(alphas)}"
        yield problem("KTB109", where, found[:300], next_step=step)


def _manifest_agrees(adapter: Adapter, use: Use) -> Iterator[Problem]:
    manifest = adapter.manifest
    if manifest is None:
        return
    where, here = str(adapter.path / MANIFEST_FILE), "here"
    if not (adapter.path / MANIFEST_FILE).exists():  # the reader of another format made it
        where, here = str(adapter.path), "of the experts"
    lora = manifest.get("lora")
    if lora is not None and (
        not isinstance(lora, dict)
        or (lora.get("alpha") is not None and not is_number(lora["alpha"]))
        or (lora.get("rank") is not None and not is_number(lora["rank"]))
    ):
        yield problem("KTB010", where, "its lora entry has no usable rank and alpha")
        return
    stored = manifest.get("expert_weight_format")
    if stored is not None and stored not in WEIGHT_FORMATS:
        found = f"expert_weight_format is {stored!r}"
        yield problem("KTB120", where, found[:200], ", ".join(WEIGHT_FORMATS))
    named, base = adapter.config.get("base_model_name_or_path"), manifest.get("base")
    other = base.get("model_name_or_path") if isinstance(base, dict) else None
    both = isinstance(named, str) and isinstance(other, str) and named and other
    if both and last_part(str(named)) != last_part(str(other)):
        found = f"names the base model {other!r}"
        yield problem("KTB119", where, found, f"{named!r} as in {CONFIG_FILE}")
    alpha, own = adapter.lora.get("alpha"), adapter.config.get("lora_alpha")
    if is_number(alpha) and is_number(own) and float(own) != alpha:
        found = f"alpha is {alpha:g} {here} and {own:g} in {CONFIG_FILE}"
        if use.served and not is_foreign(adapter):  # PEFT's layout has the second one as a pattern
            yield problem("KTB104", where, found, "one alpha")
        elif adapter.experts and adapter.nonexpert:
            step = f"nothing: experts keep {alpha:g}, everything else keeps {own:g}"
            yield problem("KTB104", where, found, severity="info", next_step=step)


def _targets(adapter: Adapter, where: str, use: Use) -> Iterator[Problem]:
    targets = adapter.config.get("target_modules")
    is_list = isinstance(targets, list) and all(isinstance(item, str) for item in targets)
    if not is_list:
        # The expert loader reads r and lora_alpha only.
        if use.served and adapter.nonexpert:
            found = f"target_modules is {targets!r}"
            step = convert_step(adapter)
            yield problem("KTB106", where, found[:200], "a list of module names", next_step=step)
        return
    assert isinstance(targets, list)
    modules = {part.key.module: {part.key.module} for part in adapter.nonexpert.values()}
    own = {name.rpartition(".")[2] for name in modules}
    for part in adapter.leftovers:
        if part.key.kind in ("sglang-3d", "unread"):
            modules[part.key.module] = {part.key.module}
    modules |= _expert_paths(adapter)
    named = {*targets, *_with_experts(targets, adapter, own)}
    ends = {end for paths in modules.values() for path in paths for end in _ends(path)}
    absent = [
        target
        for target in targets
        if target not in ends
        and (target in own or _with_experts([target], adapter, own)[0] not in ends)
        and not (adapter.layout == "raw" and target.rpartition(".")[2] in _EXPERT_TARGETS)
    ]
    if absent:
        found = f"targets {', '.join(sorted(absent)[:6])}, for which there are no tensors"
        yield problem("KTB117", where, found)
    if use.served and adapter.layout != "expert" and not is_foreign(adapter):
        stray = sorted(
            module
            for module, paths in modules.items()
            if not any(end in named for path in paths for end in _ends(path))
        )
        if stray:
            found = f"does not target {stray[0]}" + _and_more(stray)
            expected, step = "every adapted module in target_modules", convert_step(adapter)
            yield problem("KTB118", where, found, expected, next_step=step)
    elif not is_foreign(adapter):
        yield from _untargeted(adapter, where, [*named])


def _expert_paths(adapter: Adapter) -> dict[str, set[str]]:
    """Paths of the experts' modules, each by the checkpoint's name and by the one that it has here.

    One expert stands for all but where a target is a path, as there are tens of thousands.
    """
    targets = adapter.config.get("target_modules")
    by_path = isinstance(targets, list) and any("." in str(target) for target in targets)
    paths: dict[str, set[str]] = {}
    for (_, projection, half), stack in adapter.experts.items():
        if half == "B":
            continue
        for part in stack.parts.values() if by_path else ():
            owner, _, leaf = part.key.module.rpartition(".")
            paths[part.key.module] = {part.key.module, f"{owner}.{CANONICAL[leaf]}_proj"}
        if not by_path or stack.fused is not None:
            name = f"mlp.experts.0.{projection}_proj"
            paths[name] = {name}
    return paths


def _ends(module: str) -> Iterator[str]:
    """Yield what PEFT takes for a module in target_modules: its path, or the end of it from a dot on."""
    parts = module.split(".")
    return (".".join(parts[start:]) for start in range(len(parts)))


def _with_experts(targets: list[str], adapter: Adapter, own: set[str]) -> list[str]:
    """``targets`` with experts' projections by the one name that they have here: w1 is gate_proj.

    ``own``: names of other modules, which stay (LFM2's dense layers have w1, too).
    """
    experts = adapter.expert_modules()
    found: dict[str, None] = {}
    for each in targets:
        name = f"{CANONICAL[each]}_proj" if experts and each in CANONICAL else each
        if each in own:
            found[each] = None
        if each not in own or name in experts:
            found[name] = None
    return [*found]


def _untargeted(adapter: Adapter, where: str, targets: list[str]) -> Iterator[Problem]:
    """Find what PEFT and vLLM take from target_modules where SGLang-KT or a conversion doesn't read it."""
    if adapter.layout == "expert":
        named = {*Family.names} & {target.rpartition(".")[2] for target in targets}
        modules = {f"mlp.experts.0.{name}" for name in adapter.expert_modules()} if named else set()
    else:  # the experts' LoRA is no matter of PEFT's
        modules = {part.key.module for part in adapter.nonexpert.values()}
    parameters = adapter.config.get("target_parameters")
    if isinstance(parameters, list):
        targets = targets + [str(name).removesuffix(".weight") for name in parameters]
    stray = sorted(m for m in modules if not any(is_named(target, m) for target in targets))
    if stray:
        found = f"does not target {stray[0]}, which tensors are there for"
        expected = "every adapted module in target_modules"
        yield problem("KTB121", where, found + _and_more(stray), expected)


def _and_more(modules: list[str]) -> str:
    return f" (and {len(modules) - 1} more modules)" if len(modules) > 1 else ""
