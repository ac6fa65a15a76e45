"""The fingerprint of a run, checkpoints on disk, and the one that a new run resumes from.

A key of the configuration says itself what a change of it means (``config/schema.py``, mark ``resume``);
``find_checkpoint`` compares. ``checkpoint`` writes and loads.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import MISSING, dataclass, replace
from pathlib import Path

from ktbridge.adapter.manifest import MANIFEST_FILE, TRAINING
from ktbridge.codes import problem
from ktbridge.errors import KtbridgeError, Problem, ProblemsError, UsageError
from ktbridge.files import digests
from ktbridge.kernel_choice import has_bf16_instructions
from ktbridge.model.identity import fingerprint
from ktbridge.model.jsonfile import read_json_file
from ktbridge.sft.config import KtConfig, TrainConfig
from ktbridge.sft.config.fields import Values, options
from ktbridge.sft.data.images import IMAGE_FILES
from ktbridge.sft.launch import world
from ktbridge.sft.quantized import find_quantized

FINGERPRINT_FILE = "ktbridge_checkpoint.json"
FILES = "files"
"""The key in it of the size in bytes and SHA-256 of each other file."""
NUMBER = "number"
"""The key in it of a checkpoint's sequence number, which doesn't depend on the clock."""
HELD_OUT = "held-out rows"
"""The key in it of the rows that evaluations are of, and of what is the best of them."""
LABELS = "loss of labeled positions"
"""The key in it of runs whose loss projects no others on a CPU, which changes last bits; since 0.7.0."""
WEIGHTS = "base model's weights"
"""The key in it of a digest of the base's tensors, and of other experts'; since 0.7.0, too."""
_NAME = re.compile(r"checkpoint-([0-9]+)")
_PROCESSES = "processes"
"""The key in it of the number of processes; a run of one has none."""
_ROWS_OF_A_STEP = ("per_device_train_batch_size", "gradient_accumulation_steps")
_LENGTH = {"max_steps", "num_train_epochs"}
_ENDLESS = {"constant", "constant_with_warmup", "inverse_sqrt"}
"""Schedules that don't depend on the length of a run."""
_OPTIONS = {
    **options(TrainConfig),
    **{f"kt_config.{key}": option for key, option in options(KtConfig).items()},
}
_NOTED = {HELD_OUT, *(key for key, option in _OPTIONS.items() if option.resume == "noted")}
_OF_ADAPTERS = (
    "base model", *(key for key, option in _OPTIONS.items() if option.resume == "adapter")
)  # fmt: skip
"""Keys, or their beginnings, without which an adapter isn't one for this run."""
_BASE_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
_ADAPTER_FILES = ("adapter_model.safetensors", "fused_expert_lora.safetensors")
_DTYPES = {True: "bfloat16", False: "float32"}
_ANEW = "start anew with resume_from_checkpoint=false, which keeps them under another name"


class RunFingerprint(dict[str, object]):
    """The inputs that decide a run's results, as JSON: settings, hashes of base and rows."""

    def changed(self, other: RunFingerprint) -> list[str]:
        """Return the keys in which two runs differ; of blocks KEY.INNER."""
        found = []
        for key in sorted(self.keys() | other.keys()):
            mine, their = self.get(key), other.get(key)
            if isinstance(their, dict) and isinstance(mine, dict):
                inner = sorted(their.keys() | mine.keys())
                found += [f"{key}.{name}" for name in inner if their.get(name) != mine.get(name)]
            elif their != mine:
                found.append(key)
        return found

    def shown(self, key: str) -> str:
        """Return the value of one of ``changed``'s keys as text; of a hash the beginning."""
        block, _, inner = key.partition(".")
        found = self.get(block)
        if inner and isinstance(found, dict):
            found = found.get(inner)
        if isinstance(found, str) and re.fullmatch("[0-9a-f]{64}", found):
            return f"SHA-256 {found[:12]}…"
        return repr(found)

    def completed(self, other: RunFingerprint) -> RunFingerprint:
        """Return the fingerprint with keys that ``other`` alone has, at their defaults."""
        found = RunFingerprint({**_defaults(TrainConfig, other), **self})
        if _PROCESSES in other:
            found.setdefault(_PROCESSES, 1)
        block, their = self.get("kt_config"), other.get("kt_config")
        if isinstance(block, dict) and isinstance(their, dict):
            found["kt_config"] = {**_defaults(KtConfig, their), **block}
        return found


