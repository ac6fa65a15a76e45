"""Check several directories that belong together: a source and its conversions.

The source is the raw directory, else the first whose layout covers all others. Rank, alpha and base
must agree, each half must be present, and every tensor is compared with its source tensor,
rounded to bfloat16 if conversion did so. Scale is also compared per tensor: an engine multiplies B·A
by alpha/r of the directory that it loads, training by its own scale.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, combinations

from ktbridge.adapter.adapter import Adapter, ExpertStack, Part, last_part
from ktbridge.adapter.blocks import BITS, block_of, bytes_of, padded
from ktbridge.adapter.lora_config import expert_scales, half_numbers, numbers_of
from ktbridge.codes import problem
from ktbridge.errors import KtbridgeError, Problem
from ktbridge.model import TensorRef
from ktbridge.model.tensor import as_float32


def source_of(adapters: Sequence[Adapter]) -> Adapter | None:
    """The directory that the others are compared with; None where none covers them all."""
    if len(adapters) < 2:
        return None
    raw = (one for one in adapters if one.layout == "raw")
    whole = (one for one in adapters if all(one.layout in ("merged", each.layout) for each in adapters))
    return next(chain(raw, whole), None)


def check_set(adapters: Sequence[Adapter], compare_data: bool) -> Iterator[Problem]:
    """Every disagreement between the directories; values are compared only if ``compare_data``."""
    source = source_of(adapters)
    for first, second in combinations(adapters, 2):
        yield from _bases(first, second, source in (first, second))
    if source is None:
        yield from _without_source(adapters)
        return
    others = [adapter for adapter in adapters if adapter is not source]
    yield from _halves_present(source, others)
    for adapter in others:
        yield from _same_inventory(source, adapter)
        try:
            scale, wrong = _scale(source, adapter)
        except KtbridgeError:
            continue  # a missing alpha or rank is reported for that directory
        yield from wrong
        if compare_data:
            yield from _same_values(source, adapter, scale)


def _without_source(adapters: Sequence[Adapter]) -> Iterator[Problem]:
    by_layout: dict[str, Adapter] = {}
    for adapter in adapters:
        other = by_layout.setdefault(adapter.layout, adapter)
        if other is not adapter:
            found = f"is a second {adapter.layout} directory beside {other.path}"
            yield problem("KTB506", str(adapter.path), found)
    if "expert" in by_layout and "nonexpert" in by_layout:
        yield from _same_numbers(by_layout["expert"], by_layout["nonexpert"])


def _bases(first: Adapter, second: Adapter, apart: bool) -> Iterator[Problem]:
    names = first.base_model, second.base_model
    if names[0] and names[1] and last_part(names[0]) != last_part(names[1]):
        # Conversion may rename the base model; two halves served together may not differ in it.
        yield problem(
            "KTB502",
            str(second.path),
            f"names the base model {names[1]!r}",
            f"{names[0]!r} as in {first.path}",
            severity="warning" if apart else "error",
        )


def _same_numbers(expert: Adapter, nonexpert: Adapter) -> Iterator[Problem]:
    # Directories written by convert may differ on purpose, as their manifests record.
    if all(adapter.manifest and adapter.manifest.get("layout") for adapter in (expert, nonexpert)):
        return
    for name in ("r", "lora_alpha"):
        one, other = expert.config.get(name), nonexpert.config.get(name)
        if one != other:
            found = f"{name} is {other!r}"
            yield problem("KTB501", str(nonexpert.path), found, f"{one!r} as in {expert.path}")


def _halves_present(source: Adapter, others: list[Adapter]) -> Iterator[Problem]:
    layouts = {adapter.layout for adapter in others}
    if source.layout != "raw" and (source.manifest or {}).get("layout"):
        return  # itself a serving directory, so nothing is missing
    for half, parts in (("expert", source.experts), ("nonexpert", source.nonexpert)):
        if parts and not layouts & {half, "merged", "raw"}:
            where = ", ".join(str(adapter.path) for adapter in others)
            yield problem("KTB503", where, f"the {half.replace('non', 'non-')} half is missing")


def _scale(source: Adapter, adapter: Adapter) -> tuple[float, list[Problem]]:
    """Ratio of the adapter's own non-expert scale to what it was trained at, and findings on its scale.

    Non-expert B may carry part of the scale (rsLoRA in a merged directory); the comparison of
    values accounts for it, so only the split layout is judged by its configuration. If that is
    wrong, values are compared as if it were right, so that one error isn't reported twice.
    """
    where, wrong = str(adapter.path), []
    served = _served_scale(adapter, "nonexpert") if adapter.nonexpert else 1.0
    if adapter.experts and source.experts:
        trained, now = half_numbers(source, "expert").scale, _served_scale(adapter, "expert")
        if not math.isclose(now, trained, rel_tol=1e-9):
            found = f"experts are served at alpha/r = {now:g}"
            wrong.append(problem("KTB505", where, found, f"{trained:g}, as trained"))
            served = trained
    if not adapter.nonexpert or not source.nonexpert:
        return 1.0, wrong
    trained = half_numbers(source, "nonexpert").scale
    if adapter.layout == "nonexpert" and not math.isclose(served, trained, rel_tol=1e-9):
        found = f"non-expert LoRA is served at alpha/r = {served:g}"
        wrong.append(problem("KTB505", where, found, f"{trained:g}, as trained"))
        served = trained
    return trained / served, wrong


def _served_scale(adapter: Adapter, half: str) -> float:
    """Return the scale of a half's B A in a directory: one alpha/r, or in a raw one the half's common one."""
    if adapter.layout == "raw":
        return half_numbers(adapter, half).scale
    if half == "nonexpert":
        return adapter.nonexpert_scale
    return adapter.nonexpert_alpha / adapter.nonexpert_rank


def _same_inventory(source: Adapter, adapter: Adapter) -> Iterator[Problem]:
    where = str(adapter.path)
    if adapter.layout != "nonexpert" and source.experts:
        odd = source.experts.keys() ^ adapter.experts.keys()
        if odd:
            layer, projection, half = sorted(odd)[0]
            side = "lacks" if (layer, projection, half) in source.experts else "adds"
            found = f"{side} {projection}_proj.lora_{half} of layer {layer}"
            yield problem("KTB504", where, found, f"the experts of {source.path}")
    if adapter.layout != "expert" and source.nonexpert:
        odd_keys = sorted(source.nonexpert.keys() ^ adapter.nonexpert.keys())
        if odd_keys:
            side = "lacks" if odd_keys[0] in source.nonexpert else "adds"
            found = f"{side} {odd_keys[0]}"
            yield problem("KTB504", where, found, f"the non-expert tensors of {source.path}")


def _same_values(source: Adapter, adapter: Adapter, scale: float) -> Iterator[Problem]:
    for slot in sorted(source.experts.keys() & adapter.experts.keys()):
        theirs, ours = source.experts[slot], adapter.experts[slot]
        layer, projection, half = slot
        factors = _expert_factors(source, adapter, slot)
        differing = _first_difference(theirs, ours, half, factors)
        if differing is not None:
            where = f"{adapter.path}: layer {layer} expert {differing} {projection}_proj.lora_{half}"
            twin = {"gate": "up", "up": "gate"}.get(projection)
            swapped = twin and (layer, twin, half) in source.experts
            if swapped and _first_difference(source.experts[layer, str(twin), half], ours, half) is None:
                expected = f"gate as in {source.path}"
                yield problem("KTB504", where, "gate and up are swapped", expected)
            else:
                yield problem("KTB504", where, f"differs from {source.path}")
            break
        for file in (*source.files, *adapter.files):
            file.release()
    for key in sorted(source.nonexpert.keys() & adapter.nonexpert.keys()):
        one, other = source.nonexpert[key], adapter.nonexpert[key]
        factor = 1.0
        if one.key.half == "B":
            factor = scale * _relative(source, one) / _relative(adapter, other)
        if not _same(one.ref, other.ref, one.key.half, factor):
            yield problem("KTB504", f"{adapter.path}: {key}", f"differs from {source.path}")
            break


def _relative(adapter: Adapter, part: Part) -> float:
    """A module's scale over its half's, where a directory's own configuration counts: in a raw one."""
    if not any(adapter.config.get(name) for name in ("rank_pattern", "alpha_pattern")):
        return 1.0
    half = "nonexpert" if part.key.kind == "lora" else "expert"
    return numbers_of(adapter, part.key).scale / half_numbers(adapter, half).scale


