"""The sources of rows: files, names in LLaMA-Factory's dataset_info.json, and datasets on the Hub.

``find_sources`` turns ``dataset`` into sources; ``RowSource.records`` yields their raw rows, each with its
file and line.
"""

from __future__ import annotations

import difflib
import json
import random
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any

from ktbridge.codes import Problems, problem
from ktbridge.errors import KtbridgeError, Problem, ProblemsError, did_you_mean
from ktbridge.files import digests
from ktbridge.files.publish import OnProgress, write_text
from ktbridge.files.records import FileRow, read_records
from ktbridge.install import install_hint
from ktbridge.model import hub
from ktbridge.model.hub_errors import raise_explained
from ktbridge.sft.config import TrainConfig
from ktbridge.sft.config.load import ROWS
from ktbridge.sft.data.conversation import COLUMNS, Layout
from ktbridge.sft.data.messages import Tags

INFO, README = "dataset_info.json", "README.md"
_ENTRY_KEYS = (
    "file_name", "file_sha1", "formatting", "ranking", "columns", "tags", "split", "subset", "folder",
    "num_samples", "revision", "hf_hub_url",
)  # fmt: skip
_ELSEWHERE = ("ms_hub_url", "om_hub_url", "script_url", "cloud_file_name")
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
_ROLES = {
    "user_tag": "user",
    "assistant_tag": "assistant",
    "system_tag": "system",
    "observation_tag": "tool",
    "function_tag": "function_call",
}
_USUAL_NAMES = {
    **COLUMNS,
    "user_tag": "user",
    "assistant_tag": "assistant",
    "content_tag": "content",
    "role_tag": "role",
}
"""The likeliest names, proposed if the given ones don't occur."""
_CANT_READ = "the datasets can't be read; nothing was started."


@dataclass(frozen=True)
class HubRows:
    """One split of a dataset on the Hub. ``subset``: its configuration; ``folder``: where in it to look.

    datasets finds the split's files by what the repository declares (subsets and splits in README.md, or by
    the names of files), from a directory of empty files with the repository's names: nothing is downloaded
    for it, and no code is run.
    """

    repository: hub.Repository
    subset: str | None = None
    split: str = "train"
    folder: str | None = None

    def cached(self) -> list[tuple[str, Path]] | None:
        """Return (name to show, path) of each file; None unless all are known to be in the Hub cache."""
        try:
            found = json.loads(self._record.read_text())
            folder = self._storage / "snapshots" / found["commit"]
            files = [(f"{self.repository}/{name}", folder / name) for name in found["files"]]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return files if all(path.is_file() for _, path in files) else None

    def fetch(self, on_progress: OnProgress | None = None) -> list[tuple[str, Path]]:
        """Download the files unless they are cached; as ``cached``. ``on_progress(done, total)``: bytes.

        Raises KtbridgeError for a repository that isn't there, can't be reached or has no such split.
        """
        if found := self.cached():
            return found
        commit, files = hub.list_files(self.repository, self.repository.revision)
        readme = [file for file in files if file.rfilename == README]
        path = hub.fetch_files(self.repository, commit, readme) if readme else None
        names = self._choose_files([file.rfilename for file in files], path and path / README)
        chosen = [file for file in files if file.rfilename in names]
        hub.fetch_files(self.repository, commit, chosen, on_progress)
        self._record.parent.mkdir(exist_ok=True)
        write_text(self._record, json.dumps({"commit": commit, "files": names}))
        if found := self.cached():
            return found
        raise KtbridgeError(f"the Hub cache {hub.cache_directory()} lost files of {self.repository}.")

    @property
    def _storage(self) -> Path:
        return hub.storage_of(self.repository)

    @property
    def _record(self) -> Path:
        """File that lists the split's files, written when all of them are there."""
        key = digests.of_json(asdict(self), as_python_writes=True)
        return self._storage / "ktbridge" / f"{key}.json"

    def _choose_files(self, names: list[str], readme: Path | None) -> list[str]:
        """Return the names of the split's files, in their order."""
        ours = [name for name in names if name.lower().endswith(ROWS) and _stays_within(name)]
        if not ours:
            raise KtbridgeError(
                f"{self.repository} on the Hub has no JSON, Parquet or CSV file.",
                "Convert its rows to one of these and name the file.",
            )
        with (
            tempfile.TemporaryDirectory() as scratch,
            raise_explained(self.repository),  # without the library's warnings
            self._readable_errors(),
        ):
            root = Path(scratch, "rows").resolve()
            for name in ours:
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                (root / name).touch()
            if readme is not None:
                shutil.copyfile(readme, root / README)
            found = self._split_files(root, Path(scratch, "cache"))
            if self.split not in found:
                raise KtbridgeError(
                    f"{self.repository} on the Hub has no split {self.split!r}.",
                    f"Set split in dataset_info.json to one of: {', '.join(map(str, found))}.",
                )
            return [Path(path).relative_to(root).as_posix() for path in found[self.split]]

    def _split_files(self, root: Path, cache: Path) -> Any:
        """Return split -> paths, as datasets finds them."""
        try:
            import datasets
        except ModuleNotFoundError as error:
            raise KtbridgeError(
                f"datasets of the Hub need the package {error.name}.", install_hint("train")
            ) from error
        subsets = datasets.get_dataset_config_names(str(root), data_dir=self.folder)
        several = self.subset is None and len(subsets) > 1 and "default" not in subsets
        if several or self.subset not in (None, *subsets):
            what = "several subsets" if several else f"no subset {self.subset!r}"
            raise KtbridgeError(
                f"{self.repository} on the Hub has {what}.",
                f"Set subset in dataset_info.json to one of: {', '.join(subsets)}.",
            )
        builder = datasets.load_dataset_builder(
            str(root), self.subset, data_dir=self.folder, cache_dir=str(cache)
        )
        return builder.config.data_files or {}

    @contextmanager
    def _readable_errors(self) -> Iterator[None]:
        """Raise what datasets finds wrong with a repository as a KtbridgeError."""
        try:
            yield
        except (OSError, ValueError, TypeError) as error:  # as its own errors are
            lines = str(error).strip().splitlines() or ["no reason given"]
            raise KtbridgeError(
                f"{self.repository} on the Hub can't be read as a dataset: {lines[0].rstrip('.')[:200]}.",
                "Correct subset and folder in dataset_info.json, or download a file and name it.",
            ) from error


