"""Loss of held-out answers and of plain text, without and with each of some adapters, row by row.

    quality.py BASE ROWS RESULT NAME=ADAPTER …   # ROWS: a folder with held_out.jsonl and plain.jsonl

By the reference of `ktbridge verify`: transformers' modules in float32 with the adapter's own product added,
none of our kernels; the base is computed once for all. RESULT is JSON: for each file the tokens of each row,
and the loss of each row in nats a token, of ``base`` and of each NAME. Of a conversation the answer's tokens
count, of a text all but the first.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import ktbridge.experts  # noqa: F401  # before torch: it lets OpenMP's idle threads sleep

# isort: split
from transformers import AutoTokenizer

from ktbridge.adapter import open_adapter
from ktbridge.files.publish import write_text
from ktbridge.verify.reference_model import ReferenceModel
from ktbridge.verify.verdict import STANDARD

FILES = ("held_out", "plain")


def tokenized(tokenizer: Any, row: dict[str, Any]) -> tuple[list[int], int]:
    """A row's token ids, and the first one that counts."""
    if "text" in row:
        return tokenizer(row["text"])["input_ids"], 1
    *before, _ = messages = row["messages"]
    plain = {"tokenize": True, "return_dict": False}
    whole = tokenizer.apply_chat_template(messages, **plain)
    end = len(whole) - [*reversed(whole)].index(tokenizer.eos_token_id)  # not the line break behind it
    return whole[:end], len(tokenizer.apply_chat_template(before, add_generation_prompt=True, **plain))


def means(logprobs: Sequence[float], counts: Sequence[int]) -> list[float]:
    """The loss of each row from the logprobs of all rows' tokens."""
    return [
        -sum(logprobs[start:end]) / (end - start) for start, end in pairwise(accumulate(counts, initial=0))
    ]


def main(base: str, rows: str, result: str, *adapters: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(base)
    names, paths = zip(*(each.split("=", 1) for each in adapters), strict=True)
    opened = [open_adapter(path, base_model=base) for path in paths]
    full = {name: replace(STANDARD["full"], adapter=n) for n, name in enumerate(names)}
    arms = {"base": STANDARD["base"], **full}
    found = {}
    for name in FILES:
        lines = (Path(rows) / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
        prompts, starts = zip(*(tokenized(tokenizer, json.loads(line)) for line in lines), strict=True)
        model = ReferenceModel(Path(base), opened, prompts, starts)
        counts = [len(ids) - start for ids, start in zip(prompts, starts, strict=True)]
        vectors = model.logprobs(tuple(arms.values()))
        found[name] = {"tokens": counts} | {
            arm: means(vector, counts) for arm, vector in zip(arms, vectors, strict=True)
        }
        print(f"{name}: {len(lines)} rows, {sum(counts):,} tokens", flush=True)
    write_text(Path(result), json.dumps(found) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
