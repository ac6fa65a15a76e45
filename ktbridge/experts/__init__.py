"""The routed experts at run time: what training and serving both stand on.

- ``weights``: experts as a checkpoint stores them. ``layer``: a layer of them with LoRA, which our kernels
  compute, or the GPU (``gpu``); ``peft_layer``: that layer as PEFT sees it.
  ``expert_call``: one call of our kernels; ``crossing`` to the host and back; ``queued`` in a GPU stream's
  own time; ``checkpointing`` is gradient checkpointing.
- ``modules``: a transformers model's experts modules. ``inject`` puts them onto the kernels,
  ``wrapped_layers`` finds them there; ``guard`` sees that their LoRA is trained and saved.
- ``loading`` and ``mapped``: a model whose experts stay in the checkpoint's files, the rest of it on the
  devices it is wanted on; or one without weights.
- ``nonexpert_lora``: which other modules have LoRA, and PEFT's on just those. ``load_adapter``: a raw adapter
  onto a model; ``raw_adapter``: out of one. ``tensors``: a file's to torch's.
- ``compat``: all private API of torch, transformers and PEFT.

Import this before torch: it lets OpenMP's idle threads sleep, which otherwise compete with the kernels for
their CPUs. It imports nothing else. The names for users' own scripts are in ``ktbridge.sft``.
"""

import os
import sys

MAX_EXPERT_RANK = 128
"""The highest rank of an expert LoRA. Here, because configurations are read without torch."""

# Rounds of polling, some 0.2 ms on current Xeons: torch's operations in a row still find their threads awake.
_SPINS = "4000"
_CHOICES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")


def _let_idle_threads_sleep() -> None:
    """Set GOMP_SPINCOUNT for this process and its children, unless torch is loaded or the user chose.

    After each of torch's parallel operations, libgomp's threads poll for the next one: 300,000 rounds where
    nothing is set, some 15 ms on current Xeons, in which a layer of experts starts and ends on half a CPU.
    libgomp reads its environment when it is loaded; another OpenMP library than GNU's ignores it.
    """
    if "torch" not in sys.modules and not any(name in os.environ for name in _CHOICES):
        os.environ["GOMP_SPINCOUNT"] = _SPINS


_let_idle_threads_sleep()
