"""The clients of bench_eval_client.py: a turn asks ``count`` prompts with ``concurrency`` in flight.

``way`` of the spec: "eval" is `ktbridge eval`'s own asking loop with all that it does until the report
(preflight, keys, requests, every answer on disk), "client" its client's requests alone, and "lm-eval" is
lm-evaluation-harness's client, which stores nothing and runs under an interpreter that has lm_eval[api]
and nothing of ours.
"""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from peers.worker import serve

SAMPLING = {"temperature": 0, "top_p": 1, "seed": 0}


def question(n: int) -> dict[str, str]:
    return {"role": "user", "content": f"问题 {n}：你好吗？"}


class AskingClient:
    """Calls ``ask_all``, which answers how many answers were good, and takes the time."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        self.url, self.count, self.concurrency = spec["url"], spec["count"], spec["concurrency"]
        self.about: dict[str, str] = {}

    def turn(self) -> dict[str, float]:
        """Requests a second, and microseconds of CPU a request."""
        start, cpu = time.perf_counter(), time.process_time()
        good = self.ask_all()
        seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
        if good != self.count:
            raise RuntimeError(f"it had {good} of {self.count} answers")
        return {"rate": self.count / seconds, "cpu_us": 1e6 * cpu / self.count}

    def ask_all(self) -> int:
        raise NotImplementedError

    async def in_flight(self, ask: Callable[[dict[str, Any]], Awaitable[bool]]) -> int:
        numbers, good = iter(range(self.count)), 0

        async def one_after_another() -> None:
            nonlocal good
            for n in numbers:
                body = {"model": "tiny", "messages": [question(n)], "max_tokens": 256, **SAMPLING}
                answered = await ask(body)
                good += answered

        await asyncio.gather(*(one_after_another() for _ in range(self.concurrency)))
        return good


class Eval(AskingClient):
    def __init__(self, spec: Mapping[str, Any]) -> None:
        super().__init__(spec)
        from ktbridge.eval import parse_arms

        self._arms = parse_arms([f"base=tiny@{self.url}"])
        self._bench = self._make_bench()

    def _make_bench(self) -> Any:
        from ktbridge.eval.bench import parse_bench

        head = {
            "name": "speed", "version": "1", "language": "zh", "sampling": SAMPLING,
            "max_tokens": 256, "margin": 0.1,
            "slices": {"ALL": {"primary": "task", "meaning": "anything"}},
        }  # fmt: skip
        row = {
            "slice": "ALL", "sub": "", "lang": "zh", "origin": "ktbridge", "license": "Apache-2.0",
            "checks": [{"scorer": "min_len", "unit": "chars", "n": 1}],
        }  # fmt: skip
        rows = ({"id": f"q-{n}", "messages": [question(n)], **row} for n in range(self.count))
        items = "".join(json.dumps(one, ensure_ascii=False) + "\n" for one in rows)
        files = {"bench.yaml": json.dumps(head).encode(), "items.jsonl": items.encode()}
        return parse_bench(files)

    def ask_all(self) -> int:
        from ktbridge.eval import EvalRequest, collect

        with tempfile.TemporaryDirectory() as folder:
            settings = {"concurrency": self.concurrency, "timeout": 60}
            done = collect(EvalRequest(self._bench, self._arms, Path(folder), **settings))
        return int(done.outcomes.get("ok", 0))


class OurRequests(AskingClient):
    def ask_all(self) -> int:
        from ktbridge.server_api.client import Client

        async def run() -> int:
            async with Client(f"{self.url}/v1", timeout=60) as client:

                async def ask(body: dict[str, Any]) -> bool:
                    return (await client.chat(body)).outcome == "ok"

                return await self.in_flight(ask)

        return asyncio.run(run())


class LmEval(AskingClient):
    """local-chat-completions by generate_until."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        super().__init__(spec)
        # The harness is told not to look for its tasks' data.
        os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        from lm_eval.api.instance import Instance
        from lm_eval.models.api_models import JsonChatStr
        from lm_eval.models.openai_completions import LocalChatCompletion

        self.about = {"version": version("lm_eval")}
        self._model = LocalChatCompletion(
            base_url=f"{self.url}/v1/chat/completions",
            model="tiny",
            num_concurrent=self.concurrency,
            tokenizer_backend=None,
            tokenized_requests=False,
            max_retries=6,
            timeout=60,
        )
        asked = {"max_gen_toks": 256, "temperature": 0, "until": []}
        self._requests = [
            Instance("generate_until", {}, (JsonChatStr(json.dumps([question(n)])), asked), n)
            for n in range(self.count)
        ]

    def ask_all(self) -> int:
        answers = self._model.generate_until(self._requests, disable_tqdm=True)
        return sum(map(bool, answers))


WAYS = {"eval": Eval, "client": OurRequests, "lm-eval": LmEval}

if __name__ == "__main__":
    serve(lambda spec: WAYS[spec["way"]](spec))
