"""Apply an adapter's LoRA to a layerwise model: several variants at once, each in its own batch rows."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import nn

from ktbridge.adapter import Adapter
from ktbridge.adapter.keys import LAYER, parse_key
from ktbridge.adapter.lora_config import expert_scales, numbers_of
from ktbridge.codes import problem
from ktbridge.errors import KtbridgeError, Problem, ProblemsError, list_names
from ktbridge.experts.lora import to_torch
from ktbridge.model import FAMILIES
from ktbridge.verify.layerwise import ExpertCall, LayerwiseModel
from ktbridge.verify.verdict import Variant

UNSUPPORTED = ("use_dora", "fan_in_fan_out", "modules_to_save")
PARTS = {"gate_up": ("gate", "up"), "down": ("down",)}
Output = torch.Tensor | tuple[torch.Tensor, ...]
Forward = Callable[..., Output]
SHOWN = 2  # locations listed beside the first


class _Finding(NamedTuple):
    """One place in an adapter that has none in the model; ``kind``, and shapes found and expected.

    ``of_base``: another base could have it. Else nothing is wrong with the base.
    """

    where: str
    kind: str
    found: str = ""
    expected: str = ""
    of_base: bool = True


SWAPPED = {"gate": "up", "up": "gate", "down": "down"}


class AdapterLora:
    """``adapter`` on ``model``: hooks that add ``scale · B (A x)`` to the rows of its variants present.

    The batch's first dimension is variant by variant, all of one size. A pair is read when its layer runs.
    ``number`` is the adapter's in the variants.
    Raises ProblemsError (KTV001) with every tensor that has no place in the model.
    """

    def __init__(self, model: LayerwiseModel, adapter: Adapter, number: int) -> None:
        self._model, self._adapter, self._number = model, adapter, number
        self._pairs: dict[str, torch.Tensor] = {}  # the expert pairs of the layer that runs
        self._pairs_of = -1
        self._expert_scales: dict[str, dict[int, float]] = {}  # of that layer
        self._head: dict[str, str] | None = None
        self._hooked: set[str] = set()
        self._unseen: set[str] = set()
        self._layers = set(adapter.expert_layers())
        stray = "a tensor that goes nowhere"
        found = [_Finding(part.entry.name, stray, of_base=False) for part in adapter.leftovers]
        found += self._check_experts()
        found += self._hook_nonexperts()
        if found:
            check = shlex.join(("ktbridge", "validate", str(adapter.path), "--base-model", str(model.path)))
            if any(item.of_base for item in found):
                sentence = f"the LoRA in {adapter.path} does not fit the base model {model.path}."
                step = f"give the base that it was trained on as --base-model; {check} compares them"
            else:
                sentence = f"not all LoRA in {adapter.path} can be computed here."
                step = f"{check} says more"
            raise ProblemsError(sentence, _grouped(adapter, found, check), step)
        before = model.add_to_expert
        model.add_to_expert = lambda call, y: self._add_to_expert(call, before(call, y))

    def _scale(self, variant: Variant, half: str, layer: int) -> float:
        """Multiplier of this adapter's ``half`` in a layer: 0 for another adapter's variant."""
        return variant.scale(half, layer) if variant.adapter == self._number else 0.0

    @contextmanager
    def present(self, variants: Sequence[Variant]) -> Iterator[None]:
        """Context: these variants form the batch, in this order."""
        self._model.variants = variants
        self._unseen = set(self._hooked)
        try:
            yield
        finally:
            self._model.variants = ()
            self._pairs, self._pairs_of = {}, -1
        if self._unseen:  # not computed by the module's own forward
            raise KtbridgeError(
                f"LoRA on {min(self._unseen)} can't be followed in {self._model.path}.",
                "report this model's family",
            )

    @contextmanager
    def in_head(self, variant: Variant) -> Iterator[None]:
        """Context: the output head has the LoRA of this variant, if the adapter has any there."""
        if self._head is not None and variant.nonexpert:
            scale = self._scale(variant, "nonexpert", -1) * self._own_scale(self._head)
            a, b = (self._tensor(self._head[half]) for half in "AB")
            self._model.add_to_head = lambda x, rows: _delta(x, a, b[rows], scale)
        try:
            yield
        finally:
            self._model.add_to_head = None

    def _tensor(self, key: str) -> torch.Tensor:
        return to_torch(self._adapter.nonexpert_tensor(key)).to(self._model.dtype)

    def _check_experts(self) -> Iterator[_Finding]:
        """Yield whether each expert pair fits; reads shapes only."""
        adapter = self._adapter
        for layer in sorted(self._layers):
            reader = self._model.experts.get(layer)
            if reader is None:
                yield _Finding(f"layer {layer}", "the base has no experts there")
                continue
            for name in self._projections(layer):
                a, b = (adapter.expert_tensor(layer, f"{name}_lora_{half}").shape for half in "ab")
                out, inner = (reader.inner, reader.hidden)
                if name == "down":
                    out, inner = inner, out
                rank = a[1] if len(a) == 3 else 0
                if (a, b) != ((reader.count, rank, inner), (reader.count, out, rank)):
                    yield _Finding(
                        f"layer {layer} {name}",
                        "expert LoRA of another size",
                        f"A {list(a)} and B {list(b)}",
                        f"A [{reader.count}, r, {inner}] and B [{reader.count}, {out}, r], for weights "
                        f"{[reader.count, out, inner]}",
                    )

    def _projections(self, layer: int) -> list[str]:
        """Projections that have LoRA in a layer: gate, up, down."""
        return [name for name in SWAPPED if (layer, name, "A") in self._adapter.experts]

    def _add_to_expert(self, call: ExpertCall, y: torch.Tensor) -> torch.Tensor:
        variants = self._model.variants
        if call.layer not in self._layers or not variants:
            return y
        self._read_layer(call.layer)
        # Rows of a choice ascend and variants follow one another, so a variant's rows are neighbors.
        bounds = torch.arange(len(variants) + 1) * (call.tokens // len(variants))
        ends = torch.searchsorted(call.rows, bounds).tolist()
        for variant, first, last in zip(variants, ends, ends[1:], strict=False):
            times = self._scale(variant, "expert", call.layer)
            if not times or first == last:
                continue
            source = (call.expert + variant.shift) % self._model.experts[call.layer].count
            deltas = []
            for name in PARTS[call.part]:
                origin = SWAPPED[name] if variant.swapped else name
                if f"{origin}_lora_a" not in self._pairs:  # this projection has none
                    width = y.shape[-1] // len(PARTS[call.part])
                    deltas.append(y.new_zeros(last - first, width))
                    continue
                a, b = (self._pairs[f"{origin}_lora_{half}"][source] for half in "ab")
                scale = self._expert_scales[origin][source]
                deltas.append(_delta(call.x[first:last], a, b, times * scale))
            y[first:last] += torch.cat(deltas, -1)
        return y

    def _read_layer(self, layer: int) -> None:
        if self._pairs_of == layer:
            return
        self._pairs = {}  # the layer before goes first
        for name in self._projections(layer):
            self._expert_scales[name] = expert_scales(self._adapter, layer, name)
            for key in (f"{name}_lora_a", f"{name}_lora_b"):
                tensor = to_torch(self._adapter.expert_tensor(layer, key))
                self._pairs[key] = tensor.to(self._model.dtype)
        self._pairs_of = layer

    def _hook_nonexperts(self) -> Iterator[_Finding]:
        """Register a hook on each module that has a pair; reads shapes only."""
        adapter, modules = self._adapter, dict(self._model.skeleton.named_modules())
        pairs: dict[str, dict[str, str]] = {}
        for key in adapter.nonexpert_keys():
            parsed = parse_key(key)
            if parsed.kind != "lora":
                yield _Finding(key, "not a LoRA tensor of a linear module", of_base=False)
                continue
            pairs.setdefault(parsed.module, {})[parsed.half] = key
        if pairs and (odd := [name for name in UNSUPPORTED if adapter.config.get(name)]):
            yield _Finding("adapter_config.json", f"{odd[0]} is set", of_base=False)
        for path, pair in pairs.items():
            module = modules.get(path) or modules.get(self._in_decoder(path))
            weight = getattr(module, "weight", None)
            if set(pair) != {"A", "B"}:
                yield _Finding(path, "lora_A or lora_B is missing", of_base=False)
            elif module is None or weight is None or weight.dim() != 2 or isinstance(module, nn.Embedding):
                yield _Finding(path, "the base has no such linear module")
            else:
                a, b = (adapter.nonexpert_tensor(pair[half]).shape for half in "AB")
                if len(a) != 2 or (b, a[1]) != ((weight.shape[0], a[0]), weight.shape[1]):
                    out, inner = weight.shape
                    yield _Finding(
                        path,
                        "non-expert LoRA of another size",
                        f"A {list(a)} and B {list(b)}",
                        f"A [r, {inner}] and B [{out}, r], for a weight {[out, inner]}",
                    )
                else:
                    self._hook(module, path, pair)

    def _in_decoder(self, path: str) -> str:
        """Map a text model's module name to this model's: multimodal wrappers nest it deeper."""
        head, layers, rest = path.partition("layers.")
        known = layers and any(head == family.prefix for family in FAMILIES)
        return f"{self._model.decoder_name}.{layers}{rest}" if known else path

    def _hook(self, module: nn.Module, path: str, pair: dict[str, str]) -> None:
        if module is self._model.skeleton.get_output_embeddings():
            self._head = pair
            return
        self._hooked.add(path)
        if type(module).forward is nn.Linear.forward:
            module.register_forward_hook(self._after_linear(path, pair))
        else:  # a router derives more from its product, by variant
            module.forward = self._variant_by_variant(module, module.forward, path, pair)

    def _after_linear(self, path: str, pair: dict[str, str]) -> Callable[..., torch.Tensor]:
        def add(module: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
            self._unseen.discard(path)
            a, b = self._tensor(pair["A"]), self._tensor(pair["B"])
            for scale, x, y in zip(
                self._scales(path, pair),
                args[0].chunk(len(self._model.variants)),
                output.chunk(len(self._model.variants)),
                strict=True,
            ):
                if scale:
                    y += _delta(x, a, b, scale)
            return output

        return add

    def _variant_by_variant(
        self, module: nn.Module, forward: Forward, path: str, pair: dict[str, str]
    ) -> Forward:
        def run(hidden: torch.Tensor, *args: object, **kwargs: object) -> Output:
            self._unseen.discard(path)
            a, b = self._tensor(pair["A"]).float(), self._tensor(pair["B"]).float()
            own = module.weight
            assert isinstance(own, torch.Tensor)
            outputs: list[Output] = []
            variants = self._model.variants
            rows = zip(variants, self._scales(path, pair), hidden.chunk(len(variants)), strict=True)
            for variant, scale, x in rows:
                changed = (own.float() + scale * (b @ a)).to(own.dtype) if scale else own
                module.weight = nn.Parameter(changed, requires_grad=False)
                self._model.variants = (variant,)  # another adapter's LoRA on it gets these rows
                outputs.append(forward(x, *args, **kwargs))
            module.weight = own
            self._model.variants = variants
            if isinstance(outputs[0], torch.Tensor):
                return torch.cat(outputs)  # type: ignore[arg-type]
            return tuple(torch.cat(parts) for parts in zip(*outputs, strict=True))

        return run

    def _own_scale(self, pair: dict[str, str]) -> float:
        return numbers_of(self._adapter, self._adapter.nonexpert[pair["A"]].key).scale

    def _scales(self, path: str, pair: dict[str, str]) -> list[float]:
        layer = match.group(1) if (match := LAYER.search(path)) else -1
        own = self._own_scale(pair)
        return [self._scale(variant, "nonexpert", int(layer)) * own for variant in self._model.variants]


def _delta(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    """scale · B (A x) for x [..., in], A [r, in], B [out, r]."""
    return nn.functional.linear(nn.functional.linear(x, a), b) * scale


def _grouped(adapter: Adapter, found: Sequence[_Finding], check: str) -> Iterator[Problem]:
    """One problem for all findings of a kind, located at the first: a wrong base has hundreds.

    ``check`` is the command that looks closer at the adapter.
    """
    kinds: dict[str, list[_Finding]] = {}
    for item in found:
        kinds.setdefault(item.kind, []).append(item)
    for kind, (first, *others) in kinds.items():
        text = f"{kind}: {first.found}" if first.found else kind
        if others:
            named = list_names([item.where for item in others], SHOWN)
            text += f"; {len(others) + 1:,} like it: also {named}"
        step = None if first.of_base else check
        yield problem("KTV001", f"{adapter.path}: {first.where}", text, first.expected, step)
