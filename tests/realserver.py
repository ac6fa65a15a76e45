"""Engines' own servers as processes, as the proof starts them."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "scripts"))

from proving.steps import serving

__all__ = ["serving"]
