"""Build and parse the model names under which servers offer their arms.

``S`` is base + expert LoRA, ``S:NAME`` the whole of adapter NAME, ``S:base`` the base model itself. The
embedded engine lists them so. SGLang-KT lists NAME for requests to ``S:NAME``, and has no ``S:base``.

``read_models`` reads what a server says of its models: the embedded engine's ``description``, and the
``parent`` that the embedded engine, vLLM and SGLang give for a model with an adapter.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ktbridge.errors import KtbridgeError, UsageError

BASE = "base"
_HALVES = ("expert LoRA", "non-expert LoRA")
"""Halves of an adapter, as descriptions of arms name them."""


def adapter_name(served: str, adapter: str) -> str:
    """``S:NAME``."""
    return f"{served}:{adapter}"


def base_name(served: str) -> str:
    """``S:base``."""
    return adapter_name(served, BASE)


def names_adapter(name: str) -> bool:
    """Return whether ``name`` selects an adapter, or the base, of a served model."""
    return ":" in name


def split_name(name: str) -> tuple[str, str | None]:
    """``S:NAME`` -> (S, NAME), ``S`` -> (S, None)."""
    served, colon, adapter = name.partition(":")
    return served, adapter if colon else None


def served_by(name: str) -> str | None:
    """``S:base`` -> S; None for every other name."""
    served, colon, last = name.rpartition(":")
    return served if colon and last == BASE else None


def listed_as(name: str, listed: Collection[str]) -> str | None:
    """The entry for ``name`` in a server's list: itself, or NAME if S is listed. None: not offered."""
    if name in listed:
        return name
    served, adapter = split_name(name)
    return adapter if adapter in listed and served in listed else None


def adapters_of(served: str, listed: Iterable[str]) -> list[str]:
    """The ``S:NAME`` in a list, without ``S:base``."""
    base = base_name(served)
    return [name for name in listed if name.startswith(f"{served}:") and name != base]


@dataclass(frozen=True)
class ServedArm:
    """One way to run the model: which halves of the adapter take part.

    ``nonexpert`` is the adapter name whose non-expert LoRA is switched on, or None. ``expert_of`` is the
    adapter name whose expert LoRA it is, on a server that holds several; None: the only one.
    """

    name: str
    expert: bool
    nonexpert: str | None
    expert_of: str | None = None

    @property
    def description(self) -> str:
        parts = ["base"]
        if self.expert:
            parts.append(" ".join(filter(None, ("expert LoRA", self.expert_of))))
        if self.nonexpert is not None:
            parts.append(f"non-expert LoRA {self.nonexpert}")
        return " + ".join(parts)


Variant = Literal["base", "expert", "full", "adapter"]
"""A served model: the base, with its expert LoRA alone, with the whole adapter, with some adapter."""
ModelEntry = Mapping[str, object]
APPLIED_PATHS = {"sglang": ("/server_info", "/get_server_info"), "llamacpp": ("/lora-adapters",)}
"""Paths at which engines tell which adapter they apply to every request, by their name in ``owned_by``."""


@dataclass(frozen=True)
class ServedModel:
    """One model of a server, by the ``name`` that requests must use, as far as the server's list tells.

    ``variant`` is None where it doesn't tell. ``base`` is the name of the base model on the same server,
    None where there is none or it isn't known. ``says`` is what the server says, in words. ``identity`` is
    equal for two names of one model, None where nothing tells.
    """

    name: str
    variant: Variant | None = None
    base: str | None = None
    says: str = ""
    identity: tuple[str, ...] | None = None


def engine_of(entries: Mapping[str, ModelEntry]) -> str:
    """The engine that a server's list names: "vllm", "sglang", "llamacpp", …; "" for none."""
    return next((str(entry.get("owned_by") or "") for entry in entries.values()), "")


def applied_adapter(owner: str, document: object) -> str:
    """The adapter that a server applies to every request, by one of its ``APPLIED_PATHS``; "" for none."""
    if owner == "sglang" and isinstance(document, Mapping):
        return str(document.get("kt_expert_lora_path") or document.get("kt_lora_path") or "")
    if owner == "llamacpp" and isinstance(document, list):
        rows = [row for row in document if isinstance(row, Mapping) and row.get("scale")]
        return ", ".join(str(row.get("path", "an adapter")) for row in rows)
    return ""


def read_models(entries: Mapping[str, ModelEntry], applied: str = "") -> dict[str, ServedModel]:
    """A server's models by the names that requests must use.

    ``entries`` is its list by id; ``applied`` what ``applied_adapter`` found.
    """
    models = [_read_model(name, entries, applied) for name in entries]
    return {model.name: model for model in models}


