"""transformers' generate on our expert kernels, without a server: one prompt, and all in one batch.

    generate_worker.py CASE      CASE is JSON: model, threads, prompts, tokens, rounds

The last line of stdout is JSON: best tokens a second by row.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch

from ktbridge.experts.loading import load_for_kernels
from ktbridge.sft import wrap_experts


def padded(prompts: list[list[int]]) -> dict[str, torch.Tensor]:
    """Prompts on their right ends, with the mask that says so."""
    width = max(map(len, prompts))
    return {
        "input_ids": torch.tensor([[0] * (width - len(p)) + p for p in prompts]),
        "attention_mask": torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts]),
    }


def main(case: dict[str, Any]) -> dict[str, float]:
    torch.set_num_threads(case["threads"])
    model: Any = load_for_kernels(case["model"], torch.bfloat16)
    wrap_experts(model, lora_rank=0, lora_alpha=0, threads=case["threads"])
    model.eval().requires_grad_(False)
    prompts, best = case["prompts"], dict[str, float]()
    rows = {"1 stream": [prompts[len(prompts) // 2]], f"{len(prompts)} streams": prompts}
    settings = {"max_new_tokens": case["tokens"], "do_sample": False, "pad_token_id": 0}
    for turn in range(case["rounds"] + 1):
        for row, some in rows.items():
            given = padded(some)
            start = time.perf_counter()
            with torch.inference_mode():
                model.generate(**given, **settings, eos_token_id=None)
            found = len(some) * case["tokens"] / (time.perf_counter() - start)
            print(f"generate: {row}: {found:.1f} tokens/s", file=sys.stderr)
            if turn:
                best[row] = max(best.get(row, 0), found)
    return best


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
