"""Checks of several directories that belong together: one raw adapter and what was made of it.

Rank, alpha and base must agree, each half must be somewhere, and with the raw adapter at hand every
serving tensor is compared with the one it came from. Scale is compared as well, tensor by tensor:
an engine multiplies B·A by alpha/r of the directory that it loads, training multiplied by its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import combinations

from ktbridge.adapter.adapter import Adapter, ExpertStack, Part, last_part
from ktbridge.adapter.rules import problem
from ktbridge.adapter.values import scaled_exactly
from ktbridge.errors import KtbridgeError, Problem


def check_set(adapters: Sequence[Adapter], compare_data: bool) -> Iterator[Problem]:
    """Every disagreement between the directories; values are compared only if asked."""
    by_layout: dict[str, Adapter] = {}
    for adapter in adapters:
        other = by_layout.setdefault(adapter.layout, adapter)
        if other is not adapter:
            found = f"is a second {adapter.layout} directory beside {other.path}"
            yield problem("KTB506", str(adapter.path), found)
    for first, second in combinations(by_layout.values(), 2):
        yield from _bases(first, second)
    raw = by_layout.pop("raw", None)
    if raw is None:
        expert, nonexpert = by_layout.get("expert"), by_layout.get("nonexpert")
        if expert is not None and nonexpert is not None:
            yield from _same_numbers(expert, nonexpert)
        return
    yield from _halves_present(raw, by_layout)
    for adapter in by_layout.values():
        try:
            yield from _scales(raw, adapter)
        except KtbridgeError:
            continue  # a missing alpha or rank is a problem of its own directory
        yield from _same_inventory(raw, adapter)
        if compare_data:
            yield from _same_values(raw, adapter)


def _bases(first: Adapter, second: Adapter) -> Iterator[Problem]:
    names = first.base_model, second.base_model
    if names[0] and names[1] and last_part(names[0]) != last_part(names[1]):
        # Conversion may rename the base model; two halves served together may not differ in it.
        apart = "raw" in (first.layout, second.layout)
        yield problem(
            "KTB502",
            str(second.path),
            f"names the base model {names[1]!r}",
            f"{names[0]!r} as in {first.path}",
            severity="warning" if apart else "error",
        )


def _same_numbers(expert: Adapter, nonexpert: Adapter) -> Iterator[Problem]:
    # Directories written by convert may differ on purpose; their manifests vouch for it.
    if all(adapter.manifest and adapter.manifest.get("layout") for adapter in (expert, nonexpert)):
        return
    for name in ("r", "lora_alpha"):
        one, other = expert.config.get(name), nonexpert.config.get(name)
        if one != other:
            found = f"{name} is {other!r}"
            yield problem("KTB501", str(nonexpert.path), found, f"{one!r} as in {expert.path}")


def _halves_present(raw: Adapter, others: dict[str, Adapter]) -> Iterator[Problem]:
    if not others:
        return
    for half, parts in (("expert", raw.experts), ("nonexpert", raw.nonexpert)):
        if parts and half not in others and "merged" not in others:
            where = ", ".join(str(adapter.path) for adapter in others.values())
            yield problem("KTB503", where, f"the {half.replace('non', 'non-')} half is missing")


def _scales(raw: Adapter, adapter: Adapter) -> Iterator[Problem]:
    # Non-expert B may carry part of the scale (rsLoRA in a merged directory); the comparison of
    # values accounts for it, so only the split layout is judged by its configuration.
    served = adapter.nonexpert_alpha / adapter.nonexpert_rank
    where = str(adapter.path)
    if adapter.experts:
        trained = raw.alpha / raw.rank
        if not math.isclose(served, trained, rel_tol=1e-9):
            found = f"experts are served at alpha/r = {served:g}"
            yield problem("KTB505", where, found, f"{trained:g}, as trained")
    if adapter.layout == "nonexpert" and raw.nonexpert:
        trained = raw.nonexpert_scale
        if not math.isclose(served, trained, rel_tol=1e-9):
            found = f"non-expert LoRA is served at alpha/r = {served:g}"
            yield problem("KTB505", where, found, f"{trained:g}, as trained")


def _same_inventory(raw: Adapter, adapter: Adapter) -> Iterator[Problem]:
    where = str(adapter.path)
    if adapter.layout in ("expert", "merged"):
        odd = raw.experts.keys() ^ adapter.experts.keys()
        if odd:
            layer, projection, half = sorted(odd)[0]
            side = "lacks" if (layer, projection, half) in raw.experts else "adds"
            found = f"{side} {projection}_proj.lora_{half} of layer {layer}"
            yield problem("KTB504", where, found, "the raw adapter's experts")
    if adapter.layout in ("nonexpert", "merged"):
        odd_keys = sorted(raw.nonexpert.keys() ^ adapter.nonexpert.keys())
        if odd_keys:
            side = "lacks" if odd_keys[0] in raw.nonexpert else "adds"
            found = f"{side} {odd_keys[0]}"
            yield problem("KTB504", where, found, "the raw adapter's non-expert tensors")


def _same_values(raw: Adapter, adapter: Adapter) -> Iterator[Problem]:
    for slot in sorted(raw.experts.keys() & adapter.experts.keys()):
        theirs, ours = raw.experts[slot], adapter.experts[slot]
        differing = _first_difference(theirs, ours)
        if differing is not None:
            layer, projection, half = slot
            where = (
                f"{adapter.path}: layer {layer} expert {differing} {projection}_proj.lora_{half}"
            )
            twin = {"gate": "up", "up": "gate"}.get(projection)
            swapped = twin and (layer, twin, half) in raw.experts
            if swapped and _first_difference(raw.experts[layer, str(twin), half], ours) is None:
                yield problem("KTB504", where, "gate and up are swapped", "the raw adapter's gate")
            else:
                yield problem("KTB504", where, "differs from the raw adapter")
            break
        _release(raw, adapter)
    ratio = 1.0
    if adapter.nonexpert and raw.nonexpert:
        ratio = raw.nonexpert_scale / (adapter.nonexpert_alpha / adapter.nonexpert_rank)
    for key in sorted(raw.nonexpert.keys() & adapter.nonexpert.keys()):
        if not _same_nonexpert(raw.nonexpert[key], adapter.nonexpert[key], ratio):
            yield problem("KTB504", f"{adapter.path}: {key}", "differs from the raw adapter")
            break


def _first_difference(one: ExpertStack, other: ExpertStack) -> int | None:
    """The first expert whose bytes, shape or dtype differ; None when all are equal."""
    left, right = dict(one.slices()), dict(other.slices())
    for expert in sorted(left.keys() | right.keys()):
        a, b = left.get(expert), right.get(expert)
        if a is None or b is None or (a.dtype, a.shape) != (b.dtype, b.shape):
            return expert
        # Views compare element by element in Python's own loop, bytes at the speed of memory.
        if bytes(a.file.view(a.start, a.end)) != bytes(b.file.view(b.start, b.end)):
            return expert
    return None


def _same_nonexpert(raw: Part, served: Part, ratio: float) -> bool:
    one, other = raw.entry, served.entry
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    source = raw.file.view(one.start, one.end)
    target = bytes(served.file.view(other.start, other.end))
    if bytes(source) == target:
        # Equal bytes are right as long as the configuration carries the whole scale.
        return raw.key.half == "A" or math.isclose(ratio, 1.0, rel_tol=1e-9)
    if raw.key.half == "A":
        return False
    scaled = scaled_exactly(source, one.dtype, ratio)
    return scaled is not None and scaled == target


def _release(*adapters: Adapter) -> None:
    for adapter in adapters:
        for file in adapter.files:
            file.release()