def _read_model(name: str, entries: Mapping[str, ModelEntry], applied: str) -> ServedModel:
    entry = entries[name]
    owner = str(entry.get("owned_by", ""))
    root, parent = (str(entry.get(key) or "") for key in ("root", "parent"))
    identity: tuple[str, ...] | None = None
    if owner == "ktbridge" and entry.get("fingerprint"):
        identity = (str(entry["fingerprint"]),)
    said = str(entry.get("description") or "")
    base = base_name(split_name(name)[0])
    if said.split(" + ")[0] == BASE:
        expert, nonexpert = described_halves(said)
        variant: Variant = "full" if nonexpert else "expert" if expert else "base"
        return ServedModel(name, variant, base if base in entries else None, said, identity)
    if owner in ("vllm", "sglang") and root not in ("", name):  # the directory behind the name
        identity = (root, parent)
    if parent not in ("", name):
        said = f"an adapter of {parent}" + (f", from {root}" if root not in ("", name) else "")
        if owner == "sglang":  # which answers for the bare name with its base
            name = adapter_name(parent, name)
        known = parent in entries and not applied
        return ServedModel(name, "full" if applied else "adapter", parent if known else None, said, identity)
    if applied:
        variant = "expert" if owner == "sglang" else "adapter"
        part = "expert LoRA" if owner == "sglang" else "adapter"
        said = f"base + {part} from {applied} in every request"
        return ServedModel(name, variant, None, said, identity)
    if served_by(name) is not None or name in {each.get("parent") for each in entries.values()}:
        return ServedModel(name, "base", name, "", identity)
    return ServedModel(name, None, base if base in entries else None, "", identity)


def find_served_model(
    name: str, entries: Mapping[str, ModelEntry], models: Mapping[str, ServedModel]
) -> ServedModel | None:
    """The model that a request for ``name`` gets; None if it isn't offered, or under another name alone.

    A list without ``parent`` may have the adapter of ``S:NAME`` as NAME.
    """
    if name in models:
        return models[name]
    listed = listed_as(name, entries)
    if listed is None or listed == name or entries[listed].get("parent"):
        return None
    return models[listed]


def whole_name(name: str, models: Mapping[str, ServedModel]) -> str:
    """``S:name``, by which requests get the adapter that a server lists as the bare ``name``."""
    return next(one for one in models if split_name(one)[1] == name)


def bare_adapter(name: str, models: Mapping[str, ServedModel], option: str) -> KtbridgeError:
    """The error for the bare ``name`` of an adapter, listed so by SGLang, which requests call ``S:name``."""
    right = whole_name(name, models)
    return KtbridgeError(
        f"SGLang answers for {name!r} with its base: it applies the adapter of that name for {right!r}"
        " alone.",
        f"give {option} {right}, and use this name in requests",
    )


def described_halves(description: str) -> tuple[bool, bool]:
    """Return whether a description mentions an expert and a non-expert half.

    If it isn't an arm's description, both are assumed, as the name suggests.
    """
    parts = description.split(" + ")
    if parts[0] != BASE:
        return True, True
    first, second = (any(part.startswith(half) for part in parts) for half in _HALVES)
    return first, second


def plain_name_warning(models: Mapping[str, str]) -> str:
    """A warning if the bare served name isn't the base model, else "".

    ``models``: name -> description of the arm, as ``ServedArm`` has it.
    """
    read = read_models({name: {"description": said} for name, said in models.items()})
    plain = [one for one in read.values() if not names_adapter(one.name) and one.variant != "base"]
    if not plain:
        return ""
    model = plain[0]
    whole = [one.name for one in read.values() if one.variant == "full"]
    half = ", half of the adapter" if whole else ""
    where = f"Base model: {model.base}." if model.base else "This server has no base model."
    full = f" Whole adapter: {' or '.join(whole)}." if whole else ""
    return f'WARNING: the name "{model.name}" is not the base model: it is {model.says}{half}. {where}{full}'


def check_served_name(served: str) -> None:
    """Refuse a served name that requests could not select unambiguously (UsageError)."""
    if ":" in served:
        raise UsageError(
            f"the served model name {served!r} contains ':'.",
            "choose a name without ':' with --served-model-name; what follows a ':' in a request names the "
            "adapter",
        )
    if not served.strip() or served != served.strip() or not served.isprintable():
        raise UsageError(
            f"the served model name {served!r} is empty or has spaces around it.",
            "give a printable name with --served-model-name",
        )


def check_adapter_name(name: str) -> None:
    """Refuse an adapter name that cannot follow ``S:`` (UsageError)."""
    if name == BASE:
        raise UsageError(
            "an adapter cannot be named 'base': that name selects the base model itself.",
            "choose another NAME in NAME=DIR",
        )
    if not name or ":" in name or any(c.isspace() or not c.isprintable() for c in name):
        raise UsageError(
            f"{name!r} cannot be an adapter name.", "use letters, digits, '-', '_' and '.' in NAME"
        )


def list_arms(
    served: str,
    *,
    expert: bool,
    whole: Sequence[str] = (),
    nonexpert: Sequence[str] = (),
    experts: Collection[str] = (),
) -> tuple[ServedArm, ...]:
    """The arms of one server, only those of loaded adapters, so that no two names are the same arm.

    ``expert``: one expert LoRA is loaded, which every name has. ``experts``: names of the adapters that have
    one, where several do: each name has its own, and ``S`` is no arm. ``whole``: names of adapters without a
    non-expert half; ``nonexpert``: names of those that have one. Without any adapter ``S`` is the base model.
    """
    arms = []
    if expert or not (whole or nonexpert):
        arms.append(ServedArm(served, expert=expert, nonexpert=None))
    for name in (*whole, *nonexpert):
        own = name if name in experts else None
        arms.append(
            ServedArm(
                adapter_name(served, name),
                expert or own is not None,
                name if name in nonexpert else None,
                own,
            )
        )
    arms.append(ServedArm(base_name(served), expert=False, nonexpert=None))
    return tuple(arms)
