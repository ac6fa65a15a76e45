"""Tensors on their way between GPU and host, beside the executor's own CUDA stream."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch


class Coming:
    """Tensors that another stream is making until the event ``ready``, or that are there (None)."""

    def __init__(self, tensors: Sequence[torch.Tensor], ready: torch.cuda.Event | None) -> None:
        self._tensors, self._ready = tuple(tensors), ready

    def get(self) -> tuple[torch.Tensor, ...]:
        """The tensors, which the current stream may use from here on."""
        if self._ready is not None:
            stream = torch.cuda.current_stream(self._tensors[0].device)
            stream.wait_event(self._ready)
            for tensor in self._tensors:
                tensor.record_stream(stream)
        return self._tensors


class Kept:
    """One layer's output [T, H], to be had again any number of times."""

    def __init__(
        self, out: torch.Tensor, streams: tuple[torch.cuda.Stream, torch.cuda.Stream] | None
    ) -> None:
        """``out`` may be changed by its owner afterwards. ``streams``: to the host and back; None: stay."""
        self._streams, self._device = streams, out.device
        self._coming: Coming | None = None
        copy = out.clone()  # its owner needn't wait for the crossing
        if streams is None:
            self._kept = copy
            return
        leaving, _ = streams
        self._kept = torch.empty(out.shape, dtype=out.dtype, device="cpu", pin_memory=True)
        leaving.wait_stream(torch.cuda.current_stream(out.device))
        with torch.cuda.stream(leaving):
            self._kept.copy_(copy, non_blocking=True)
            copy.record_stream(leaving)
        self._left = leaving.record_event()

    def fetch(self) -> None:
        """Begin to bring it back, if it is on the host."""
        if self._streams is None or self._coming is not None:
            return
        back = self._streams[1]
        with torch.cuda.stream(back):
            back.wait_event(self._left)
            there = self._kept.to(self._device, non_blocking=True)
            self._coming = Coming([there], back.record_event())

    def get(self) -> torch.Tensor:
        """A copy for the current stream, which its taker may change."""
        if self._streams is None:
            return self._kept.clone()
        self.fetch()
        assert self._coming is not None
        (there,) = self._coming.get()
        self._coming = None
        return there


class Outputs:
    """Layers' outputs between a checkpointed forward and its second one, which wants them once more.

    Over all layers they are as large as the layers' inputs (``ktbridge.experts.checkpointing``), so where GPU
    memory is short they wait in pinned memory of the host: one crossing each way, on streams of their own.
    """

    def __init__(self, device: torch.device, on_host: bool) -> None:
        self._streams: tuple[torch.cuda.Stream, torch.cuda.Stream] | None = None
        if on_host and device.type == "cuda":
            self._streams = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._last: dict[int, weakref.ref[Kept]] = {}

    def keep(self, layer: int, out: torch.Tensor) -> Kept:
        """The output of a layer, for its second forward."""
        kept = Kept(out, self._streams)
        self._last[layer] = weakref.ref(kept)
        return kept

    def fetch_before(self, layer: int) -> None:
        """Begin to bring back the output of the layer before ``layer``, whose second forward comes next."""
        before = [other for other in self._last if other < layer]
        kept = self._last[max(before)]() if before else None
        if kept is not None:
            kept.fetch()
