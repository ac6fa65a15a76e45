"""Sources of rows: files, names that LLaMA-Factory's dataset_info.json describes, and the Hub."""

from __future__ import annotations

import difflib
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from ktbridge.codes import Problems, problem
from ktbridge.errors import KtbridgeError, Problem, ProblemsError, did_you_mean
from ktbridge.files.records import FileRow, read_records
from ktbridge.model.hub import named_repository, repository
from ktbridge.sft.config import TrainConfig
from ktbridge.sft.config.load import ROWS
from ktbridge.sft.data.hub_rows import HubRows
from ktbridge.sft.data.layout import COLUMNS, Layout, Tags

INFO = "dataset_info.json"
ENTRY_KEYS = (
    "file_name", "file_sha1", "formatting", "ranking", "columns", "tags", "split", "subset", "folder",
    "num_samples", "revision", "hf_hub_url",
)  # fmt: skip
ELSEWHERE = ("ms_hub_url", "om_hub_url", "script_url", "cloud_file_name")
"""Keys of entries whose rows are neither in a file here nor on the Hub."""
TAGS = {
    "role_tag": "from",
    "content_tag": "value",
    "user_tag": "human",
    "assistant_tag": "gpt",
    "system_tag": "system",
    "observation_tag": "observation",
    "function_tag": "function_call",
}


@dataclass(frozen=True)
class Source:
    """One entry of ``dataset``: the files its rows are in, here or on the Hub, and how they are laid out.

    ``num_samples``: as many of its rows, chosen at random; more than there are repeats some. ``columns`` and
    ``tags`` are those that dataset_info.json gives.
    """

    name: str
    paths: tuple[Path, ...]
    layout: Layout
    remote: HubRows | None = None
    num_samples: int | None = None
    columns: Mapping[str, str] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)

    def looking_in(self, config: TrainConfig) -> Source:
        """With the folders of its images: ``media_dir``, else beside its files and in ``dataset_dir``."""
        folders = (config.media_dir,) if config.media_dir else (*self._beside(), config.dataset_dir)
        found = tuple(dict.fromkeys(Path(folder) for folder in folders if folder))
        return replace(self, layout=replace(self.layout, folders=found))

    def _beside(self) -> Iterator[Path]:
        return (path.parent for path in self.paths)

    def lines(self, seed: int) -> Iterator[FileRow]:
        """Rows; what is on the Hub is downloaded first. Raises what ``read_records`` and the Hub raise."""
        files = self.remote.fetch() if self.remote else [(str(path), path) for path in self.paths]
        every = (line for shown, path in files for line in read_records(path, shown))
        return every if self.num_samples is None else _sampled([*every], self.num_samples, seed)


def _sampled(lines: list[FileRow], count: int, seed: int) -> Iterator[FileRow]:
    """LLaMA-Factory's choice: a permutation's first, and beyond their number any of them again."""
    draw = random.Random(seed)
    more = draw.choices(lines, k=max(0, count - len(lines))) if lines else []
    return iter(draw.sample(lines, min(count, len(lines))) + more)


def find_sources(config: TrainConfig) -> tuple[list[Source], list[KtbridgeError]]:
    """Every entry of ``config.dataset``: a file, a name in ``dataset_info.json``, or org/name on the Hub.

    Also the errors: a ProblemsError with all entries that can't be used, a KtbridgeError for a
    dataset_info.json that can't be read.
    """
    problems: list[Problem] = []
    failed: list[KtbridgeError] = []
    info: dict[str, object] | None = None
    sources = []
    for name in config.dataset:
        if Path(name).is_file():
            sources.append(Source(name, (Path(name),), Layout()))
        elif (wanted := repository(name, "dataset")) and not _is_described(
            name, config.dataset_dir
        ):
            sources.append(Source(name, (), Layout(), HubRows(wanted)))
        elif config.dataset_dir is None:
            step = f"Give a path, or set dataset_dir to the directory whose {INFO} names it."
            expected = "a JSON, Parquet or CSV file, or org/name on the Hub"
            problems.append(problem("KTD002", name, "no such file", expected, step))
        elif not failed:
            try:
                info = info or _read_info(Path(config.dataset_dir) / INFO)
            except KtbridgeError as error:
                failed.append(error)
                continue
            entry = _Entry(name, Path(config.dataset_dir))
            source = entry.source(info, config.stage)
            problems += entry.problems
            if source and not entry.problems:
                sources.append(source)
    if problems:
        failed.append(ProblemsError("the datasets can't be read; nothing was started.", problems))
    return [source.looking_in(config) for source in sources], failed


def _is_described(name: str, directory: str | None) -> bool:
    """Return whether dataset_info.json has an entry of this name."""
    with suppress(KtbridgeError):
        return directory is not None and name in _read_info(Path(directory) / INFO)
    return False


