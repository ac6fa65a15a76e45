"""Run a model layer by layer: each decoder layer's weights are read from the files when it runs.

transformers' own modules compute, in their own order; only the source of their weights differs. The
skeleton has none. A layer's are put in before its forward and dropped after it, its routed experts' one
by one as tokens reach them, the output head's in blocks of rows. So memory holds activations, one layer
without its experts, and one expert, whatever the model's size. The checkpoint is mapped, and the pages
that were read are let go layer by layer.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from ktbridge.adapter.keys import LAYER
from ktbridge.errors import KtbridgeError
from ktbridge.experts.load_model import make_skeleton, readable_load_errors
from ktbridge.experts.modules import experts_modules
from ktbridge.model import read_model_config
from ktbridge.verify.verdict import Variant
from ktbridge.verify.weight_reader import ExpertReader, WeightReader

Forward = Callable[..., torch.Tensor]
HEAD_TOKENS = 256  # tokens whose logits are in memory at once
HEAD_ROWS = 16_384  # and rows of the output head


class ExpertCall(NamedTuple):
    """One product of a routed expert: ``part`` ("gate_up" or "down") of ``x`` [n, in].

    ``rows`` [n], ascending, are its tokens among the layer's ``tokens``.
    """

    layer: int
    expert: int
    part: str
    x: torch.Tensor
    rows: torch.Tensor
    tokens: int


class Weight(NamedTuple):
    """Tensors of the checkpoint, and their place: ``owner``'s ``attribute``, in ``dtype``."""

    owner: nn.Module
    attribute: str
    stored: tuple[str, ...]
    dtype: torch.dtype

    def put(self, tensor: torch.Tensor) -> None:
        if self.attribute in self.owner._parameters:
            tensor = nn.Parameter(tensor, requires_grad=False)
        setattr(self.owner, self.attribute, tensor)


