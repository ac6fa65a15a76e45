"""YAML files of keys that people write: strict about keys that stand twice, errors with line and remedy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from ktbridge.errors import UsageError


def read_yaml(path: Path) -> dict[Any, Any]:
    """The keys and values in a file. Raises ``UsageError`` naming the line where it isn't YAML."""
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 text.", "Save it as UTF-8.") from error
    except OSError as error:
        raise UsageError(f"{path} can't be read: {error.strerror}.") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        message = getattr(error, "problem", None) or " ".join(str(error).split())
        raise UsageError(
            f"{path}{line}: this is not valid YAML: {message}.", _yaml_fix(message)
        ) from error
    if isinstance(values, dict):
        return values
    found = "nothing" if values is None else "a list" if isinstance(values, list) else "a text"
    raise UsageError(
        f"{path} holds {found} instead of keys.",
        "Write one `key: value` a line, with a colon and a space between.",
    )


def shown(value: object) -> str:
    """A value as YAML, at most one line."""
    text = (
        "null" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)
    )
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


class _Loader(yaml.SafeLoader):
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
