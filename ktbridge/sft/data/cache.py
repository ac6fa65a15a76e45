"""Token cache: the tokenized rows in ``tokenized_path``, for the next start of a run on them.

The cache is reused only if every input of the rows is unchanged (``cache_inputs``); otherwise it is rebuilt.
Rows with images depend on more, and aren't cached. The files carry hashes, so that damaged files are rebuilt,
too; the directory appears whole or not at all.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ktbridge.codes import problem
from ktbridge.errors import KtbridgeError, Problem, Severity, list_names
from ktbridge.files import digests, records
from ktbridge.files.publish import Staging
from ktbridge.files.sizes import size_text
from ktbridge.sft.config import TrainConfig
from ktbridge.sft.config.fields import options
from ktbridge.sft.data.dataset import TokenizedRows
from ktbridge.sft.data.records import INFO, find_sources
from ktbridge.sft.data.rows import MixShare, RefusedRow, describe_value

if TYPE_CHECKING:
    from datasets import Dataset

MANIFEST = "ktbridge_tokenized.json"
_PARTS = ("train", "held_out")
_TOKENIZER_SUFFIXES = (".json", ".jinja", ".model", ".txt")
_TEMPLATES = (".jinja", "tokenizer_config.json")
_DATE = b"strftime_now"
"""Function by which chat templates (gpt-oss', Llama's) write today's date."""
_LIBRARIES = ("transformers", "tokenizers", "jinja2", "trl", "datasets")


@dataclass(frozen=True)
class TokenizedRun:
    """A run's rows as tokens, and the fingerprints of the rows as they were read."""

    rows: TokenizedRows
    held_out: TokenizedRows | None
    fingerprint: str
    held_fingerprint: str | None


class TokenCache:
    """The token cache in ``config.tokenized_path`` of a run on the base model in ``base``.

    Raises KtbridgeError for a directory there that is something else.
    """

    def __init__(self, config: TrainConfig, base: Path) -> None:
        assert config.tokenized_path is not None
        self.directory = Path(config.tokenized_path)
        self._config, self._base = config, base
        if found := _why_not_replaced(self.directory):
            raise KtbridgeError(f"{self.directory} {found[0]}.", found[1])
        self._inputs: dict[str, str] | None = None
        """Inputs of the rows before they are read."""
        self.notes: tuple[Problem, ...] = ()
        """Says whether the cache was used, or why not."""

    def load(self) -> TokenizedRun | None:
        """Return the cached rows if their inputs are those of this run; ``notes`` say why not."""
        self._inputs = cache_inputs(self._config, self._base)
        if not (self.directory / MANIFEST).is_file():
            return None
        record = _read_manifest(self.directory / MANIFEST)
        code, why = self._why_unusable(record)
        run = None
        if record and not code:
            try:
                train, held = (self._read_part(record, part) for part in _PARTS)
                assert train is not None
                run = TokenizedRun(train, held, record["fingerprint"], record["held fingerprint"])
            except OSError:
                pass
            # Another run may have replaced the cache meanwhile; the open files belong to one or the other.
            if run is None or _read_manifest(self.directory / MANIFEST) != record:
                code, why = "KTD041", "replaced by another run just now"
        if code or not record or not run:
            self._note(code, why)
            return None
        found = f"{run.rows.used:,} rows as tokens from there ({_size_of(record)}), none was read anew"
        self._note("KTD043", found)
        return run

    def _why_unusable(self, record: Mapping[str, Any] | None) -> tuple[str, str]:
        """Return code and reason why the cache can't be used; ("", "") if it can."""
        if self._config.overwrite_cache:
            return "KTD041", "kept, but overwrite_cache is true"
        if record is None:
            return "KTD042", f"{MANIFEST} is damaged"
        if "inputs" not in record:
            return "KTD041", "kept of another version of ktbridge"
        own, theirs = self._inputs, record["inputs"]
        if own is None or theirs != own:
            keys = sorted(theirs.keys() | (own or {}).keys())
            differ = [key for key in keys if own and theirs.get(key) != own.get(key)]
            return "KTD041", f"kept of another {list_names(differ, 3) or 'dataset'}"
        for name, (size, digest) in record["files"].items():
            if not digests.is_whole(self.directory / name, size, digest):
                return "KTD042", f"{name} is damaged"
        return "", ""

    def save(self, run: TokenizedRun, on_note: Callable[[Problem], None] | None = None) -> None:
        """Write the rows, whole or not at all, and tell ``on_note`` the result; a failure ends no run.

        Nothing is written if a file has changed since ``load``: the rows may be of before or after that.
        """
        try:
            self._save(run)
        except (KtbridgeError, OSError) as error:
            why = error.strerror or repr(error) if isinstance(error, OSError) else error.sentence
            step = "Make room there, or name another tokenized_path; this run goes on without."
            self._note("KTD043", f"the rows can't be kept there: {why}", step, "warning")
        for note in self.notes:
            if on_note:
                on_note(note)

    def _save(self, run: TokenizedRun) -> None:
        own = cache_inputs(self._config, self._base)
        if own is None or own != self._inputs:
            why = "changed while they were read" if own else "came from the Hub just now"
            found = f"the rows {why}, and are kept by the next run that reads them"
            self._note("KTD043", found, "")
            return
        parts = dict(zip(_PARTS, (run.rows, run.held_out), strict=True))
        refused = [row.why.partition(":")[0] for rows in parts.values() if rows for row in rows.refused]
        if outside := sum("image" in why for why in refused):
            why = f"{outside:,} are refused for their images, which may be put right outside these files"
            step = "Mend or remove these rows, or leave tokenized_path out."
            self._note("KTD043", f"the rows aren't kept: {why}", step)
            return
        with Staging(self.directory, _why_not_replaced) as staging:
            record: dict[str, Any] = {"inputs": own, "files": {}, "fingerprint": run.fingerprint}
            record["held fingerprint"] = run.held_fingerprint
            for part, rows in parts.items():
                if rows is None:
                    continue
                path = staging.path / f"{part}.arrow"
                _write_arrow(rows.dataset, path)
                record["files"][path.name] = [path.stat().st_size, digests.of_file(path)]
                values = {each.name: getattr(rows, each.name) for each in fields(TokenizedRows)}
                for key in ("notes", "shares", "refused"):
                    values[key] = [asdict(each) for each in values[key]]
                record[part] = {key: value for key, value in values.items() if key != "dataset"}
            text = json.dumps(record, default=describe_value)
            staging.write_bytes(MANIFEST, f"{digests.of_text(text)}\n{text}\n".encode())
            staging.commit()
        self._note("KTD043", f"{run.rows.used:,} rows are kept there as tokens ({_size_of(record)})")

    def _note(self, code: str, found: str, step: str | None = None, severity: Severity | None = None) -> None:
        where = str(self.directory)
        self.notes = (problem(code, where, found, next_step=step, severity=severity),)

    def _read_part(self, manifest: Mapping[str, Any], part: str) -> TokenizedRows | None:
        from datasets import Dataset

        record = manifest.get(part)
        if record is None:
            return None
        values = {
            **record,
            "dataset": Dataset.from_file(str(self.directory / f"{part}.arrow")),  # mapped
            "notes": [Problem(**each) for each in record["notes"]],
            "shares": [MixShare(**each) for each in record["shares"]],
            "refused": [RefusedRow(**each) for each in record["refused"]],
            "judged": tuple(record["judged"]),
            "preview": {
                name: [(text, bool(learned)) for text, learned in pieces]
                for name, pieces in record["preview"].items()
            },
        }
        return TokenizedRows(**values)