@dataclass(frozen=True)
class Resumption:
    """The beginning of a run: ``checkpoint`` or (None) from scratch, and notes for the user."""

    checkpoint: Path | None = None
    notes: tuple[Problem, ...] = ()
    other_held_out: bool = False
    """True if the evaluations in the checkpoint are of other rows, or by another metric."""

    @property
    def step(self) -> int:
        """Return the optimizer steps already done when the run begins."""
        return step_of(self.checkpoint) if self.checkpoint else 0


def checkpoints_dir(config: TrainConfig) -> Path:
    """Return the directory of a run's checkpoints: beside its output, which appears only when it is finished.

    Raises UsageError for the root directory, beside which nothing is.
    """
    output = Path(config.output_dir)
    if not output.name:
        raise UsageError(f"{output} has no place beside it.", "Give another output_dir.")
    return output.with_name(output.name + ".checkpoints")


def step_of(checkpoint: Path) -> int:
    """Return the optimizer step in a checkpoint's name."""
    match = _NAME.fullmatch(checkpoint.name)
    return int(match[1]) if match else 0


def fingerprint_run(
    config: TrainConfig, base: Path, digest: str, held_digest: str | None = None, images: bool = False
) -> RunFingerprint:
    """Return the fingerprint of a run on rows with these digests; ``images``: rows have some."""
    settings = _settings(config)
    block = settings["kt_config"] = _settings(config.kt_config)
    settings["bf16"] = config.in_bfloat16
    if found := find_quantized(config, base):
        settings["experts quantised to"] = found.storage
    # Without it as in runs that began before the experts had dropout, and others aren't taken for those.
    block.pop("kt_lora_dropout", None)
    if config.expert_dropout:
        block["kt_lora_dropout"] = config.expert_dropout
    if world().size > 1:
        settings[_PROCESSES] = world().size
    settings["base model"] = _hashes(base, _BASE_FILES)
    if config.adapter_name_or_path:
        adapter = Path(config.adapter_name_or_path)
        gguf = [path.name for path in sorted(adapter.glob("*.gguf"))]
        place, names = (adapter, gguf) if adapter.is_dir() else (adapter.parent, [adapter.name])
        settings["adapter"] = _hashes(place, (*_ADAPTER_FILES, *names))
    settings["rows"] = digest
    before = next_record(config)
    if not before or LABELS in before:
        settings[LABELS] = True
    if not before or WEIGHTS in before:
        # Of a model that is not here yet, which is only planned with, those of the checkpoint.
        settings[WEIGHTS] = _digest_weights(config, base) or before.get(WEIGHTS, "")
    if images:
        settings["image processor"] = _hashes(base, IMAGE_FILES)
    if held_digest and config.evaluates:
        settings[HELD_OUT] = [held_digest, config.metric, config.greater]
    return RunFingerprint(json.loads(json.dumps(settings)))


def next_record(config: TrainConfig) -> Mapping[str, object]:
    """Return the record of the checkpoint that the run would go on from; empty without one."""
    requested = config.resume_from_checkpoint
    if requested is False or (requested is None and is_finished(config)):
        return {}
    places = [Path(requested)] if isinstance(requested, str) else saved(checkpoints_dir(config))
    return next(filter(None, map(_record, reversed(places))), {})


