"""The routed experts at run time: what training and serving both stand on.

- ``weights``: experts as a checkpoint stores them. ``layer``: one layer with its LoRA; ``expert_call``: one
  call of it; ``crossing`` to the host and back; ``queued`` in a GPU stream's own time; ``checkpointing`` is
  gradient checkpointing. ``rank``: how high a LoRA's may be. ``backends``: who else may compute a layer.
- ``modules``: a transformers model's experts modules. ``inject`` puts them onto the kernels; ``peft_layer``
  makes their LoRA one of PEFT's, ``guard`` sees to it that it is trained and saved, ``trainable`` counts.
- ``loading``, ``mapped`` and ``placement``: a model whose experts stay in the checkpoint's files, the rest of
  it on the devices it is wanted on; ``skeleton``: one without weights.
- ``targets``: which other modules have LoRA; ``attach`` puts PEFT's on just those. ``from_adapter`` and
  ``load_adapter``: a raw adapter onto a model; ``raw_adapter``: out of one. ``tensors``: a file's to torch's.

Import this before torch: it lets OpenMP's idle threads sleep (``ktbridge.experts.openmp``), which otherwise
compete with the kernels for their CPUs. It imports nothing else. The names for users' own scripts are in
``ktbridge.sft``.
"""

from ktbridge.experts.openmp import let_idle_threads_sleep

let_idle_threads_sleep()
