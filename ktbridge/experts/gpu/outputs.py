"""A layer's output between its forward and its second one: on the GPU, or in pinned memory of the host.

A checkpointed decoder layer runs again in backward and wants its experts' output once more
(``ktbridge.experts.checkpointing``). Over all layers these outputs are as large as the layers' inputs, so
where GPU memory is short they wait on the host: one crossing each way, on streams of their own.
"""

from __future__ import annotations

from typing import Any

import torch


class Kept:
    """One layer's output [T, H], to be had again any number of times."""

    def __init__(self, out: torch.Tensor, streams: tuple[Any, Any] | None) -> None:
        """``out`` may be changed by its owner afterwards. ``streams``: to the host and back; None: stay."""
        self._streams, self._device = streams, out.device
        self._coming: tuple[torch.Tensor, Any] | None = None
        if streams is None:
            self._kept = out.clone()
            return
        leaving, _ = streams
        copy = out.clone()  # its owner needn't wait for the crossing
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
            self._coming = there, back.record_event()

    def get(self) -> torch.Tensor:
        """A copy for the current stream, which its taker may change."""
        if self._streams is None:
            return self._kept.clone()
        self.fetch()
        assert self._coming is not None
        there, arrived = self._coming
        self._coming = None
        current = torch.cuda.current_stream(self._device)
        current.wait_event(arrived)
        there.record_stream(current)
        return there