def find_checkpoint(config: TrainConfig, own: RunFingerprint) -> Resumption:
    """Return the beginning of the run by ``config.resume_from_checkpoint``.

    None: an unfinished run of the same configuration goes on (also a longer one, where the schedule is
    constant), one of another is refused, and a finished one, whose output may be replaced, begins anew.
    True: the last checkpoint, or a start anew where there is none; a path: that checkpoint. The learning
    rate, its schedule, ``max_grad_norm`` and the run's length may then differ, and each is noted. False: a
    start anew. Nothing is changed on disk here.

    A damaged checkpoint is passed over for the one before it, with a warning, unless it was named. Raises
    ``ProblemsError`` naming each setting in which the checkpoint's run differs, or each damaged file, and
    KtbridgeError for a path that is no checkpoint.
    """
    requested, root = config.resume_from_checkpoint, checkpoints_dir(config)
    if requested is False:
        return Resumption(notes=tuple(_archive_note(root)))
    if isinstance(requested, str):
        place = Path(requested)
        if not _NAME.fullmatch(place.name) or not (place / FINGERPRINT_FILE).is_file():
            raise _no_checkpoint(place)
        candidates = [place]
    else:
        candidates = saved(root)
        if not candidates or (requested is None and is_finished(config)):
            return Resumption()
    if not any(map(resumable, candidates)):
        raise KtbridgeError(
            f"{candidates[-1]} was saved with save_only_model=true: it lacks the optimizer's state.",
            f"{_from_weights(candidates[-1])}; or {_ANEW}.",
        )
    place, passed_over = _undamaged([each for each in candidates if resumable(each)])
    record = RunFingerprint(_record(place))
    for beside in (FILES, NUMBER):
        record.pop(beside, None)
    theirs, own = record.completed(own), own.completed(record)
    differing = own.changed(theirs)
    noted = {*_NOTED}
    if _PROCESSES in differing and config.stage != "kto" and _step_rows(own) == _step_rows(theirs):
        # kto measures KL in each process's batch; elsewhere a step has the same rows.
        noted |= {_PROCESSES, *_ROWS_OF_A_STEP}
    allowed = noted if requested is not None else set()
    if config.lr_scheduler_type in _ENDLESS and not 0 < config.warmup < 1:
        allowed = allowed | _LENGTH  # a longer run has the same rates until a shorter one ends
    other = [key for key in differing if key not in allowed]
    if other:
        raise ProblemsError(
            f"{root} holds checkpoints of a run that isn't finished, and this is another run; nothing was "
            "started."
            if requested is None
            else "the checkpoint belongs to another run; nothing was started.",
            [
                problem(
                    "KTC010",
                    f"{place}: {key}",
                    f"{theirs.shown(key)} in the checkpoint's run",
                    f"{own.shown(key)}, as now",
                    next_step="",
                )
                for key in other
            ],
            _way_on(place, other, noted),
        )
    changed = tuple(_changed(place, key, theirs, own) for key in differing)
    found = f"a checkpoint of this run: it goes on after step {step_of(place)}"
    notes = (*passed_over, *changed, problem("KTC021", str(place), found))
    return Resumption(place, notes, HELD_OUT in differing)


def check_length(config: TrainConfig, resumption: Resumption, steps: int) -> None:
    """Raise UsageError where a run of ``steps`` steps ends before the checkpoint that it goes on from."""
    place = resumption.checkpoint
    if place is None or resumption.step <= steps:
        return
    earlier = [each for each in _beside(place) if step_of(each) <= steps]
    named = f"name resume_from_checkpoint={earlier[-1]}, " if earlier else ""
    raise UsageError(
        f"{place} is at step {resumption.step}, behind this run's last ({steps}).",
        f"Raise num_train_epochs or max_steps, {named}or {_ANEW}.",
    )


def check_start(config: TrainConfig, resumption: Resumption) -> None:
    """Raise UsageError where the run would move the adapter away that it begins with."""
    root, start = checkpoints_dir(config), config.adapter_name_or_path
    if start and not resumption.checkpoint and root.resolve() in Path(start).resolve().parents:
        raise UsageError(
            f"adapter_name_or_path is {start}, and this run moves earlier checkpoints out of {root} when it "
            "begins.",
            "Give another output_dir.",
        )


