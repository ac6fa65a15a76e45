"""The contestants of bench_serve.py: the embedded engine over HTTP, and transformers' own generate.

``way`` of the spec is "engine", "generate" (on our expert kernels) or "transformers" (on its own); all have
``model``, ``threads``, ``prompts`` (lists of token ids) and ``tokens``, the engine may have an ``adapter``. A
turn is tokens a second of each row of the table.
"""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from peers.worker import serve


class Engine:
    """`ktbridge serve` as anybody has it; a row's requests go to its models in turn."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        from ktbridge.serve.chat import engine

        self.tokens, prompts = spec["tokens"], spec["prompts"]
        self._stack = ExitStack()
        self.child = self._stack.enter_context(engine(spec["model"], spec["adapter"], spec["threads"]))
        listed, one = list(self.child.models), [prompts[len(prompts) // 2]]
        self.rows = {"1 stream": ([listed[0]], one)}
        self.rows |= {f"{len(prompts)} streams, {name}": ([name], prompts) for name in listed}
        if spec["adapter"]:
            self.rows[f"1 stream, {listed[1]}"] = ([listed[1]], one)
            self.rows[f"{len(prompts)} streams, all arms"] = (listed, prompts)
        self.about: dict[str, str] = {}

    def turn(self) -> dict[str, float]:
        return {row: self._speed(*asked) for row, asked in self.rows.items()}

    def close(self) -> None:
        self._stack.close()

    def _speed(self, models: list[str], prompts: list[list[int]]) -> float:
        """Tokens a second of all ``prompts`` at once."""
        asked = [models[i % len(models)] for i in range(len(prompts))]
        with ThreadPoolExecutor(len(prompts)) as pool:
            start = time.perf_counter()
            return sum(pool.map(self._ask, asked, prompts)) / (time.perf_counter() - start)

    def _ask(self, model: str, prompt: list[int]) -> int:
        """Ask, and count the tokens of the answer."""
        body = {"model": model, "prompt": prompt, "max_tokens": self.tokens, "temperature": 0}
        request = urllib.request.Request(
            f"{self.child.url}/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json", "Authorization": f"Bearer {self.child.key}"},
        )
        with urllib.request.urlopen(request, timeout=3600) as response:
            return int(json.load(response)["usage"]["completion_tokens"])


class Generate:
    """Without a server: one prompt, and one left-padded batch of all of them; in the faster dtype here."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        from ktbridge.sft import wrap_experts  # isort: skip - before torch
        import torch
        import transformers

        from ktbridge.experts.load_model import load_for_kernels, load_model
        from ktbridge.kernel_choice import has_bf16_instructions

        torch.set_num_threads(spec["threads"])
        dtype = torch.bfloat16 if has_bf16_instructions() else torch.float32
        self.model: Any
        if spec["way"] == "transformers":
            self.model = load_model(Path(spec["model"]), dtype)
        else:
            self.model = load_for_kernels(spec["model"], dtype)
            wrap_experts(self.model, lora_rank=0, lora_alpha=0, threads=spec["threads"])
        self.model.eval().requires_grad_(False)
        self.tokens, prompts = spec["tokens"], spec["prompts"]
        rows = {"1 stream": [prompts[len(prompts) // 2]], f"{len(prompts)} streams": prompts}
        self.rows = {row: self._padded(some) for row, some in rows.items()}
        self.about = {"version": transformers.__version__}

    def turn(self) -> dict[str, float]:
        import torch

        found = {}
        for row, given in self.rows.items():
            start = time.perf_counter()
            with torch.inference_mode():
                self.model.generate(
                    **given,
                    max_new_tokens=self.tokens,
                    do_sample=False,
                    pad_token_id=0,
                    eos_token_id=None,
                )
            made = len(given["input_ids"]) * self.tokens
            found[row] = made / (time.perf_counter() - start)
        return found

    @staticmethod
    def _padded(prompts: list[list[int]]) -> dict[str, Any]:
        """Prompts on their right ends, with the mask that says so."""
        import torch

        width = max(map(len, prompts))
        ids = [[0] * (width - len(p)) + p for p in prompts]
        mask = [[0] * (width - len(p)) + [1] * len(p) for p in prompts]
        return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


if __name__ == "__main__":
    serve(lambda spec: Engine(spec) if spec["way"] == "engine" else Generate(spec))