def _stays_within(name: str) -> bool:
    """Return whether a name, which a server gave, stays within its directory."""
    return not PurePosixPath(name).is_absolute() and ".." not in PurePosixPath(name).parts


@dataclass(frozen=True)
class RowSource:
    """One entry of ``dataset``: its files, here or on the Hub, and the layout of their rows.

    ``num_samples``: number of rows to draw at random; more than there are repeats some. ``columns`` and
    ``tags`` are those that dataset_info.json gives.
    """

    name: str
    paths: tuple[Path, ...]
    layout: Layout
    remote: HubRows | None = None
    num_samples: int | None = None
    columns: Mapping[str, str] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)

    def files(self) -> list[tuple[str, Path]]:
        """Return (name to show, path) of each file; files on the Hub are downloaded first."""
        return self.remote.fetch() if self.remote else [(str(path), path) for path in self.paths]

    def files_at_hand(self) -> list[tuple[str, Path]] | None:
        """Return the files without downloading any; None unless all are here."""
        return self.remote.cached() if self.remote else self.files()

    def records(self, seed: int) -> Iterator[FileRow]:
        """Yield the raw rows. Raises what ``read_records`` and the Hub raise."""
        found = (record for shown, path in self.files() for record in read_records(path, shown))
        if self.num_samples is None:
            return found
        # LLaMA-Factory's choice: a permutation's first, and beyond their number any of them again.
        records, draw = [*found], random.Random(seed)
        more = max(0, self.num_samples - len(records)) if records else 0
        again = draw.choices(records, k=more) if more else []
        return iter(draw.sample(records, min(self.num_samples, len(records))) + again)

    def with_image_folders(self, config: TrainConfig) -> RowSource:
        """Return the source with images in ``media_dir``, or beside its files and in ``dataset_dir``."""
        beside = (path.parent for path in self.paths)
        folders = (config.media_dir,) if config.media_dir else (*beside, config.dataset_dir)
        found = tuple(dict.fromkeys(Path(folder) for folder in folders if folder))
        return replace(self, layout=replace(self.layout, folders=found))


def find_sources(config: TrainConfig) -> tuple[list[RowSource], list[KtbridgeError]]:
    """Find each entry of ``config.dataset``: a file, a name in dataset_info.json, or org/name on the Hub.

    Return also the errors: a ProblemsError with all entries that can't be used, a KtbridgeError for a
    dataset_info.json that can't be read.
    """
    problems: list[Problem] = []
    failed: list[KtbridgeError] = []
    info: dict[str, object] | None = None
    sources = []
    for name in config.dataset:
        if Path(name).is_file():
            sources.append(RowSource(name, (Path(name),), Layout()))
        elif (wanted := hub.repository(name, "dataset")) and not _is_described(name, config.dataset_dir):
            sources.append(RowSource(name, (), Layout(), HubRows(wanted)))
        elif config.dataset_dir is None:
            step = f"Give a path, or set dataset_dir to the directory whose {INFO} names it."
            expected = "a JSON, Parquet or CSV file, or org/name on the Hub"
            problems.append(problem("KTD002", name, "no such file", expected, step))
        elif not failed:
            directory = Path(config.dataset_dir)
            try:
                info = info or _read_info(directory / INFO)
            except KtbridgeError as error:
                failed.append(error)
                continue
            entry = _InfoEntry(name, directory)
            source = entry.read(info, config.stage)
            problems += entry.problems
            if source and not entry.problems:
                sources.append(source)
    if problems:
        failed.append(ProblemsError(_CANT_READ, problems))
    return [source.with_image_folders(config) for source in sources], failed


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