def cache_inputs(config: TrainConfig, base: Path) -> dict[str, str] | None:
    """Return all inputs of tokenized rows by name: hashes of files, values of settings, versions of code.

    None while rows on the Hub aren't here, or if a dataset can't be found: reading them says why.
    """
    known = options(TrainConfig).items()
    found = {key: json.dumps(getattr(config, key)) for key, option in known if option.rows}
    for name in ("dataset", "eval_dataset"):
        sources, failed = find_sources(replace(config, dataset=getattr(config, name)))
        if failed:
            return None
        for number, source in enumerate(sources):
            files = source.files_at_hand()
            if files is None:
                return None
            described = repr((source.name, source.layout, source.num_samples))
            found[f"{name} {number + 1}"] = _hash_files(files, described)
    if config.dataset_dir and (info := Path(config.dataset_dir) / INFO).is_file():
        found[INFO] = digests.of_file(info)
    tokenizer = [
        (path.name, path)
        for path in sorted(base.rglob("*.jinja") if base.is_dir() else ()) + sorted(base.iterdir())
        if path.is_file() and path.suffix in _TOKENIZER_SUFFIXES
    ]
    found["tokenizer"] = _hash_files(tokenizer)
    if any(_DATE in path.read_bytes() for name, path in tokenizer if name.endswith(_TEMPLATES)):
        found["date"] = date.today().isoformat()
    code = [(path.name, path) for path in sorted(Path(__file__).parent.glob("*.py"))]
    code.append(("files/records.py", Path(records.__file__)))
    found["version of ktbridge"] = _hash_files(code, version("ktbridge"))
    for library in _LIBRARIES:
        found[f"version of {library}"] = version(library)
    return found


def _hash_files(files: Iterable[tuple[str, Path]], *texts: str) -> str:
    hashes = [f"{name} {digests.of_file(path)}" for name, path in files]
    return digests.of_text("\n".join([*texts, *hashes]))


def _write_arrow(dataset: Dataset, path: Path) -> None:
    """Write ``dataset`` as a stream of Arrow, which ``Dataset.from_file`` maps."""
    import pyarrow as pa

    batches = dataset.with_format("arrow").iter(1000)
    first = next(batches)
    with open(path, "xb") as file, pa.ipc.new_stream(file, first.schema) as writer:
        writer.write_table(first)
        for table in batches:
            writer.write_table(table)


def _size_of(record: Mapping[str, Any]) -> str:
    return size_text(sum(size for size, _ in record["files"].values()))


def _read_manifest(path: Path) -> dict[str, Any] | None:
    """Return the manifest, or None for a damaged one: its first line is the hash of the second."""
    try:
        digest, text, _ = path.read_text(encoding="utf-8").split("\n")
        record: dict[str, Any] = json.loads(text)
        return record if digest == digests.of_text(text) else None
    except (OSError, ValueError):
        return None


def _why_not_replaced(path: Path) -> tuple[str, str] | None:
    """Return why the cache can't be at ``path``, as (what it is, next step); None if it can."""
    if path.is_dir() and ((path / MANIFEST).is_file() or not any(path.iterdir())):
        return None
    if not path.exists():
        return None
    what = "is no directory"
    if path.is_dir():
        what = "holds something else than rows kept by ktbridge (LLaMA-Factory's aren't read)"
    return what, "Name another directory as tokenized_path, or leave it out."