def archive_checkpoints(config: TrainConfig) -> None:
    """Make room for a new run's checkpoints: existing ones are renamed, never deleted.

    Those of a finished run go when the new run replaces its output (``delete_archived``).
    """
    root = checkpoints_dir(config)
    if not saved(root):  # at most what a run left that was killed while it saved its first
        shutil.rmtree(root, ignore_errors=True)
    elif is_finished(config):
        delete_archived(config)
        os.rename(root, _replaced(config))
    else:
        os.rename(root, _free_name(root))


def delete_archived(config: TrainConfig) -> None:
    """Remove the checkpoints of a finished run whose output has been replaced, or is about to be."""
    shutil.rmtree(_replaced(config), ignore_errors=True)


def is_finished(config: TrainConfig) -> bool:
    """Return whether ``output_dir`` holds the adapter of the run's last or best checkpoint."""
    found = saved(checkpoints_dir(config))
    if not found:
        return False
    try:
        output, *others = (
            read_json_file(place / MANIFEST_FILE) for place in (Path(config.output_dir), *found)
        )
        held = [other["artifacts"] == output["artifacts"] for other in others]
    except (KtbridgeError, KeyError):
        return False
    # It may be that of the best step, which is before the last one.
    last = (output.get(TRAINING) or {}).get("last_step")
    return held[-1] or (any(held) and last == step_of(found[-1]))


def saved(root: Path) -> list[Path]:
    """Return the finished checkpoints of a run in the order in which they were written.

    Not by step, since a run that went on from an earlier one leaves later steps behind it, nor by time,
    since clocks are set back: by a number that each carries (by step where an older version wrote them).
    """
    found, number = [], 0
    for path in sorted(root.glob("checkpoint-*"), key=step_of):
        if _NAME.fullmatch(path.name) and (path / FINGERPRINT_FILE).is_file():
            if record := _record(path):  # else it is damaged, and stands behind the step before it
                number = int(str(record.get(NUMBER, 0)))
            found.append((number, step_of(path), path))
    return [path for _, _, path in sorted(found)]


def next_number(root: Path) -> int:
    """Return the sequence number of the next checkpoint."""
    return 1 + max((int(str(_record(path).get(NUMBER, 0))) for path in saved(root)), default=0)


def resumable(checkpoint: Path) -> bool:
    """Return whether a run can go on from it: save_only_model leaves out what that needs."""
    return any((checkpoint / f"optimizer.{kind}").is_file() for kind in ("pt", "safetensors"))


def describe_files(directory: Path) -> dict[str, dict[str, int | str]]:
    """Return size in bytes and SHA-256 of each file in ``directory``, for a checkpoint's record."""
    paths = sorted(path for path in directory.iterdir() if path.is_file())
    with ThreadPoolExecutor(4) as pool:
        found = [*zip(paths, pool.map(digests.of_file, paths), strict=True)]
    return {path.name: {"size": path.stat().st_size, "sha256": digest} for path, digest in found}


def _undamaged(candidates: list[Path]) -> tuple[Path, tuple[Problem, ...]]:
    """Return the last undamaged one of ``candidates``, with a warning if later ones are damaged.

    Raises ``ProblemsError`` with every damaged file when none is left.
    """
    problems: list[Problem] = []
    for place in reversed(candidates):
        found = damage(place)
        if not found:
            if not problems:
                return place, ()
            named = ", ".join(sorted({Path(problem.where).parent.name for problem in problems}))
            return place, (
                problem(
                    "KTC019",
                    problems[0].where,
                    problems[0].found + (f", and {len(problems) - 1} more" if problems[1:] else ""),
                    problems[0].expected,
                    f"{named} is damaged: the run goes on from {place.name}, the one before.",
                    severity="warning",
                ),
            )
        problems += found
    others = [each for each in _beside(place) if each not in candidates and resumable(each)]
    sound = next((each for each in reversed(others) if not damage(each)), None)
    named = f"name resume_from_checkpoint={sound}, " if sound else ""
    raise ProblemsError(
        "the checkpoint is damaged; nothing was started.", problems, f"Copy it again, {named}or {_ANEW}."
    )


