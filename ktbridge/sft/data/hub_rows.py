"""Datasets of the Hub: which of a repository's files hold a split, and these files in the Hub's cache.

datasets reads what the repository declares (subsets and splits in README.md, or by the names of files) from
a directory of empty files with the repository's names: nothing is downloaded for it, and no code is run.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from ktbridge.errors import KtbridgeError
from ktbridge.files import digests
from ktbridge.files.publish import OnProgress, write_text
from ktbridge.install import install_hint
from ktbridge.model import hub
from ktbridge.model.hub_errors import explained
from ktbridge.sft.config.load import ROWS

README = "README.md"


@dataclass(frozen=True)
class HubRows:
    """One split of a dataset on the Hub. ``subset``: its configuration; ``folder``: where in it to look."""

    repository: hub.Repository
    subset: str | None = None
    split: str = "train"
    folder: str | None = None

    def cached(self) -> list[tuple[str, Path]] | None:
        """(name to show, path) of each file if all are in the cache; None if not, or not known to be."""
        try:
            found = json.loads(self._record.read_text())
            folder = self._storage / "snapshots" / found["commit"]
            files = [(f"{self.repository}/{name}", folder / name) for name in found["files"]]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return files if all(path.is_file() for _, path in files) else None

    def fetch(self, on_progress: OnProgress | None = None) -> list[tuple[str, Path]]:
        """The same, downloaded where they aren't in the cache. ``on_progress(done, total)`` counts bytes.

        Raises KtbridgeError, in one sentence, for what isn't there, can't be reached or has no such split.
        """
        if found := self.cached():
            return found
        commit, files = hub.list_files(self.repository, self.repository.revision)
        readme = [file for file in files if file.rfilename == README]
        path = hub.fetch_files(self.repository, commit, readme) if readme else None
        names = self._choose([file.rfilename for file in files], path and path / README)
        chosen = [file for file in files if file.rfilename in names]
        hub.fetch_files(self.repository, commit, chosen, on_progress)
        self._record.parent.mkdir(exist_ok=True)
        write_text(self._record, json.dumps({"commit": commit, "files": names}))
        if found := self.cached():
            return found
        raise KtbridgeError(
            f"the Hub cache {hub.cache_directory()} lost files of {self.repository}."
        )

    @property
    def _storage(self) -> Path:
        return hub.storage_of(self.repository)

    @property
    def _record(self) -> Path:
        """Written when all files are there: which they are."""
        key = digests.of_json(asdict(self), as_python_writes=True)
        return self._storage / "ktbridge" / f"{key}.json"

    def _choose(self, names: list[str], readme: Path | None) -> list[str]:
        """The names of the split's files, in their order."""
        ours = [name for name in names if name.lower().endswith(ROWS) and _is_plain(name)]
        if not ours:
            raise KtbridgeError(
                f"{self.repository} on the Hub has no JSON, Parquet or CSV file.",
                "Convert its rows to one of these and name the file.",
            )
        with (
            tempfile.TemporaryDirectory() as scratch,
            explained(self.repository),  # without the library's warnings
            self._explained(),
        ):
            root = Path(scratch, "rows").resolve()
            for name in ours:
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                (root / name).touch()
            if readme is not None:
                shutil.copyfile(readme, root / README)
            found = self._data_files(root, Path(scratch, "cache"))
            if self.split not in found:
                raise KtbridgeError(
                    f"{self.repository} on the Hub has no split {self.split!r}.",
                    f"Set split in dataset_info.json to one of: {', '.join(map(str, found))}.",
                )
            return [Path(path).relative_to(root).as_posix() for path in found[self.split]]

    def _data_files(self, root: Path, cache: Path) -> Any:
        """Split -> paths, as datasets finds them."""
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
    def _explained(self) -> Iterator[None]:
        """Raise what datasets finds wrong with a repository as a KtbridgeError."""
        try:
            yield
        except (OSError, ValueError, TypeError) as error:  # as its own errors are
            lines = str(error).strip().splitlines() or ["no reason given"]
            raise KtbridgeError(
                f"{self.repository} on the Hub can't be read as a dataset: {lines[0].rstrip('.')[:200]}.",
                "Correct subset and folder in dataset_info.json, or download a file and name it.",
            ) from error


def _is_plain(name: str) -> bool:
    """Return whether a name, which a server gave, stays within its directory."""
    return not PurePosixPath(name).is_absolute() and ".." not in PurePosixPath(name).parts
