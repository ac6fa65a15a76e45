"""How high the rank of an expert LoRA may be; not in ``layer``, for configurations are read without torch."""

MAX_EXPERT_RANK = 128
