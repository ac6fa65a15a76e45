"""Other request fields than the bench's, such as what a thinking model wants."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import yaml

from ktbridge.errors import UsageError
from ktbridge.eval.bench import Bench, parse_bench


def parse_extra_body(text: str, option: str = "--extra-body") -> dict[str, Any]:
    """Parse a JSON object of request fields. UsageError says what is wrong with it."""
    example = """write it as '{"chat_template_kwargs": {"enable_thinking": false}}'"""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{option} is not JSON: {error}.", example) from None
    if not isinstance(value, dict):
        raise UsageError(f"{option} is not a JSON object.", example)
    return value


def with_sampling(bench: Bench, fields: Mapping[str, Any]) -> Bench:
    """``bench`` with ``fields`` laid over its sampling; None takes a field out.

    It is the bench that changes, so that the run's snapshot, every key and the report say what was
    sent. Raises ProblemsError for fields that are ours to set.
    """
    if not fields:
        return bench
    head = yaml.safe_load(bench.files["bench.yaml"])
    sampling = {**bench.sampling, **fields}
    head["sampling"] = {key: value for key, value in sampling.items() if value is not None}
    files = dict(bench.files)
    files["bench.yaml"] = yaml.safe_dump(head, allow_unicode=True, sort_keys=False).encode()
    return parse_bench(files)
