"""``tokenized_path``: rows kept as tokens, for the next start of a run on them.

One rule: they are used where everything that they were made of is the same, and made anew where anything
differs. That is the bytes of the rows' files, of dataset_info.json and of the tokenizer's files, every
setting that rows may depend on, the code (this package's and the libraries' versions), and
the day where the chat template writes it. Rows that name images depend on more, and aren't kept.
The files carry hashes, so that damaged ones are made anew, too; a directory appears whole or not at all.
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
from ktbridge.errors import KtbridgeError, Problem, Severity
from ktbridge.files import digests, records
from ktbridge.files.publish import Staging
from ktbridge.files.sizes import size_text
from ktbridge.sft.config import TrainConfig
from ktbridge.sft.config.fields import options
from ktbridge.sft.data.fit import Fitted
from ktbridge.sft.data.mixing import Share
from ktbridge.sft.data.rows import Refused, plain_value
from ktbridge.sft.data.sources import INFO, find_sources

if TYPE_CHECKING:
    from datasets import Dataset

MANIFEST = "ktbridge_tokenized.json"
_PARTS = ("train", "held_out")
_OF_TOKENIZERS = (".json", ".jinja", ".model", ".txt")
_TEMPLATES = (".jinja", "tokenizer_config.json")
_DATE = b"strftime_now"
"""How chat templates (gpt-oss', Llama's) write today's date."""
_IMAGE = "image"
_LIBRARIES = ("transformers", "tokenizers", "jinja2", "trl", "datasets")


@dataclass(frozen=True)
class Tokenized:
    """A run's rows as tokens, and the digests of what they were read as, for the run's identity."""

    fitted: Fitted
    held_out: Fitted | None
    digest: str
    held_digest: str | None


class Kept:
    """The rows that ``config.tokenized_path`` keeps for a run on the base model in ``base``.

    Raises KtbridgeError for a directory there that is something else.
    """

    def __init__(self, config: TrainConfig, base: Path) -> None:
        assert config.tokenized_path is not None
        self.directory = Path(config.tokenized_path)
        self._config, self._base = config, base
        found = _objection(self.directory)
        if found:
            raise KtbridgeError(f"{self.directory} {found[0]}.", found[1])
        self._before: dict[str, str] | None = None
        """What rows are made of, before they are read."""
        self.notes: tuple[Problem, ...] = ()
        """Whether they were used, or why not."""

    def find(self) -> Tokenized | None:
        """The kept rows if they are those of this run."""
        self._before = own = made_of(self._config, self._base)
        if not (self.directory / MANIFEST).is_file():
            return None
        if self._config.overwrite_cache:
            self._note("KTD041", "kept, but overwrite_cache is true")
            return None
        record = _read_manifest(self.directory / MANIFEST)
        if record is None:
            self._note("KTD042", f"{MANIFEST} is damaged")
            return None
        theirs = record["made of"]
        if own is None or theirs != own:
            keys = sorted(theirs.keys() | (own or {}).keys())
            differ = [key for key in keys if own and theirs.get(key) != own.get(key)]
            more = f" and {len(differ) - 3} more" if len(differ) > 3 else ""
            found = f"kept of another {', '.join(differ[:3]) or 'dataset'}{more}"
            self._note("KTD041", found)
            return None
        for name, (size, digest) in record["files"].items():
            if not digests.is_whole(self.directory / name, size, digest):
                self._note("KTD042", f"{name} is damaged")
                return None
        try:
            train, held = (self._read(record.get(part), part) for part in _PARTS)
        except OSError:
            train = held = None
        # Another run may have put its own in this place since; what was opened then is of one or the other.
        if train is None or _read_manifest(self.directory / MANIFEST) != record:
            self._note("KTD041", "replaced by another run just now")
            return None
        size = size_text(sum(size for size, _ in record["files"].values()))
        self._note(
            "KTD043", f"{train.used:,} rows as tokens from there ({size}), none was read anew"
        )
        return Tokenized(train, held, record["digest"], record["held digest"])

    def keep(self, rows: Tokenized) -> None:
        """Write them there, whole or not at all. Raises KtbridgeError or OSError where that fails.

        Nothing is written where a file has changed since ``find``: the rows may be of before or after that.
        """
        own = made_of(self._config, self._base)
        if own is None or own != self._before:
            why = "changed while they were read" if own else "came from the Hub just now"
            self._note(
                "KTD043", f"the rows {why}, and are kept by the next run that reads them", ""
            )
            return
        fits = [each for each in (rows.fitted, rows.held_out) if each]
        if outside := sum(
            _IMAGE in row.why.partition(":")[0] for fit in fits for row in fit.refused
        ):
            why = f"{outside:,} are refused for their images, which may be put right outside these files"
            step = "Mend or remove these rows, or leave tokenized_path out."
            self._note("KTD043", f"the rows aren't kept: {why}", step)
            return
        with Staging(self.directory, _objection) as staging:
            record: dict[str, Any] = {"made of": own, "files": {}}
            record |= {"digest": rows.digest, "held digest": rows.held_digest}
            for part, fitted in zip(_PARTS, (rows.fitted, rows.held_out), strict=True):
                if fitted is None:
                    continue
                name = f"{part}.arrow"
                write_arrow(fitted.dataset, staging.path / name)
                path = staging.path / name
                record["files"][name] = [path.stat().st_size, digests.of_file(path)]
                record[part] = {
                    item.name: getattr(fitted, item.name)
                    for item in fields(Fitted)
                    if item.name not in ("dataset", "notes", "shares", "refused")
                }
                for key in ("notes", "shares", "refused"):
                    record[part][key] = [asdict(each) for each in getattr(fitted, key)]
            text = json.dumps(record, default=plain_value)
            staging.write_bytes(MANIFEST, f"{_hash([text])}\n{text}\n".encode())
            staging.commit()
        size = size_text(sum(size for size, _ in record["files"].values()))
        self._note("KTD043", f"{rows.fitted.used:,} rows are kept there as tokens ({size})")

    def not_kept(self, why: str) -> None:
        """Note that the rows can't be kept, which ends no run."""
        found = f"the rows can't be kept there: {why}"
        step = "Make room there, or name another tokenized_path; this run goes on without."
        self._note("KTD043", found, step, "warning")

    def _note(
        self, code: str, found: str, step: str | None = None, severity: Severity | None = None
    ) -> None:
        where = str(self.directory)
        self.notes = (problem(code, where, found, next_step=step, severity=severity),)

    def _read(self, record: Mapping[str, Any] | None, part: str) -> Fitted | None:
        from datasets import Dataset

        if record is None:
            return None
        values = {
            **record,
            "dataset": Dataset.from_file(str(self.directory / f"{part}.arrow")),  # mapped
            "notes": [Problem(**each) for each in record["notes"]],
            "shares": [Share(**each) for each in record["shares"]],
            "refused": [Refused(**each) for each in record["refused"]],
            "judged": tuple(record["judged"]) if record["judged"] else None,
            "preview": {
                name: [(text, bool(learned)) for text, learned in pieces]
                for name, pieces in record["preview"].items()
            },
        }
        return Fitted(**values)


