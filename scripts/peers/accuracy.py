"""How far a contestant's results are from float32 autograd."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from safetensors import safe_open

from peers.cases import RESULTS

MOST_FLOPS = 3e11  # of the forward's base weights: beyond that the reference takes minutes


def relative_errors(results: Path, reference: Path) -> dict[str, float]:
    """``‖x − x₃₂‖ / ‖x₃₂‖`` (Frobenius) of each tensor in ``RESULTS``; NaN stays NaN."""
    errors = {}
    with safe_open(results, "np") as found, safe_open(reference, "np") as expected:
        for name in RESULTS:
            truth = expected.get_tensor(name)
            error = np.linalg.norm(found.get_tensor(name) - truth)
            errors[name] = float(error / np.linalg.norm(truth))
    return errors