class _InfoEntry:
    """Reader of one entry of dataset_info.json, which adds what is wrong with it to ``problems``."""

    def __init__(self, name: str, directory: Path) -> None:
        self._name, self._directory = name, directory
        self.problems = Problems(str(directory / INFO), "KTD002")

    def _add_problem(self, found: str, expected: str = "", next_step: str = "") -> None:
        self.problems.error(self._name, found, expected, next_step)

    def read(self, info: Mapping[str, object], stage: str) -> RowSource | None:
        """Return the source for a run of ``stage``; it is of no use if there are ``problems``."""
        entry = info.get(self._name)
        if not isinstance(entry, dict):
            step = did_you_mean(self._name, info) or f"It names {', '.join(info) or 'none'}."
            self._add_problem("no such dataset, nor a file", "", step)
            return None
        on_hub = entry.get("hf_hub_url")
        remote = self._read_remote(entry) if on_hub else None
        elsewhere = [key for key in _ELSEWHERE if entry.get(key) and not on_hub]
        if elsewhere:
            found = f"{elsewhere[0]} {entry[elsewhere[0]]!r}, which is not on this machine"
            step = f"Download it into {self._directory}, and write file_name instead."
            self._add_problem(found, "file_name or hf_hub_url", step)
        for key in entry.keys() - {*_ENTRY_KEYS, *_ELSEWHERE}:
            self._add_problem(f"unknown key {key}", ", ".join(_ENTRY_KEYS))
        count = entry.get("num_samples")
        if count is not None and (type(count) is not int or count < 1):
            self._add_problem(f"num_samples {count!r}", "a number of rows")
            count = None
        if remote is None and entry.get("split") not in (None, "train"):
            self._add_problem(f"split {entry['split']!r}", "a file of its own")
        ranking = entry.get("ranking") or False
        if ranking is not (stage == "dpo"):
            kind, other = ("pairs", "sft") if stage == "dpo" else ("conversations", "dpo")
            self._add_problem(
                f"ranking: {str(ranking).lower()} for stage: {stage}",
                f"ranking: {str(not ranking).lower()}",
                f"Name a dataset of {kind}, or set stage: {other}.",
            )
        stated = entry.get("formatting") or "alpaca"
        if stated not in ("alpaca", "sharegpt", "openai"):
            self._add_problem(f"formatting {stated!r}", "alpaca, sharegpt or openai")
        formatting = "alpaca" if stated == "alpaca" else "messages"
        columns = self._read_names("columns", entry.get("columns"), COLUMNS)
        tags = self._read_names("tags", entry.get("tags"), TAGS)
        paths = () if elsewhere or on_hub else self._find_files(entry.get("file_name"))
        own = Tags()
        if tags and formatting == "messages":
            every = {**TAGS, **tags}
            roles = {every[tag]: role for tag, role in _ROLES.items()}
            own = Tags(every["role_tag"], every["content_tag"], roles)
        layout = Layout(formatting, columns or dict(COLUMNS), own)
        return RowSource(self._name, paths, layout, remote, count, columns, tags)

    def _read_remote(self, entry: Mapping[str, object]) -> HubRows | None:
        """Return ``hf_hub_url`` with ``subset``, ``split``, ``folder`` and ``revision`` unless null."""
        texts: dict[str, str] = {}
        for key in ("hf_hub_url", "subset", "split", "folder", "revision"):
            value = entry.get(key)
            if isinstance(value, str) and value:
                texts[key] = value
            elif value is not None:
                self._add_problem(f"{key} {value!r}", "a text")
                return None
        name, revision = texts.pop("hf_hub_url"), texts.pop("revision", None)
        wanted = hub.named_repository(name, "dataset")
        if wanted is None:
            self._add_problem(f"hf_hub_url {name!r}", "org/name")
            return None
        return HubRows(replace(wanted, revision=wanted.revision or revision), **texts)

    def _read_names(self, key: str, given: object, known: Mapping[str, str]) -> dict[str, str]:
        """Return the entry's ``columns`` or ``tags``; nulls are treated as absent."""
        if given and not isinstance(given, dict):
            self._add_problem(f"{key} {given!r}", "an object")
        found = {}
        for name, value in given.items() if isinstance(given, dict) else ():
            if name not in known:
                self._add_problem(f"unknown {key} {name}", ", ".join(known))
            elif isinstance(value, str):
                found[name] = value
            elif value is not None:
                self._add_problem(f"{key} {name}: {value!r}", "a text")
        return found

    def _find_files(self, name: object) -> tuple[Path, ...]:
        """Return the named file, or the data files of the named directory, sorted by name."""
        if not isinstance(name, str) or not name:
            self._add_problem("no file_name", "a file beside dataset_info.json, or hf_hub_url")
            return ()
        path = self._directory / name
        if path.is_file():
            return (path,)
        paths = sorted(file for file in path.glob("*") if file.suffix.lower() in ROWS)
        if not paths:
            self._add_problem(f"file_name {name!r}: no such file", "", f"Put the rows at {path}.")
        return tuple(paths)


