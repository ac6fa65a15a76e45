"""Our client: eval_client_worker.py WAY URL COUNT CONCURRENCY prints JSON.

WAY is "run" (all of what `ktbridge eval` does but the report: preflight, keys, requests, every answer
written to the store), "client" (requests alone) or "openai" (requests alone, through the openai package's
AsyncOpenAI on the same connections, its objects included).
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

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


async def ask_all(ask: Callable[[dict[str, Any]], Awaitable[bool]], count: int, most: int) -> int:
    """How many of ``count`` answers are ok, with ``most`` requests in flight."""
    numbers, ok = iter(range(count)), 0

    async def worker() -> None:
        nonlocal ok
        for n in numbers:
            message = {"role": "user", "content": f"问题 {n}：你好吗？"}
            body = {"model": "tiny", "messages": [message], "max_tokens": 256, **SAMPLING}
            good = await ask(body)
            ok += good

    await asyncio.gather(*(worker() for _ in range(most)))
    return ok


async def by_client(url: str, count: int, concurrency: int) -> int:
    async with Client(f"{url}/v1", timeout=60) as client:

        async def ask(request: dict[str, Any]) -> bool:
            return (await client.chat(request)).outcome == "ok"

        return await ask_all(ask, count, concurrency)


async def by_package(url: str, count: int, concurrency: int) -> int:
    import openai

    http = openai.DefaultAioHttpClient(trust_env=False)
    async with openai.AsyncOpenAI(
        base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60, http_client=http
    ) as client:

        async def ask(request: dict[str, Any]) -> bool:
            return bool(
                (await client.chat.completions.create(**request)).choices[0].message.content
            )

        return await ask_all(ask, count, concurrency)


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
        ask = by_client if way == "client" else by_package
        ok = asyncio.run(ask(url, count, concurrency))
        seconds = time.perf_counter() - start
    print(json.dumps({"seconds": seconds, "cpu": time.process_time() - cpu, "answers": ok}))


main()
