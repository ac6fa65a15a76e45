"""Distance of a merged checkpoint from its base with the adapter beside it, in logprobs of fixed tokens.

Three references of ``ktbridge.verify.layerwise``, which never holds a model whole: base, base + adapter,
merged, all in float32. What lies between the last two is what rounding or requantizing cost.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ktbridge.adapter import Adapter
from ktbridge.experts.load_model import load_tokenizer
from ktbridge.files.publish import OnProgress
from ktbridge.model import read_model_config
from ktbridge.verify.reference_model import ReferenceModel, part_of
from ktbridge.verify.run import fixed_prompts
from ktbridge.verify.verdict import Variant, mean_distance


@dataclass(frozen=True)
class MergeDistance:
    """Mean |difference of natural logprobs| over ``tokens`` tokens.

    ``effect``: base to base + adapter; ``lost``: merged to base + adapter; ``moved``: merged to base.
    """

    tokens: int
    effect: float
    lost: float
    moved: float


def merge_distance(
    base: Path,
    merged: Path,
    adapter: Adapter,
    on_progress: OnProgress = lambda done, total: None,
) -> MergeDistance:
    """Compute it for the prompts that ``verify`` uses.

    Raises KtbridgeError for a model that can't be run layer by layer, or has no tokenizer.
    """
    vocabulary = read_model_config(base).vocab_size
    prompts = fixed_prompts(load_tokenizer(base), vocabulary)
    full = Variant(float(bool(adapter.experts)), float(bool(adapter.nonexpert)))
    reference = ReferenceModel(base, adapter, prompts)
    plain, tuned = reference.logprobs([Variant(), full], on_progress=part_of(on_progress, 0, 2))
    (made,) = ReferenceModel(merged, adapter, prompts).logprobs(
        [Variant()], on_progress=part_of(on_progress, 1, 2)
    )
    return MergeDistance(
        len(plain), mean_distance(tuned, plain), mean_distance(made, tuned), mean_distance(made, plain)
    )
