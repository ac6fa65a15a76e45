"""Request fields that override the bench's, such as those for thinking models."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import yaml

from ktbridge.errors import UsageError
from ktbridge.eval.bench import Bench, parse_bench
from ktbridge.eval.bench_checks import OURS, is_json


def parse_extra_body(text: str, option: str = "--extra-body") -> dict[str, Any]:
    """Parse a JSON object of request fields. Raises UsageError if it is invalid."""
    example = """write it as '{"chat_template_kwargs": {"enable_thinking": false}}'"""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{option} is not JSON: {error}.", example) from None
    if not isinstance(value, dict):
        raise UsageError(f"{option} is not a JSON object.", example)
    if not is_json(value):
        raise UsageError(f"{option} holds NaN, an infinity or half a character.", example)
    return value


def with_sampling(bench: Bench, fields: Mapping[str, Any]) -> Bench:
    """``bench`` with its sampling overridden by ``fields``; None removes a field.

    The bench itself changes, so that the run's snapshot, every key and the report contain what was
    sent. Raises UsageError for fields that only ktbridge may set.
    """
    if not fields:
        return bench
    if ours := sorted(set(OURS) & set(fields)):
        own_option = "give --max-tokens N instead" if ours == ["max_tokens"] else "leave them out"
        raise UsageError(f"--extra-body sets {', '.join(ours)}, which ktbridge sets.", own_option)
    sampling = {**bench.sampling, **fields}
    kept = {key: value for key, value in sampling.items() if value is not None}
    return _changed(bench, {"sampling": kept})


def with_max_tokens(bench: Bench, count: int | None) -> Bench:
    """``bench`` with ``count`` as the token limit of every answer; unchanged for None."""
    return bench if count is None else _changed(bench, {"override": {"max_tokens": count}})


def _changed(bench: Bench, keys: Mapping[str, Any]) -> Bench:
    head = yaml.safe_load(bench.files["bench.yaml"]) | keys
    files = dict(bench.files)
    files["bench.yaml"] = yaml.safe_dump(head, allow_unicode=True, sort_keys=False).encode()
    return parse_bench(files)
