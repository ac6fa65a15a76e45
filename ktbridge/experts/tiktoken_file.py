"""Kimi's tokenizer, from ``tiktoken.model`` and tokenizer_config.json, as a fast one of transformers.

Moonshot's models ship tiktoken's file (a line for each token: its bytes in base64, and its rank) and Python
code that says where text is split before tokens are merged. That code isn't run: the pattern is known here,
and compared with what the file says.
"""

from __future__ import annotations

import base64
import binascii
import json
import shutil
import tempfile
from pathlib import Path

from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import TikTokenConverter

from ktbridge.codes import problem
from ktbridge.errors import ProblemsError
from ktbridge.model.jsonfile import read_json_file

FILE = "tiktoken.model"
_CASED = r"\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_START, _END = r"[^\r\n\p{L}\p{N}]?", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
SPLITS = (
    r"[\p{Han}]+",
    rf"{_START}[\p{{Lu}}\p{{Lt}}{_CASED}*[\p{{Ll}}{_CASED}+{_END}",
    rf"{_START}[\p{{Lu}}\p{{Lt}}{_CASED}+[\p{{Ll}}{_CASED}*{_END}",
    r"\p{N}{1,3}",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"\s*[\r\n]+",
    r"\s+(?!\S)",
    r"\s+",
)
"""Where text is split, the first that matches: ``pat_str`` of the published tokenization_kimi.py."""
_RESERVED = 256
"""Ids for special tokens that follow the ranks; those without a name are ``<|reserved_token_ID|>``."""


def has_only_tiktoken(path: Path) -> bool:
    """Return whether ``path`` has tiktoken's file and no tokenizer.json."""
    return (path / FILE).is_file() and not (path / "tokenizer.json").is_file()


def kimi_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a Kimi checkpoint. Raises ``ProblemsError`` for a damaged or another one."""
    settings = read_json_file(path / "tokenizer_config.json")
    _check_splits(path, settings)
    tokenizer: Tokenizer = _Ranks(vocab_file=str(path / FILE), pattern="|".join(SPLITS)).converted()
    base = tokenizer.get_vocab_size()
    named = settings.get("added_tokens_decoder")
    added = {int(key): value for key, value in named.items()} if isinstance(named, dict) else {}
    if below := [number for number in added if number < base]:
        raise _unreadable(
            path / "tokenizer_config.json", f"special token {below[0]} is one of {base} ranks"
        )
    end = max([base + _RESERVED, *(number + 1 for number in added)])
    tokenizer.add_tokens([_special(added, number) for number in range(base, end)])
    with tempfile.TemporaryDirectory() as made:
        tokenizer.save(str(Path(made) / "tokenizer.json"))
        kept = {
            key: value
            for key, value in settings.items()
            if key not in ("auto_map", "tokenizer_class")
        }
        if not isinstance(kept.get("model_max_length"), int):
            kept.pop("model_max_length", None)  # 10^30: none
        (Path(made) / "tokenizer_config.json").write_text(json.dumps(kept), encoding="utf-8")
        if (path / "chat_template.jinja").is_file():
            shutil.copy(path / "chat_template.jinja", made)
        made_here = PreTrainedTokenizerFast.from_pretrained(made)
    made_here.name_or_path = str(path)
    return made_here


def _special(added: dict[int, dict[str, object]], number: int) -> AddedToken:
    token = added.get(number, {"content": f"<|reserved_token_{number}|>", "special": True})
    return AddedToken(
        str(token["content"]), special=bool(token.get("special", True)), normalized=False
    )


def _check_splits(path: Path, settings: dict[str, object]) -> None:
    """Raise where the checkpoint's own code splits text otherwise, or doesn't say how."""
    code = [file for file in path.glob("tokenization_*.py") if file.is_file()]
    if not code and "kimi" in str(settings.get("auto_map")):
        return
    if not any(all(part in file.read_text("utf-8") for part in SPLITS) for file in code):
        where = (
            ", ".join(file.name for file in code) or "no tokenization_*.py, nor kimi in auto_map"
        )
        raise ProblemsError(
            f"the tokenizer in {path} can't be built from {FILE}.",
            [
                problem(
                    "KTC060", str(path), f"{where}: other splits than Kimi's", "Kimi's tokenizer"
                )
            ],
        )


def _unreadable(path: Path, found: str) -> ProblemsError:
    return ProblemsError(
        f"the tokenizer in {path.parent} can't be built from {FILE}.",
        [
            problem(
                "KTC061",
                str(path),
                found,
                "tiktoken's ranks 0, 1, 2, … and special tokens above them",
            )
        ],
    )


class _Ranks(TikTokenConverter):
    """transformers' converter, which would need tiktoken's package to read the file."""

    @staticmethod
    def load_tiktoken_bpe(tiktoken_url: str) -> dict[bytes, int]:
        ranks: dict[bytes, int] = {}
        path = Path(tiktoken_url)
        for number, line in enumerate(path.read_bytes().splitlines(), 1):
            if not line.strip():
                continue
            try:
                token, rank = line.split()
                ranks[base64.b64decode(token, validate=True)] = int(rank)
            except (ValueError, binascii.Error) as error:
                raise _unreadable(path, f"line {number} is {line[:40]!r}") from error
        if sorted(ranks.values()) != list(range(len(ranks))) or len(ranks) < 256:
            raise _unreadable(path, f"{len(ranks)} tokens, with ranks left out or twice there")
        return ranks
