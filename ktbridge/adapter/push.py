"""Upload an adapter to the Hub with a model card: planned and validated first, then one commit.

Rows are never uploaded: refused_rows.jsonl stays. An adapter that names its base by a path of this machine
is of no use elsewhere, so it is uploaded under the base's name on the Hub or not at all.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ktbridge.adapter.adapter import CONFIG_FILE, Adapter
from ktbridge.adapter.card import Evaluation, read_evaluation, write_card
from ktbridge.adapter.manifest import MANIFEST_FILE, dump_json
from ktbridge.adapter.opening import open_adapter
from ktbridge.adapter.outputs import DATA_FILE, LOG_FILE, OURS, REFUSED_FILE
from ktbridge.adapter.scan import check_links
from ktbridge.adapter.validate import validate_adapter
from ktbridge.codes import problem
from ktbridge.errors import KtbridgeError, Problem, ProblemsError, UsageError, has_errors
from ktbridge.files import digests
from ktbridge.files.publish import OnProgress
from ktbridge.model.hub import Repository, name_of, named_repository
from ktbridge.model.hub_errors import library, raise_explained
from ktbridge.model.jsonfile import read_json_file

README = "README.md"


@dataclass(frozen=True)
class PushPlan:
    """Contents of the repository to be: each file as a path or its content. ``problems`` are no errors.

    ``reading`` says that the adapter was read from another tool's format, in which it is uploaded.
    """

    repository: Repository
    files: dict[str, Path | bytes]
    base_model: str
    problems: tuple[Problem, ...]
    reading: str = ""

    @property
    def card(self) -> str:
        text = self.files[README]
        return text.decode() if isinstance(text, bytes) else text.read_text()

    def sizes(self) -> dict[str, int]:
        """Bytes of each file."""
        return {
            name: len(data) if isinstance(data, bytes) else data.stat().st_size
            for name, data in self.files.items()
        }

    def as_dict(self) -> dict[str, object]:
        return {
            "ok": True,
            "repository": self.repository.id,
            "revision": self.repository.revision,
            "base_model": self.base_model,
            "files": [{"name": name, "bytes": size} for name, size in self.sizes().items()],
            "card": self.card,
            "problems": [one.as_dict() for one in self.problems],
        }


def plan_push(
    directory: str | os.PathLike[str],
    name: str,
    *,
    base_model: str | None = None,
    evaluation: str | os.PathLike[str] | None = None,
    from_format: str = "auto",
    on_progress: OnProgress | None = None,
) -> PushPlan:
    """Validate an adapter of any format that is read, and write its card; nothing is uploaded.

    ``name``: org/name or org/name@branch. ``base_model`` is the base's name on the Hub, by default what the
    adapter names; ``evaluation`` a directory of `ktbridge eval`; ``from_format`` the adapter's format where
    it is ambiguous. Raises UsageError for another name, and
    ProblemsError with all errors of validation, or for a base without a name on the Hub (KTH001).
    """
    repository = named_repository(name)
    if repository is None:
        raise UsageError(f"{name!r} is not a repository's name.", "Give it as org/name.")
    report = validate_adapter([directory], from_format=from_format, on_progress=on_progress)
    findings = [one for one in report.problems if one.severity != "info"]
    if not report.ok:
        raise ProblemsError(f"{directory} isn't uploaded: it would not be served as trained.", findings)
    adapter = open_adapter(directory, from_format, base_model)
    base = base_model or name_of(adapter.base_model or "")[0]
    if named_repository(base) is None or Path(base).expanduser().is_dir():
        findings.append(problem("KTH001", str(adapter.path), f"its base model is {base!r}"))
    results = Evaluation() if evaluation is None else read_evaluation(Path(evaluation))
    findings += (problem("KTH002", str(evaluation), error) for error in results.errors)
    missing = [name for name in (LOG_FILE, DATA_FILE) if not (adapter.path / name).is_file()]
    if missing and not adapter.format:
        found = f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not there"
        findings.append(problem("KTH003", str(adapter.path), found))
    files = dict(_files(adapter, base))
    findings += check_links(path for path in files.values() if isinstance(path, Path))
    if has_errors(findings):
        raise ProblemsError(f"{directory} isn't uploaded.", findings)
    files[README] = write_card(adapter, repository.id, base, results).encode()
    return PushPlan(repository, files, base, tuple(findings), adapter.reading)


def execute_push(plan: PushPlan, private: bool = False, bars: bool = False) -> str:
    """Make the repository if there is none, and commit the files; the commit's URL.

    ``bars``: huggingface_hub shows its progress bars, which only it can draw, on stderr.
    Raises KtbridgeError in a sentence. What was uploaded before an interruption isn't uploaded again.
    """
    hub = library()
    wanted = plan.repository
    if not hub.get_token():
        raise KtbridgeError(
            "uploading needs a token of the Hub that may write.",
            "Set HF_TOKEN, or log in with `hf auth login`.",
        )
    if not bars:
        hub.utils.disable_progress_bars()
    api = hub.HfApi()
    with raise_explained(wanted, upload=True):
        api.create_repo(wanted.id, private=private or None, exist_ok=True)
        if private and not api.model_info(wanted.id).private:
            raise KtbridgeError(
                f"{wanted.id} is there already and everybody can see it; nothing was uploaded.",
                "Make it private in its settings, or give another name.",
            )
        if wanted.revision:
            api.create_branch(wanted.id, branch=wanted.revision, exist_ok=True)
        done = api.create_commit(
            wanted.id,
            [
                hub.CommitOperationAdd(path_in_repo=name, path_or_fileobj=data)
                for name, data in plan.files.items()
            ],
            commit_message=f"Adapter for {plan.base_model}",
            revision=wanted.revision,
        )
    return str(done.commit_url)


def _files(adapter: Adapter, base: str) -> Iterator[tuple[str, Path | bytes]]:
    """The adapter's own files, and training's log and plot; with the base under its name."""
    if adapter.path.is_file():
        yield adapter.path.name, adapter.path
        return
    for path in sorted(adapter.path.iterdir()):
        ours = OURS.fullmatch(path.name) or (adapter.format == "gguf" and path.suffix == ".gguf")
        if ours and path.name != REFUSED_FILE and path.is_file():
            yield path.name, path
    if adapter.config.get("base_model_name_or_path") == base:
        return
    # As they lie there: of another tool's format the adapter has what a conversion would write.
    config_file, manifest_file = (adapter.path / name for name in (CONFIG_FILE, MANIFEST_FILE))
    if not config_file.is_file():
        return
    config = dump_json({**read_json_file(config_file), "base_model_name_or_path": base})
    yield CONFIG_FILE, config
    if manifest_file.is_file():
        manifest = read_json_file(manifest_file)
        digest = digests.of_bytes(config)
        listed = manifest.get("artifacts")
        artifacts = dict(listed) if isinstance(listed, dict) else {}
        artifacts[CONFIG_FILE] = {"size": len(config), "sha256": digest}
        manifest |= {"base": {"model_name_or_path": base}, "artifacts": artifacts}
        yield MANIFEST_FILE, dump_json(manifest)