def _read_info(path: Path) -> dict[str, object]:
    try:
        info = json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise KtbridgeError(
            f"{path} can't be read: {error.strerror}.",
            "Give `dataset` as paths of files, or set dataset_dir to the directory that holds it.",
        ) from error
    except ValueError as error:
        raise KtbridgeError(f"{path} is not valid JSON: {error}.") from error
    if not isinstance(info, dict):
        raise KtbridgeError(f"{path} must hold an object of datasets.")
    return info


class _Entry:
    """One entry of dataset_info.json: what is wrong with it is added to ``problems``."""

    def __init__(self, name: str, directory: Path) -> None:
        self._name, self._directory = name, directory
        self.problems = Problems(str(directory / INFO), "KTD002")

    def _wrong(self, found: str, expected: str = "", next_step: str = "") -> None:
        self.problems.error(self._name, found, expected, next_step)

    def source(self, info: Mapping[str, object], stage: str) -> Source | None:
        """Return what it describes, for a run of ``stage``; of no use where there are ``problems``."""
        entry = info.get(self._name)
        if not isinstance(entry, dict):
            step = did_you_mean(self._name, info) or f"It names {', '.join(info) or 'none'}."
            self._wrong("no such dataset, nor a file", "", step)
            return None
        remote = self._remote(entry) if entry.get("hf_hub_url") else None
        afar = [key for key in ELSEWHERE if entry.get(key) and not entry.get("hf_hub_url")]
        if afar:
            found = f"{afar[0]} {entry[afar[0]]!r}, which is not on this machine"
            step = f"Download it into {self._directory}, and write file_name instead."
            self._wrong(found, "file_name or hf_hub_url", step)
        for key in entry.keys() - {*ENTRY_KEYS, *ELSEWHERE}:
            self._wrong(f"unknown key {key}", ", ".join(ENTRY_KEYS))
        count = entry.get("num_samples")
        if count is not None and (type(count) is not int or count < 1):
            self._wrong(f"num_samples {count!r}", "a number of rows")
            count = None
        if remote is None and entry.get("split") not in (None, "train"):
            self._wrong(f"split {entry['split']!r}", "a file of its own")
        ranking = entry.get("ranking") or False
        if ranking is not (stage == "dpo"):
            kind, other = ("pairs", "sft") if stage == "dpo" else ("conversations", "dpo")
            self._wrong(
                f"ranking: {str(ranking).lower()} for stage: {stage}",
                f"ranking: {str(not ranking).lower()}",
                f"Name a dataset of {kind}, or set stage: {other}.",
            )
        stated = entry.get("formatting") or "alpaca"
        if stated not in ("alpaca", "sharegpt", "openai"):
            self._wrong(f"formatting {stated!r}", "alpaca, sharegpt or openai")
        formatting = "alpaca" if stated == "alpaca" else "messages"
        columns = self._texts("columns", entry.get("columns"), COLUMNS)
        tags = self._texts("tags", entry.get("tags"), TAGS)
        paths = () if afar or entry.get("hf_hub_url") else self._files(entry.get("file_name"))
        layout = Layout(formatting, columns or dict(COLUMNS), _tags(tags, formatting))
        return Source(self._name, paths, layout, remote, count, columns, tags)

    def _remote(self, entry: Mapping[str, object]) -> HubRows | None:
        """``hf_hub_url`` with ``subset``, ``split``, ``folder`` and ``revision``; nulls are left out."""
        texts: dict[str, str] = {}
        for key in ("hf_hub_url", "subset", "split", "folder", "revision"):
            value = entry.get(key)
            if isinstance(value, str) and value:
                texts[key] = value
            elif value is not None:
                self._wrong(f"{key} {value!r}", "a text")
                return None
        name, revision = texts.pop("hf_hub_url"), texts.pop("revision", None)
        wanted = named_repository(name, "dataset")
        if wanted is None:
            self._wrong(f"hf_hub_url {name!r}", "org/name")
            return None
        return HubRows(replace(wanted, revision=wanted.revision or revision), **texts)

    def _texts(self, key: str, given: object, known: Mapping[str, str]) -> dict[str, str]:
        """The entry's ``columns`` or ``tags``; nulls are treated as absent."""
        if given and not isinstance(given, dict):
            self._wrong(f"{key} {given!r}", "an object")
        found = {}
        for name, value in given.items() if isinstance(given, dict) else ():
            if name not in known:
                self._wrong(f"unknown {key} {name}", ", ".join(known))
            elif isinstance(value, str):
                found[name] = value
            elif value is not None:
                self._wrong(f"{key} {name}: {value!r}", "a text")
        return found

    def _files(self, name: object) -> tuple[Path, ...]:
        """The named file, or the data files of the named directory, sorted by name."""
        if not isinstance(name, str) or not name:
            self._wrong("no file_name", "a file beside dataset_info.json, or hf_hub_url")
            return ()
        path = self._directory / name
        if path.is_file():
            return (path,)
        paths = sorted(file for file in path.glob("*") if file.suffix.lower() in ROWS)
        if not paths:
            self._wrong(f"file_name {name!r}: no such file", "", f"Put the rows at {path}.")
        return tuple(paths)


