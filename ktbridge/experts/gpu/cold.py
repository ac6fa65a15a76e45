"""A layer's cold experts, which the CPU's kernels compute while the GPU computes the others.

Experts that few tokens go to cost the link as much as any other, and the CPU little. Their rows go to the
host, sorted by expert as the GPU has them, and come back as rows: the GPU adds up a token's experts, whoever
computed them. On a CUDA device copies and kernels run in a stream of their own, and results are read from
host memory by the GPU's cores: a copy would wait behind all the weights that are on their way.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from ktbridge import _kernels
from ktbridge.experts import crossing, queued
from ktbridge.experts.expert_call import Lora, Saved, kernels_of, run_backward, run_forward
from ktbridge.experts.gpu.streams import Aside, Coming
from ktbridge.experts.modules import Triple


class ColdExperts:
    """The experts ``experts`` of a layer with ``weights``, on ``threads`` threads of the host."""

    def __init__(
        self,
        weights: Triple,
        experts: Sequence[int],
        threads: int,
        aside: Aside | None,
        device: torch.device,
    ) -> None:
        """``aside``: of the CUDA ``device`` that has their rows; None where that is the CPU."""
        self.experts = tuple(experts)
        self.order = torch.tensor(self.experts, device=device)
        self._weights = tuple(each.only(experts) for each in weights)
        self._kernels = kernels_of(self._weights, "auto", threads)
        self._aside, self._device = aside, device
        self._stream = aside.stream if aside else None

    def forward(
        self,
        hidden: torch.Tensor,
        tokens: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        lora: Lora,
        keep: _kernels.Keep,
    ) -> tuple[Coming, Saved]:
        """Weighted outputs by row [S, H] of the rows ``tokens`` [S] of ``hidden`` [T, H].

        ``ids`` [S] int64 are places in ``experts``, ``weights`` [S] float32; ``lora`` has this layer's
        tensors, of all experts, and where it drops anything the rows' numbers.
        """
        dropout = lora.dropout
        used = [] if dropout is None or dropout.numbers is None else [dropout.numbers]
        with self._beside(hidden, tokens, ids, weights, *used, *lora.tensors.values()):
            x = hidden[tokens]
            if not len(x):
                return self._back(x), None
            own = self._own(lora)
            hosts = crossing.to_host(x, ids, weights, *own.values(), *used, wait=False)
            out = crossing.host_empty(x, self._stream is not None)
            inputs = hosts[0], hosts[1][:, None], hosts[2]
            if dropout is not None:
                dropout = replace(dropout, numbers=hosts[-1])
            there = Lora(dict(zip(own, hosts[3:], strict=False)), lora.scale, dropout)
            saved = run_forward(self._kernels, self._stream, inputs, out, there, keep, self)
            if self._stream is not None and keep == _kernels.Keep.nothing:
                queued.finish(self._stream)  # nothing else would report a failure
            return self._back(out), saved

    def backward(
        self,
        saved: Saved,
        hidden: torch.Tensor,
        d_out: torch.Tensor,
        tokens: torch.Tensor,
        lora: Lora,
        wanted: bool,
        last: bool,
    ) -> Coming:
        """By row: gradients of hidden [S, H] bfloat16 and of the weights [S] float32; then the LoRA's.

        Those are [len(experts), ...] float32 in the order of ``lora``'s names, none unless ``wanted``.
        ``last``: no other backward follows.
        """
        with self._beside(hidden, d_out, tokens, *lora.tensors.values()):
            x, d = hidden[tokens], d_out[tokens]
            own = self._own(lora)
            gradients = [torch.zeros_like(tensor) for tensor in own.values()] if wanted else []
            d_weights = torch.zeros(len(x), device=self._device)
            if saved is None:
                return self._back(torch.zeros_like(x), d_weights, *gradients)
            hosts = crossing.to_host(x, d, d_weights, *own.values(), *gradients, wait=False)
            d_hidden = crossing.host_empty(x, self._stream is not None)
            count = 3 + len(own)
            there = hosts[count:]  # zeros, which the kernels add to
            tensors = hosts[0], hosts[1], d_hidden, hosts[2]
            used = Lora(dict(zip(own, hosts[3:count], strict=True)), lora.scale)
            targets = dict(zip(own, there, strict=True)) if wanted else {}
            run_backward(self._kernels, self._stream, saved, tensors, used, targets, last, self)
            if self._stream is not None:
                queued.finish_after_backward(self._stream)
            return self._back(d_hidden, hosts[2], *there)

    def _own(self, lora: Lora) -> dict[str, torch.Tensor]:
        return {name: tensor[self.order] for name, tensor in lora.tensors.items()}

    @contextlib.contextmanager
    def _beside(self, *used: torch.Tensor) -> Iterator[None]:
        """Work in the own stream, after what the current stream was given so far."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        for tensor in used:
            tensor.record_stream(self._stream)
        with torch.cuda.stream(self._stream):
            yield

    def _back(self, *tensors: torch.Tensor) -> Coming:
        """``tensors`` of the host, or of the device already, for the device."""
        if self._aside is None:
            return Coming(tensors, None)
        if all(tensor.is_cuda for tensor in tensors):
            return Coming(tensors, self._aside.stream.record_event())
        return self._aside.fetch(tensors, self._device)