def _expert_factors(source: Adapter, adapter: Adapter, slot: tuple[int, str, str]) -> dict[int, float]:
    """Return what each expert's B carries of its own scale; nothing where all have one."""
    layer, projection, half = slot
    factors: dict[int, float] = {}
    for one, sign in ((source, 1), (adapter, -1)):
        if half == "A" or not (one.config.get("rank_pattern") or one.config.get("alpha_pattern")):
            continue
        common = half_numbers(one, "expert").scale
        for expert, own in expert_scales(one, layer, projection).items():
            factors[expert] = factors.get(expert, 1.0) * (own / common) ** sign
    return factors


def _first_difference(
    one: ExpertStack, other: ExpertStack, half: str, factors: Mapping[int, float] | None = None
) -> int | None:
    """The first expert whose values or shape differ; None when all match the conversion."""
    left, right = dict(one.refs()), dict(other.refs())
    for expert in sorted(left.keys() | right.keys()):
        a, b = left.get(expert), right.get(expert)
        factor = (factors or {}).get(expert, 1.0)
        if a is None or b is None or not _same(a, b, half, factor):
            return expert
    return None


def _same(source: TensorRef, served: TensorRef, half: str, factor: float) -> bool:
    """Return whether a matrix is the source's times ``factor``, with zeros up to a wider rank."""
    whole = math.isclose(factor, 1.0, rel_tol=1e-9)  # the configuration carries the scale
    if whole and source[3:] == served[3:]:
        # memoryviews are compared element by element in a slow loop, bytes with memcmp.
        return bytes(source.view()) == bytes(served.view())
    axis = 0 if half == "A" else 1
    if len(source.shape) != 2 or len(served.shape) != 2 or source.shape[axis] > served.shape[axis]:
        return False
    known = served.dtype in (source.dtype, "BF16", "F32") and {source.dtype, served.dtype} <= {*BITS}
    if source.shape[1 - axis] != served.shape[1 - axis] or not known:
        return False
    import numpy as np

    exact = whole or math.frexp(factor)[0] == 0.5
    if not exact and served.dtype != "F32":
        return False
    expected = padded(block_of(source).to(served.dtype), axis, served.shape[axis])
    try:
        bits = (expected if whole else expected.scaled(factor, "")).load()
    except KtbridgeError:  # it would round
        return False
    wanted, now = (as_float32(x, served.dtype) for x in (bytes_of(bits), served.view()))
    near = np.array_equal(wanted, now) or (not exact and np.allclose(now, wanted, rtol=1e-6))
    return bool(near)