def _tags(given: Mapping[str, str], formatting: str) -> Tags:
    if formatting == "alpaca" or not given:
        return Tags()
    tags = {**TAGS, **given}
    roles = {
        "user": "user_tag", "assistant": "assistant_tag", "system": "system_tag",
        "tool": "observation_tag", "function_call": "function_tag",
    }  # fmt: skip
    return Tags(
        tags["role_tag"],
        tags["content_tag"],
        {tags[tag]: role for role, tag in roles.items()},
    )


def names_that_are_wrong(
    source: Source, rows: Sequence[object], config: TrainConfig
) -> ProblemsError | None:
    """The error for rows that lack the names by which dataset_info.json describes them, or None.

    ``rows``: those of a dataset of which none can be used.
    """
    layout, stage = source.layout, config.stage
    found = [row for row in rows if isinstance(row, dict)]
    if layout.formatting is None or not found:
        return None
    needed = ["messages"] if layout.formatting == "messages" else ["prompt"]
    if stage == "dpo":
        needed += ["chosen", "rejected"]
    elif stage in ("sft", "kto") and layout.formatting == "alpaca":
        needed += ["response"]
    needed += ["kto_tag"] if stage == "kto" else []
    keys = list(dict.fromkeys(str(key) for row in found for key in row))
    missing = {name: layout.columns.get(name, "") for name in needed}
    missing = {name: key for name, key in missing.items() if key not in keys}
    if missing:
        free = [key for key in keys if key not in layout.columns.values()]
        step = _columns_step(missing, free)
        other = next((key for key in ("conversations", "messages") if key in keys), None)
        if layout.formatting == "alpaca" and other:
            step = f'Write "formatting": "sharegpt" and "columns": {{"messages": "{other}"}} in {INFO}.'
        elif layout.formatting == "messages" and {"instruction", "output"} <= {*keys}:
            step = f'Write "formatting": "alpaca" in {INFO}.'
        return _wrong_names(
            source.name, source.columns, missing, ("row", "The rows have"), keys, step
        )
    talks = [row.get(layout.columns.get(name, "")) for row in found for name in needed]
    lists = [talk if isinstance(talk, list) else [talk] for talk in talks]
    spoken = [each for talk in lists for each in talk if isinstance(each, dict)]
    if layout.formatting == "alpaca" or not source.tags or not spoken:
        return None
    tags = {**TAGS, **source.tags}
    keys = list(dict.fromkeys(str(key) for each in spoken for key in each))
    missing = {tag: tags[tag] for tag in ("role_tag", "content_tag") if tags[tag] not in keys}
    listed = "The messages have"
    if not missing:
        roles = list(dict.fromkeys(str(each.get(tags["role_tag"])) for each in spoken))
        if {*roles} <= {*tags.values()}:
            return None
        missing = {
            tag: tags[tag] for tag in ("user_tag", "assistant_tag") if tags[tag] not in roles
        }
        keys, listed = roles, "The roles are"
    if not missing:
        return None
    step = _columns_step(missing, [key for key in keys if key not in tags.values()], "tags")
    return _wrong_names(source.name, source.tags, missing, ("message", listed), keys, step)


def _wrong_names(
    name: str,
    given: Mapping[str, str],
    missing: Mapping[str, str],
    words: tuple[str, str],
    keys: Sequence[str],
    step: str,
) -> ProblemsError:
    """``words``: what lacks the names, and what begins the list of those that there are."""
    said = [
        f'{each} = "{key}"' + " (the default)" * (each not in given)
        for each, key in missing.items()
        if key
    ]
    found = f"dataset_info.json says {' and '.join(said)}" if said else "dataset_info.json"
    if said:
        found += f"; no {words[0]} has {'them' if len(said) > 1 else 'it'}"
    nowhere = [each for each, key in missing.items() if not key]
    if nowhere:
        found += f"{', and' * bool(said)} names no column for {' and '.join(nowhere)}"
    found += f". {words[1]}: {', '.join(sorted(keys))}"
    wrong = problem("KTD002", f"dataset {name!r}", found, "", step)
    return ProblemsError("the datasets can't be read; nothing was started.", [wrong])


_USUAL = {
    **COLUMNS,
    "user_tag": "user",
    "assistant_tag": "assistant",
    "content_tag": "content",
    "role_tag": "role",
}
"""The likeliest names, where those that are given aren't there."""


def _columns_step(missing: Mapping[str, str], free: Sequence[str], block: str = "columns") -> str:
    """The entry's names mended, as far as names that nothing else reads make it likely."""
    likely = {}
    for name, key in missing.items():
        near = difflib.get_close_matches(key or name, free, n=1)
        usual = [each for each in (_USUAL.get(name), TAGS.get(name)) if each in free]
        likely[name] = next(iter([*usual, *near]), None)
    parts = [f'"{name}": "{key}"' for name, key in likely.items() if key]
    if not parts:
        return f"Correct its {block} in {INFO}."
    return f"Write {' and '.join(parts)} in its {block} in {INFO}."