def _beside(place: Path) -> list[Path]:
    """Return the other checkpoints of a run, by step."""
    return sorted((each for each in saved(place.parent) if each != place), key=step_of)


def damage(place: Path) -> list[Problem]:
    """Return a problem for each file of a checkpoint that is missing or corrupted."""
    record = _record(place)
    if not record:
        return [problem("KTC019", str(place / FINGERPRINT_FILE), "damaged", "JSON", next_step="")]
    recorded = record.get(FILES)
    recorded = recorded if isinstance(recorded, dict) else {}
    problems, there = [], describe_files(place)
    for name, size in recorded.items():
        # Before 0.6 only the size was recorded.
        expected = size if isinstance(size, dict) else {"size": size}
        own, size = there.get(name, {}), expected.get("size")
        if not own or own["size"] != size:
            found, wanted = f"{own['size']} bytes" if own else "no such file", f"{size} bytes"
        elif (digest := expected.get("sha256")) not in (None, own["sha256"]):
            found, wanted = f"SHA-256 {str(own['sha256'])[:12]}…", f"{str(digest)[:12]}…, as it was written"
        else:
            continue
        problems.append(problem("KTC019", str(place / name), found, wanted, next_step=""))
    return problems


def _record(checkpoint: Path) -> Mapping[str, object]:
    """Read a checkpoint's own record; an empty one where that is damaged."""
    try:
        record = read_json_file(checkpoint / FINGERPRINT_FILE)
    except KtbridgeError:
        return {}
    return record if isinstance(record.get(NUMBER, 0), int) else {}


def _settings(config: TrainConfig | KtConfig) -> Values:
    """Return the settings that a resumed run may not change silently.

    A key with ``since`` is left out at its default: runs of versions that didn't know it are the same.
    """
    return {
        key: getattr(config, key)
        for key, option in options(type(config)).items()
        if option.resume != "free" and not (option.since and getattr(config, key) == option.default)
    }


def _defaults(cls: type, keys: Mapping[str, object]) -> Values:
    """Return the defaults, as JSON, of those of ``keys`` that a file may leave out."""
    known = {key: option.default for key, option in options(cls).items() if option.default is not MISSING}
    plain: Values = json.loads(json.dumps({key: known[key] for key in keys if key in known}))
    return plain


def _hashes(directory: Path, names: tuple[str, ...]) -> dict[str, str]:
    """Return SHA-256 of those of the files that are there."""
    return {name: digests.of_file(directory / name) for name in names if (directory / name).is_file()}


def _digest_weights(config: TrainConfig, base: Path) -> str:
    """Return a digest of the base's weights, and of other experts'; "" where weights aren't there."""
    places = [base, *map(Path, filter(None, [config.kt_config.kt_weight_path]))]
    found = [fingerprint(place) for place in places]
    hashes = [each for own in found for each in (own.tensors_sha256, own.values_sha256)]
    return "" if None in hashes else digests.of_text(" ".join(map(str, hashes)))


def _replaced(config: TrainConfig) -> Path:
    root = checkpoints_dir(config)
    return root.with_name(root.name + ".replaced")


def _free_name(root: Path) -> Path:
    names = (root.with_name(f"{root.name}.old-{number}") for number in range(1, 1 << 20))
    return next(name for name in names if not name.exists())


def _archive_note(root: Path) -> list[Problem]:
    if not (earlier := saved(root)):
        return []
    found = f"checkpoints of an earlier run, the last at step {step_of(earlier[-1])}; this run starts anew"
    step = f"They are kept as {_free_name(root).name}: delete that directory when you don't need them."
    return [problem("KTC022", str(root), found, next_step=step)]