def explain_wrong_names(
    source: RowSource, rows: Sequence[object], config: TrainConfig
) -> ProblemsError | None:
    """Return the error for rows that lack the names which dataset_info.json gives them, or None.

    ``rows`` are those of a dataset of which none can be used.
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
    # 1. Columns of the rows
    keys = list(dict.fromkeys(str(key) for row in found for key in row))
    wanted = {name: layout.columns.get(name, "") for name in needed}
    missing = {name: key for name, key in wanted.items() if key not in keys}
    if missing:
        free = [key for key in keys if key not in layout.columns.values()]
        step = _propose_names(missing, free, "columns")
        other = next((key for key in ("conversations", "messages") if key in keys), None)
        if layout.formatting == "alpaca" and other:
            step = f'Write "formatting": "sharegpt" and "columns": {{"messages": "{other}"}} in {INFO}.'
        elif layout.formatting == "messages" and {"instruction", "output"} <= {*keys}:
            step = f'Write "formatting": "alpaca" in {INFO}.'
        said = _missing_names(source.columns, missing, "row")
        return _names_error(source.name, f"{said}. The rows have: {_listed(keys)}", step)
    # 2. Keys and roles of the messages
    values = [row.get(layout.columns.get(name, "")) for row in found for name in needed]
    lists = [value if isinstance(value, list) else [value] for value in values]
    messages = [each for value in lists for each in value if isinstance(each, dict)]
    if layout.formatting == "alpaca" or not source.tags or not messages:
        return None
    tags, listed = {**TAGS, **source.tags}, "The messages have"
    keys = list(dict.fromkeys(str(key) for each in messages for key in each))
    missing = {tag: tags[tag] for tag in ("role_tag", "content_tag") if tags[tag] not in keys}
    if not missing:
        keys = list(dict.fromkeys(str(each.get(tags["role_tag"])) for each in messages))
        listed = "The roles are"
        if not {*keys} <= {*tags.values()}:
            spoken = ("user_tag", "assistant_tag")
            missing = {tag: tags[tag] for tag in spoken if tags[tag] not in keys}
    if not missing:
        return None
    step = _propose_names(missing, [key for key in keys if key not in tags.values()], "tags")
    said = _missing_names(source.tags, missing, "message")
    return _names_error(source.name, f"{said}. {listed}: {_listed(keys)}", step)


def _listed(keys: Sequence[str]) -> str:
    return ", ".join(sorted(keys))


def _names_error(name: str, found: str, step: str) -> ProblemsError:
    return ProblemsError(_CANT_READ, [problem("KTD002", f"dataset {name!r}", found, "", step)])


def _missing_names(given: Mapping[str, str], missing: Mapping[str, str], where: str) -> str:
    """Say which names no ``where`` has; ``given`` are those that the entry itself gives."""
    said = [
        f'{each} = "{key}"' + " (the default)" * (each not in given) for each, key in missing.items() if key
    ]
    found = f"dataset_info.json says {' and '.join(said)}" if said else "dataset_info.json"
    if said:
        found += f"; no {where} has {'them' if len(said) > 1 else 'it'}"
    nowhere = [each for each, key in missing.items() if not key]
    if nowhere:
        found += f"{', and' * bool(said)} names no column for {' and '.join(nowhere)}"
    return found


def _propose_names(missing: Mapping[str, str], free: Sequence[str], block: str) -> str:
    """Propose the likeliest of the ``free`` names, which nothing else reads, for each missing one."""
    parts = []
    for name, key in missing.items():
        near = difflib.get_close_matches(key or name, free, n=1)
        usual = [each for each in (_USUAL_NAMES.get(name), TAGS.get(name)) if each in free]
        parts += [f'"{name}": "{each}"' for each in [*usual, *near][:1]]
    if not parts:
        return f"Correct its {block} in {INFO}."
    return f"Write {' and '.join(parts)} in its {block} in {INFO}."
