"""YAML that people write: of bounded size, a key stands once, errors have line and remedy."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import yaml

from ktbridge.errors import UsageError

MAX_CHARACTERS = 300_000  # four seconds of reading
MAX_VALUES = 100_000
"""With every alias counted as what it stands for: a kilobyte of aliases can stand for terabytes."""


def load_yaml(text: str, *, unique: bool = False) -> Any:
    """The plain values in a YAML document; ``unique`` refuses a key that stands twice in a mapping.

    Raises ``yaml.YAMLError``, and nothing else, for what isn't YAML, is nested too deeply, holds itself, is
    too large, or has a tag that its text doesn't fit.
    """
    if len(text) > MAX_CHARACTERS:
        raise _Unfit(f"it has {len(text)} characters, and at most {MAX_CHARACTERS} are read")
    loader: yaml.SafeLoader | None = None
    try:
        loader = (_Strict if unique else yaml.SafeLoader)(text)
        node = loader.get_single_node()
        if node is None:
            return None
        if (count := _values(node, {})) == math.inf:
            raise _Unfit("an alias stands inside what it stands for")
        if count > MAX_VALUES:
            raise _Unfit(f"it holds more than {MAX_VALUES} values, with what its aliases stand for")
        values = loader.construct_document(node)
        # A lone surrogate ("\ud83d") can be written in YAML, but not be printed, sent or stored.
        json.dumps(values, ensure_ascii=False, skipkeys=True, default=str).encode()
        return values
    except RecursionError:
        raise _Unfit("it is nested too deeply") from None
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError) as error:
        # What PyYAML's constructors of numbers, dates and tags raise for a text that is none.
        raise _Unfit(f"a value is not what it looks like or is tagged as ({error})") from error
    finally:
        if loader is not None:
            loader.dispose()


def _values(node: yaml.Node, seen: dict[int, float]) -> float:
    """Count the values of a node, with what its aliases stand for; infinity where it holds itself."""
    if id(node) not in seen:
        seen[id(node)] = math.inf
        parts: list[yaml.Node] = []
        if isinstance(node, yaml.MappingNode):
            parts = [part for pair in node.value for part in pair]
        elif isinstance(node, yaml.SequenceNode):
            parts = node.value
        seen[id(node)] = 1 + sum(_values(part, seen) for part in parts)
    return seen[id(node)]


def read_yaml(path: Path) -> dict[Any, Any]:
    """The keys and values in a file. Raises ``UsageError`` naming the line where it isn't YAML."""
    try:
        if not path.is_file():  # a pipe would block forever
            raise UsageError(f"{path} is not a file.")
        if path.stat().st_size > 4 * MAX_CHARACTERS:
            raise UsageError(f"{path} is larger than any configuration.", "Name another file.")
        values = load_yaml(path.read_text(encoding="utf-8"), unique=True)
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 text.", "Save it as UTF-8.") from error
    except OSError as error:
        raise UsageError(f"{path} can't be read: {error.strerror}.") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        message = getattr(error, "problem", None) or " ".join(str(error).split())
        raise UsageError(f"{path}{line}: this is not valid YAML: {message}.", _yaml_fix(message)) from error
    if isinstance(values, dict):
        return values
    found = "nothing" if values is None else "a list" if isinstance(values, list) else "a text"
    raise UsageError(
        f"{path} holds {found} instead of keys.",
        "Write one `key: value` a line, with a colon and a space between.",
    )


def show_value(value: object) -> str:
    """A value as YAML, at most one line."""
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= 80 else f"{text[:79]}…"


def _yaml_fix(message: str) -> str:
    """The next step for the commonest mistakes in YAML, by the parser's message."""
    steps = {
        r"'\t'": "Indent with spaces: YAML takes no tabs.",
        "mapping values": "Write a space behind each key's colon, and quotes around values with colons.",
        "end of stream": "Close the quotes or brackets.",
        "single document": "Remove the line `---` and what belongs to another document.",
        "stands twice": "Keep one of the two.",
    }
    return next((step for words, step in steps.items() if words in message), "")


class _Unfit(yaml.MarkedYAMLError):
    """YAML that isn't read, for a reason of ours; ``problem`` is the reason."""

    def __init__(self, reason: str) -> None:
        super().__init__(problem=reason)


class _Strict(yaml.SafeLoader):
    """YAML, but a duplicate key is an error instead of a silent choice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key.value, str) and key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key.value!r} stands twice", key.start_mark
                )
            if isinstance(key.value, str):
                seen.add(key.value)
        return super().construct_mapping(node, deep)