def keep_rows(
    kept: Kept, rows: Tokenized, on_note: Callable[[Problem], None] | None = None
) -> None:
    """Keep the rows, and tell ``on_note`` what came of it. That they can't be kept ends no run."""
    try:
        kept.keep(rows)
    except KtbridgeError as error:
        kept.not_kept(error.sentence)
    except OSError as error:
        kept.not_kept(error.strerror or str(error))
    if on_note:
        for note in kept.notes:
            on_note(note)


def made_of(config: TrainConfig, base: Path) -> dict[str, str] | None:
    """All that rows depend on: names -> hashes or values.

    None while rows of the Hub aren't here, and where a dataset can't be found: reading them says why.
    """
    known = options(TrainConfig).items()
    found = {key: json.dumps(getattr(config, key)) for key, option in known if option.rows}
    for name in ("dataset", "eval_dataset"):
        sources, failed = find_sources(replace(config, dataset=getattr(config, name)))
        if failed:
            return None
        for number, source in enumerate(sources):
            files = source.remote.cached() if source.remote else [(str(p), p) for p in source.paths]
            if files is None:
                return None
            told = repr((source.name, source.layout, source.num_samples))
            found[f"{name} {number + 1}"] = _hash([told, *_hashes(files)])
    if config.dataset_dir and (info := Path(config.dataset_dir) / INFO).is_file():
        found[INFO] = digests.of_file(info)
    tokenizer = [
        (path.name, path)
        for path in sorted(base.rglob("*.jinja") if base.is_dir() else ()) + sorted(base.iterdir())
        if path.is_file() and path.suffix in _OF_TOKENIZERS
    ]
    found["tokenizer"] = _hash(_hashes(tokenizer))
    if any(_DATE in path.read_bytes() for name, path in tokenizer if name.endswith(_TEMPLATES)):
        found["date"] = date.today().isoformat()
    code = [(path.name, path) for path in sorted(Path(__file__).parent.glob("*.py"))]
    code.append(("records.py", Path(records.__file__)))
    found["version of ktbridge"] = _hash([version("ktbridge"), *_hashes(code)])
    for library in _LIBRARIES:
        found[f"version of {library}"] = version(library)
    return found


def write_arrow(dataset: Dataset, path: Path) -> None:
    """The rows of ``dataset`` as a stream of Arrow, which ``Dataset.from_file`` maps."""
    import pyarrow as pa

    batches = dataset.with_format("arrow").iter(1000)
    first = next(batches)
    with open(path, "xb") as file, pa.ipc.new_stream(file, first.schema) as writer:
        writer.write_table(first)
        for table in batches:
            writer.write_table(table)


def _read_manifest(path: Path) -> dict[str, Any] | None:
    """None for a damaged one: its first line is the hash of the second."""
    try:
        digest, text, _ = path.read_text(encoding="utf-8").split("\n")
        record: dict[str, Any] = json.loads(text)
        return record if digest == _hash([text]) else None
    except (OSError, ValueError):
        return None


def _objection(path: Path) -> tuple[str, str] | None:
    """Why rows may not be kept at ``path``, as (what it is, next step)."""
    if path.is_dir() and ((path / MANIFEST).is_file() or not any(path.iterdir())):
        return None
    if not path.exists():
        return None
    what = "is no directory"
    if path.is_dir():
        what = "holds something else than rows kept by ktbridge (LLaMA-Factory's aren't read)"
    return what, "Name another directory as tokenized_path, or leave it out."


def _hashes(files: Iterable[tuple[str, Path]]) -> list[str]:
    return [f"{name} {digests.of_file(path)}" for name, path in files]


def _hash(parts: Iterable[str]) -> str:
    return digests.of_text("\n".join(parts))
