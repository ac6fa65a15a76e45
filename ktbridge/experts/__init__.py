"""The routed experts at run time: what training and serving both stand on.

- The layer: ``weights`` (experts as a checkpoint stores them), ``lora``, ``layer`` (a layer of experts with
  LoRA, also as PEFT sees it), ``autograd`` (one call of our kernels), ``recompute`` (gradient
  checkpointing).
- A model: ``modules`` (transformers' experts modules and the states of their weights), ``load_model`` and
  ``mapped`` (a model whose experts stay in the checkpoint's files, its tokenizer), ``inject`` (experts onto
  the kernels or the GPU), ``guard`` (their LoRA is trained and saved).
- Adapters: ``lora_targets`` (LoRA on everything else), ``load_adapter`` and ``save_adapter``.
- ``gpu``: ``placement`` (what fits and how fast it is), ``probe`` and ``timing`` (what this machine can
  do), ``executor`` (the layers on a GPU), ``layer_math`` and ``operations`` (what is computed),
  ``triton_kernels`` and ``triton_lora``, ``layout``, ``ring`` and ``copying`` (weights to the GPU),
  ``masters`` (LoRA and gradients).
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
