"""Training rows: OpenAI messages or alpaca, from JSON or JSONL, checked before anything is loaded."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ktbridge.errors import KtbridgeError, Problem, ProblemsError

Message = dict[str, str]
ROLES = ("system", "user", "assistant")
MESSAGES_KEYS = ("messages", "id")
ALPACA_KEYS = ("instruction", "input", "output", "system", "history", "id")
SHOWN = 20


def load_conversations(
    paths: Iterable[str | Path], max_samples: int | None = None
) -> list[list[Message]]:
    """All conversations of the files, in order, at most ``max_samples`` of them.

    A row is ``{"messages": [{"role", "content"}, …]}`` or alpaca's ``{"instruction", "input", "output"}``
    with optional ``system`` and ``history``.
    Raises ``ProblemsError`` naming each row that can't be used (a row is never just dropped), and
    ``KtbridgeError`` for a file that is not JSON or holds no row.
    """
    conversations: list[list[Message]] = []
    problems: list[Problem] = []
    for path in map(Path, paths):
        before = len(conversations) + len(problems)
        for where, row in _rows(path):
            try:
                conversations.append(_conversation(row))
            except ValueError as error:
                problems.append(
                    Problem("KTD001", "error", where, str(error), "messages or instruction/output")
                )
        if len(conversations) + len(problems) == before:
            raise KtbridgeError(f"{path} holds no row to train on.")
    if problems:
        hidden = len(problems) - SHOWN
        more = f" ({hidden} more are not shown)" if hidden > 0 else ""
        raise ProblemsError(
            f"{len(problems)} of {len(conversations) + len(problems)} rows can't be used{more}.",
            problems[:SHOWN],
            "Mend or remove these rows; nothing was started.",
        )
    return conversations[:max_samples]


def _rows(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise KtbridgeError(f"{path} is not UTF-8 text (byte {error.start}).") from error
    where = str(path)
    try:
        if path.suffix == ".json":
            rows = json.loads(text)
            if not isinstance(rows, list):
                raise KtbridgeError(
                    f"{path} must hold a list of rows, found {type(rows).__name__}."
                )
            yield from ((f"{path}: row {index}", row) for index, row in enumerate(rows, 1))
            return
        for number, line in enumerate(text.split("\n"), 1):
            where = f"{path}: line {number}"
            if line.strip():
                yield where, json.loads(line)
    except json.JSONDecodeError as error:
        raise KtbridgeError(
            f"{where} is not valid JSON: {error.msg} at column {error.colno}."
        ) from error


def _conversation(row: Any) -> list[Message]:
    if not isinstance(row, dict):
        raise ValueError(f"a {type(row).__name__} instead of an object")
    if "messages" in row:
        _only(row, MESSAGES_KEYS)
        messages = row["messages"]
    elif "instruction" in row and "output" in row:
        _only(row, ALPACA_KEYS)
        messages = _alpaca(row)
    else:
        raise ValueError(f"keys {', '.join(sorted(map(str, row))) or '(none)'}")
    if not isinstance(messages, list) or not messages:
        raise ValueError("messages is not a list with something in it")
    return [_message(message) for message in _ending_in_answer(messages)]


def _only(row: dict[str, Any], known: tuple[str, ...]) -> None:
    """A field that would mean something (tools, images, a second answer) is refused, not dropped."""
    unknown = sorted(set(row) - set(known))
    if unknown:
        raise ValueError(f"unknown fields {', '.join(unknown)}")


def _alpaca(row: dict[str, Any]) -> list[Any]:
    """LLaMA-Factory's reading: system, then history's pairs, then instruction and input."""
    parts = [row["instruction"], row.get("input") or ""]
    history = row.get("history") or []
    if not all(isinstance(part, str) for part in parts):
        raise ValueError("instruction or input that is not text")
    if not isinstance(history, list) or not all(
        isinstance(pair, list) and len(pair) == 2 for pair in history
    ):
        raise ValueError("history that is not a list of [question, answer]")
    messages = [{"role": "system", "content": row["system"]}] if row.get("system") else []
    for question, answer in history:
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": answer})
    messages.append({"role": "user", "content": "\n".join(filter(None, parts))})
    messages.append({"role": "assistant", "content": row["output"]})
    return messages


def _ending_in_answer(messages: list[Any]) -> list[Any]:
    last = messages[-1]
    if not isinstance(last, dict) or last.get("role") != "assistant":
        raise ValueError("the last message is not the assistant's, so there is nothing to learn")
    return messages


def _message(message: Any) -> Message:
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        raise ValueError(f"a message whose role is not {', '.join(ROLES)}")
    content = message.get("content")
    if not isinstance(content, str) or not content:
        raise ValueError(f"an empty {message['role']} message")
    try:
        content.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"half a character (a lone surrogate) in a {message['role']} message"
        ) from error
    return {"role": message["role"], "content": content}
