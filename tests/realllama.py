"""llama.cpp in a Python of its own (llama-cpp-python), tiny models as GGUF, and their references."""

from __future__ import annotations

import json
import random
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from ggufmodel import save_base, save_lora
from proving.gguf_base import write_gguf

from ktbridge.adapter import convert_adapter, read_adapter
from ktbridge.verify.reference_model import ReferenceModel
from ktbridge.verify.verdict import Variant

DRIVER = Path(__file__).parent / "engine_llama" / "driver.py"
DRAW = random.Random(1)
PROMPTS = [[DRAW.randrange(3, 170) for _ in range(32)] for _ in range(4)]


@dataclass
class Outcome:
    """What llama.cpp did: logprobs of the prompts' tokens, or none and the reason; ids of each prompt.

    ``code`` is 0, 3 for what it refused with a sentence, negative for the signal that ended it.
    """

    code: int
    logprobs: list[float]
    tokens: list[list[int]]
    log: str


def run_llama(
    python: str, model: Path, lora: Path | None = None, scale: float = 1.0,
    prompts: Sequence[list[int] | str] = PROMPTS,
) -> Outcome:  # fmt: skip
    asked = {"model": str(model), "lora": lora and str(lora), "scale": scale, "prompts": prompts}
    command = [python, str(DRIVER), json.dumps(asked)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    found = json.loads(done.stdout) if done.returncode == 0 else {"tokens": [], "logprobs": []}
    logprobs = [each for row in found["logprobs"] for each in row]
    return Outcome(done.returncode, logprobs, found["tokens"], done.stderr)


@dataclass
class Case:
    """One family: its checkpoint, that as GGUF, and adapters for it."""

    family: str
    root: Path

    @cached_property
    def base(self) -> Path:
        return save_base(self.family, self.root / "base")

    @cached_property
    def model(self) -> Path:
        return write_gguf(self.base, self.root / "base.gguf")

    def raw(self, name: str = "raw", **options: object) -> Path:
        path = self.root / name
        return path if path.exists() else save_lora(self.base, path, **options)

    def converted(self, name: str = "raw", **options: object) -> Path:
        """The adapter file that `ktbridge convert --to gguf` makes of ``raw``."""
        path = self.root / f"{name}-gguf"
        if not path.exists():
            convert_adapter(self.raw(name, **options), to="gguf", output_dir=path)
        return path / "adapter_model.gguf"

    def reference(self, *variants: Variant, name: str = "raw") -> list[list[float]]:
        """Logprobs by transformers' modules in float32."""
        return ReferenceModel(self.base, read_adapter(self.raw(name)), PROMPTS).logprobs(variants)
