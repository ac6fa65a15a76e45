"""lm-evaluation-harness's own client: lm_eval_worker.py URL COUNT CONCURRENCY prints JSON.

Needs lm_eval[api] and nothing of ours; the prompts are those of eval_client_worker.py.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
import time

from lm_eval.api.instance import Instance
from lm_eval.models.api_models import JsonChatStr
from lm_eval.models.openai_completions import LocalChatCompletion


def main() -> None:
    url, count, concurrency = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    model = LocalChatCompletion(
        base_url=f"{url}/v1/chat/completions",
        model="tiny",
        num_concurrent=concurrency,
        tokenizer_backend=None,
        tokenized_requests=False,
        max_retries=6,
        timeout=60,
    )
    requests = [
        Instance(
            request_type="generate_until",
            doc={},
            arguments=(
                JsonChatStr(json.dumps([{"role": "user", "content": f"问题 {n}：你好吗？"}])),
                {"max_gen_toks": 256, "temperature": 0, "until": []},
            ),
            idx=n,
        )
        for n in range(count)
    ]
    start, cpu = time.perf_counter(), time.process_time()
    answers = model.generate_until(requests, disable_tqdm=True)
    seconds = time.perf_counter() - start
    told = {
        "seconds": seconds,
        "cpu": time.process_time() - cpu,
        "answers": sum(bool(answer) for answer in answers),
        "version": importlib.metadata.version("lm_eval"),
    }
    print(json.dumps(told))


main()