class LayerwiseModel:
    """The language model in ``path``, run in ``dtype`` (float32 or bfloat16) on the CPU.

    ``skeleton`` is transformers' model, for forward hooks. ``variants`` are those whose rows it computes, in
    order, for all adapters on it. ``add_to_expert(call, y)`` gets every product of a
    routed expert and gives what goes on in its place, ``on_layer(done, all)`` is called after each decoder
    layer. Raises KtbridgeError for a model that does not load, lacks weights, or stores them in a form
    that isn't read here.
    """

    def __init__(self, path: Path, dtype: torch.dtype) -> None:
        self.path, self.dtype = path, dtype
        self.skeleton = make_skeleton(path).eval().requires_grad_(False)
        self.inner: Any = getattr(self.skeleton, self.skeleton.base_model_prefix)
        self.decoder: Any = self.skeleton.get_decoder()
        self.decoder_name = next(n for n, m in self.skeleton.named_modules() if m is self.decoder)
        self.num_layers = len(self.decoder.layers)
        self.experts: dict[int, ExpertReader] = {}
        self.variants: Sequence[Variant] = ()
        self.add_to_expert: Callable[[ExpertCall, torch.Tensor], torch.Tensor] = lambda call, y: y
        self.add_to_head: Callable[[torch.Tensor, slice], torch.Tensor] | None = None
        self.on_layer: Callable[[int, int], None] = lambda done, whole: None
        self.reader = WeightReader(path)
        with readable_load_errors(path):
            self._fill_buffers()
        self._strict = tuple(self.skeleton._keep_in_fp32_modules_strict or ())
        self._replace_experts()
        self._plan()

    def hidden(self, ids: torch.Tensor) -> BaseModelOutputWithPast:
        """Run the decoder over token ids [B, T]; its output, whose last_hidden_state is [B, T, H]."""
        with torch.inference_mode(), readable_load_errors(self.path):
            return self.inner(input_ids=ids, use_cache=False)

    def logprobs(
        self, output: BaseModelOutputWithPast, hidden: torch.Tensor, targets: torch.Tensor
    ) -> torch.Tensor:
        """Natural logprobs, float32 [N], of ``targets`` [N] after final hidden states [N, H].

        ``output`` is any that ``hidden`` gave. The model's own forward turns states into logits, so
        that a cap or a factor of its own is there too.
        """
        found = []
        with torch.inference_mode(), self._headed(output) as head:
            for states, tokens in zip(hidden.split(HEAD_TOKENS), targets.split(HEAD_TOKENS), strict=True):
                logits = head(states).float()
                found.append(logits.gather(1, tokens[:, None])[:, 0] - logits.logsumexp(-1))
        return torch.cat(found)

    @contextmanager
    def _headed(self, output: BaseModelOutputWithPast) -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
        """The model with its decoder's output replaced: final hidden states [N, H] to logits [N, V]."""
        lm_head = self.skeleton.get_output_embeddings()
        name = self._head_name
        rows = self.reader.shape(name)[0]
        given = copy.copy(output)

        def project(x: torch.Tensor) -> torch.Tensor:
            blocks = []
            for start in range(0, rows, HEAD_ROWS):
                block = slice(start, min(start + HEAD_ROWS, rows))
                y = self._product(x, self.reader.rows(name, block, torch.float32))
                blocks.append(y if self.add_to_head is None else y + self.add_to_head(x, block))
                self.reader.release()
            logits = torch.cat(blocks, -1)
            return logits if lm_head.bias is None else logits + lm_head.bias

        def head(states: torch.Tensor) -> torch.Tensor:
            given.last_hidden_state = states[None]
            ids = torch.zeros(1, len(states), dtype=torch.int64)
            logits: torch.Tensor = self.skeleton(input_ids=ids, use_cache=False).logits
            return logits[0]

        self.inner.forward = lambda *args, **kwargs: given
        lm_head.forward = project
        try:
            yield head
        finally:
            del self.inner.forward, lm_head.forward

    def _fill_buffers(self) -> None:
        """Buffers that modules compute themselves, such as rotary frequencies: as transformers does it."""
        for module in self.skeleton.modules():
            own = [n for n in module._non_persistent_buffers_set if module._buffers[n] is not None]
            for name in own:
                module._buffers[name] = torch.empty_like(module._buffers[name], device="cpu")
            if own:
                self.skeleton._init_weights(module)

    def _replace_experts(self) -> None:
        """Replace each routed experts' forward by one that reads an expert when tokens reach it."""
        config = read_model_config(self.path)
        for name, module in experts_modules(self.skeleton):
            match = LAYER.search(name)
            if match is None or not module.has_gate:
                raise KtbridgeError(
                    f"{name} of {self.path} has {'no gate' if match else 'no decoder layer'}, and "
                    "references are not computed for that.",
                    "verify a model whose experts are gated",
                )
            layer = int(match.group(1))
            reader = ExpertReader(self.reader, config, layer)
            for parameter in list(module._parameters):
                del module._parameters[parameter]
            module.forward = self._experts_forward(layer, module, reader)
            self.experts[layer] = reader

    def _experts_forward(self, layer: int, module: Any, reader: ExpertReader) -> Forward:
        def forward(hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            out = torch.zeros_like(hidden)
            for expert in index.unique().tolist():
                if expert >= reader.count:  # a top-k choice that a family masks out
                    continue
                rows, choice = torch.where(index == expert)
                call = ExpertCall(layer, expert, "gate_up", hidden[rows], rows, len(hidden))
                bias = reader.biases(expert)
                y = self._product(call.x, reader.gate_up(expert), bias[0])
                y = self.add_to_expert(call, y)
                if not module.is_concatenated:  # its own gating takes them so
                    y = torch.stack(y.chunk(2, -1), -1).flatten(-2)
                x = module._apply_gate(y)
                y = self._product(x, reader.down(expert), bias[1])
                y = self.add_to_expert(call._replace(part="down", x=x), y)
                out.index_add_(0, rows, (y * weights[rows, choice, None]).to(out.dtype))
            return out

        return forward

    def _product(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x W.T + b for float32 W and b, rounded to ``dtype`` once: a bfloat16 product, fast on any CPU."""
        return nn.functional.linear(x.float(), weight, bias).to(self.dtype)

    def _plan(self) -> None:
        """Locate every weight before anything runs, and register the hooks that load them."""
        embeddings = self.decoder.get_input_embeddings()
        head = self.skeleton.get_output_embeddings()
        names = {module: name for name, module in self.skeleton.named_modules()}
        missing: list[str] = []
        for number, layer in enumerate(self.decoder.layers):
            weights = self._weights(names[layer], layer, missing)
            layer.register_forward_pre_hook(self._filler(weights))
            layer.register_forward_hook(self._dropper(weights, number))
        rest: list[Weight] = []
        for name, child in self.decoder.named_children():
            if child is not embeddings and name != "layers":
                rest += self._weights(names[child], child, missing)
        found = self.reader.find(f"{names[embeddings]}.weight")
        self._head_name = self.reader.find(f"{names[head]}.weight") or found or ""
        if found is None:
            missing.append(f"{names[embeddings]}.weight")
        if head.bias is not None:
            rest.append(self._weight(head, "bias", f"{names[head]}.bias", missing))
        if missing:
            raise KtbridgeError(
                f"the model in {self.path} lacks {missing[0]} ({len(missing)} weights in all).",
                "download or save the model again",
            )
        self._filler(rest)()
        # A lookup needs a few rows: it uses the mapped matrix and converts the result's dtype.
        assert found is not None
        embeddings.weight = nn.Parameter(self.reader.tensor(found), requires_grad=False)
        embeddings.register_forward_hook(lambda module, args, output: output.to(self.dtype))

    def _weights(self, prefix: str, module: nn.Module, missing: list[str]) -> list[Weight]:
        """The weights in ``module``; names that the checkpoint lacks are added to ``missing``."""
        found = []
        for name in module.state_dict():
            owner, _, attribute = name.rpartition(".")
            inside = module.get_submodule(owner)
            found.append(self._weight(inside, attribute, f"{prefix}.{name}", missing))
        return found

    def _weight(self, owner: nn.Module, attribute: str, name: str, missing: list[str]) -> Weight:
        found = self.reader.find_parts(name)
        shape = tuple(getattr(owner, attribute).shape)
        if not found:
            missing.append(name)
        elif self.reader.joined_shape(found) != shape:
            raise KtbridgeError(
                f"{found[0]} of {self.path} is {list(self.reader.joined_shape(found))}, not "
                f"{list(shape)} as config.json has it.",
                "download the model again",
            )
        exact = any(part in name for part in self._strict)
        return Weight(owner, attribute, found, torch.float32 if exact else self.dtype)

    def _filler(self, weights: Sequence[Weight]) -> Callable[..., None]:
        def fill(*_: object) -> None:
            for weight in weights:
                weight.put(self.reader.joined(weight.stored, weight.dtype))

        return fill

    def _dropper(self, weights: Sequence[Weight], number: int) -> Callable[..., None]:
        def drop(*_: object) -> None:
            for weight in weights:
                weight.put(torch.empty_like(getattr(weight.owner, weight.attribute), device="meta"))
            self.reader.release()
            self.on_layer(number + 1, self.num_layers)

        return drop