def _way_on(place: Path, other: Sequence[str], noted: set[str]) -> str:
    """Return the next step if a checkpoint's run differs in ``other``."""
    if {*other} <= noted:
        return f"Go on with resume_from_checkpoint=true, or {_ANEW}."
    if _PROCESSES in other and {*other} <= noted | {_PROCESSES, *_ROWS_OF_A_STEP}:
        return (
            "Start as many processes as the checkpoint's run had; or (but for kto) keep the rows of a step: "
            f"processes x {' x '.join(_ROWS_OF_A_STEP)}; or {_ANEW}."
        )
    if any(key.startswith(_OF_ADAPTERS) for key in other):
        return f"Restore these settings, or {_ANEW}."
    return f"{_from_weights(place)}; or restore these settings; or {_ANEW}."


def _from_weights(place: Path) -> str:
    """Return the next step of a new run that begins with a checkpoint's weights."""
    return (
        f"Train on from its weights, with a new optimizer and schedule: adapter_name_or_path={place} "
        "resume_from_checkpoint=false and another output_dir"
    )


def _no_checkpoint(place: Path) -> KtbridgeError:
    step = "Name a checkpoint-N directory, or set resume_from_checkpoint: true for the last one."
    if found := saved(place):
        step = f"Name one in it: resume_from_checkpoint={found[-1]}."
    elif all((place / name).is_file() for name in _ADAPTER_FILES):
        step = f"It is an adapter. {_from_weights(place)}."
    return KtbridgeError(f"{place} is not a checkpoint of `ktbridge train`.", step)


def _step_rows(run: RunFingerprint) -> int:
    """Return the rows of an optimizer step of all processes."""
    return math.prod(int(str(run.get(key, 1))) for key in (_PROCESSES, *_ROWS_OF_A_STEP))


def _changed(place: Path, key: str, theirs: RunFingerprint, own: RunFingerprint) -> Problem:
    step = "Restore it if the run should end in the same bits as one that was never stopped."
    if key in (_PROCESSES, *_ROWS_OF_A_STEP):
        step = "Each step has the same rows; losses agree but for rounding, and dropout draws other numbers."
    if key == HELD_OUT:
        step = "Evaluations from before are left out of the log, and none of those steps can be the best."
    if key in _LENGTH and _ENDLESS.isdisjoint({own.get("lr_scheduler_type")}):
        step = "The learning rate goes on by the schedule of the new length, so it may jump."
    return problem(
        "KTC011",
        f"{place}: {key}",
        f"{theirs.shown(key)} until here, {own.shown(key)} from here on",
        next_step=step,
    )


def decide_precision(config: TrainConfig, cuda: bool) -> tuple[TrainConfig, tuple[Problem, ...]]:
    """Return ``config`` with ``bf16`` true or false, and notes for the user.

    ``plan`` and ``train`` ask here. auto goes on in the dtype of the checkpoint that the run resumes; a new
    run takes bfloat16 on a GPU (``cuda``), on a CPU with BF16 instructions and with ``pure_bf16``, else
    float32: without such instructions torch converts each operand of a bfloat16 product.
    """
    fast = cuda or has_bf16_instructions()
    if config.bf16 != "auto":
        slow = config.bf16 and not fast
        return config, (_slow("bf16"),) if slow else ()
    if config.pure_bf16:
        return replace(config, bf16=True), () if fast else (_slow("pure_bf16"),)
    before = next_record(config).get("bf16")
    if isinstance(before, bool):
        found = f"auto: {_DTYPES[before]} outside the experts, as the checkpoint's run has it"
        note = problem("KTC029", "bf16", found, f"{_DTYPES[fast]} in a new run here")
        return replace(config, bf16=before), () if before is fast else (note,)
    note = problem(
        "KTC027", "bf16", "auto: float32 outside the experts, as this CPU has no BF16 instructions"
    )
    return replace(config, bf16=fast), () if fast else (note,)


def _slow(key: str) -> Problem:
    return problem("KTC028", key, "true, and this CPU has no BF16 instructions: torch emulates them", "auto")
