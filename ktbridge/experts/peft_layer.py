"""A layer of routed experts as PEFT sees it: a tuner layer whose LoRA is one of PEFT's own."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from ktbridge.errors import KtbridgeError

MERGE_STEP = (
    "Save with ktbridge.sft.save_raw_adapter, then `ktbridge merge` (or ktbridge.adapter.merge_adapter) "
    "writes a checkpoint with both halves merged."
)


def _no_base() -> None:
    return None


class PeftLayer(BaseTunerLayer):
    """Mixin that makes a layer of routed experts one of PEFT's tuner layers.

    PEFT finds what is trained by walking over a model's tuner layers, and everything on one of them is the
    adapter's. So with this mixin the expert LoRA is not frozen by ``get_peft_model``, whatever came first;
    it is in ``save_pretrained`` and Trainer's checkpoints, and comes back from them; it is off within
    ``disable_adapter()``; and ``print_trainable_parameters`` counts it. PEFT does so from 0.21 on (before, it
    went by names); tests/sft/test_library_peft.py has a test of each.

    A layer has one expert LoRA, while PEFT's layers have one for each adapter name: it goes with the adapter
    ``peft_adapter`` and is off where that one isn't active. Nothing is wrapped, and no parameter is kept by
    adapter name, so what PEFT does to either finds nothing.
    """

    _base: Callable[[], Any] = staticmethod(_no_base)
    _adapter: str = "default"

    def belong_to(self, base: nn.Module) -> None:
        """Take ``base``, held weakly, as the transformers model that the layer is in and PEFT works on."""
        if self._base() is not base:
            self._base = weakref.ref(base)
        adapters = self.peft_adapters
        if len(adapters) == 1:
            (self._adapter,) = adapters

    def belongs_to(self, base: nn.Module) -> bool:
        """Return whether ``belong_to(base)`` would change nothing."""
        adapters = self.peft_adapters
        return self._base() is base and (len(adapters) != 1 or adapters == [self._adapter])

    @property
    def peft_adapters(self) -> list[str]:
        """Names of all adapters that PEFT has put into the model."""
        return list(getattr(self._base(), "peft_config", None) or ())

    @property
    def peft_adapter(self) -> str:
        """Name of the one that the expert LoRA belongs to: the first that there was."""
        adapters = self.peft_adapters
        return adapters[0] if adapters and self._adapter not in adapters else self._adapter

    @property
    def peft_active(self) -> list[str]:
        """Names of the active adapters, as PEFT's own layers have them: it doesn't set them on this one."""
        tuner = first_tuner(self._base()) if len(self.peft_adapters) > 1 else None
        return list(tuner.active_adapters) if tuner is not None else [self.peft_adapter]

    @property
    def on_in_peft(self) -> bool:
        """Return whether PEFT has the adapter on: it is active, and not within ``disable_adapter()``."""
        if self.disable_adapters:
            return False
        return len(self.peft_adapters) < 2 or self.peft_adapter in self.peft_active

    def set_requires_grad(
        self, adapter_names: str | Sequence[str], requires_grad: bool = True
    ) -> None:
        """PEFT's: let the parameters of the adapters named be trained, or not."""
        names = [adapter_names] if isinstance(adapter_names, str) else adapter_names
        assert isinstance(self, nn.Module)
        if self.peft_adapter in names:
            self.requires_grad_(requires_grad)

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Refused: the experts' weights belong to the checkpoint and aren't written to."""
        raise KtbridgeError(
            "PEFT can't merge the expert LoRA: the experts' weights are the checkpoint's, and read only.",
            f"model.unmerge_adapter() takes back what was merged before. {MERGE_STEP}",
        )

    def unmerge(self) -> None:
        """Nothing to do: nothing is ever merged."""

    # The base class has these of the module that it wraps, and would look for one for ever.
    @property
    def weight(self) -> Any:
        raise AttributeError("weight")

    @property
    def bias(self) -> Any:
        raise AttributeError("bias")


def first_tuner(module: nn.Module) -> BaseTunerLayer | None:
    """The first of PEFT's own layers in a module."""
    for each in module.modules():
        if isinstance(each, BaseTunerLayer) and not isinstance(each, PeftLayer):
            return each
    return None
