"""Our client: eval_client_worker.py WAY URL COUNT CONCURRENCY prints JSON.

WAY is "run" (all of what `ktbridge eval` does but the report: preflight, keys, requests, every answer
written to the store), "client" (requests alone) or "openai" (requests alone, through the openai package,
as where a proxy or TLS stands between).
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path

from ktbridge.eval.arms import parse_arms
from ktbridge.eval.bench import Bench, parse_bench
from ktbridge.eval.client import Client
from ktbridge.eval.persona import NO_PERSONA
from ktbridge.eval.run import collect

SAMPLING = {"temperature": 0, "top_p": 1, "seed": 0}


def make_bench(count: int) -> Bench:
    head = {
        "name": "speed",
        "version": "1",
        "language": "zh",
        "sampling": SAMPLING,
        "max_tokens": 256,
        "margin": 0.1,
        "slices": {"ALL": {"primary": "task", "meaning": "anything"}},
    }
    rows = [
        {
            "id": f"q-{n}",
            "slice": "ALL",
            "sub": "",
            "lang": "zh",
            "messages": [{"role": "user", "content": f"问题 {n}：你好吗？"}],
            "checks": [{"scorer": "min_len", "unit": "chars", "n": 1}],
            "origin": "ktbridge",
            "license": "Apache-2.0",
        }
        for n in range(count)
    ]
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    files = {"bench.yaml": json.dumps(head).encode(), "items.jsonl": lines.encode()}
    return parse_bench({**files, "persona.yaml": NO_PERSONA})


async def ask_all(url: str, count: int, concurrency: int, direct: bool) -> int:
    """How many of ``count`` answers are ok."""
    numbers, ok = iter(range(count)), 0
    async with Client(f"{url}/v1", timeout=60, direct=direct) as client:

        async def worker() -> None:
            nonlocal ok
            for n in numbers:
                message = {"role": "user", "content": f"问题 {n}：你好吗？"}
                request = {"model": "tiny", "messages": [message], "max_tokens": 256, **SAMPLING}
                answer = await client.chat(request)
                ok += answer.outcome == "ok"

        await asyncio.gather(*(worker() for _ in range(concurrency)))
    return ok


def main() -> None:
    way, url = sys.argv[1:3]
    count, concurrency = map(int, sys.argv[3:5])
    if way == "run":
        bench = make_bench(count)
        with tempfile.TemporaryDirectory() as folder:
            start, cpu = time.perf_counter(), time.process_time()
            arms = parse_arms([f"base=tiny@{url}"])
            done = collect(bench, arms, Path(folder), concurrency=concurrency, timeout=60)
            seconds = time.perf_counter() - start
        ok = done.outcomes.get("ok", 0)
    else:
        start, cpu = time.perf_counter(), time.process_time()
        ok = asyncio.run(ask_all(url, count, concurrency, way == "client"))
        seconds = time.perf_counter() - start
    print(json.dumps({"seconds": seconds, "cpu": time.process_time() - cpu, "answers": ok}))


main()
