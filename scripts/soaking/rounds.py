"""Commands that are run again and again beside the server: evaluations, and training that is killed."""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Any

from soaking import clients, misbehaving
from tinyserver import ENVIRONMENT, cli

HUNG_SECONDS = 900
"""A command that takes as long doesn't come to an end."""
MOST_FAULTS = 20
"""After so many no more rounds of a kind are begun."""
EVAL_TIMEOUT = 10  # seconds for an answer
KEY = "soak-secret-0123456789abcdef"
ARTIFACTS = ("adapter_model.safetensors", "fused_expert_lora.safetensors")
STEPS = 40


@dataclass
class Ended:
    """A command that has ended; ``peak_mb`` is its largest memory, in MB of 10^6 bytes, itself alone."""

    code: int
    seconds: float
    peak_mb: float
    said: str


def run(
    words: Sequence[str],
    kill_when: Callable[[float], bool] = lambda seconds: False,
    **environment: str,
) -> Ended:
    """Run ``ktbridge`` WORDS to its end, or to SIGKILL when ``kill_when`` (seconds so far) says so."""
    began, peak = time.monotonic(), 0.0
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            cli(*words), stdout=said, stderr=said, env=ENVIRONMENT | environment
        )
        try:
            while process.poll() is None:
                passed = time.monotonic() - began
                if kill_when(passed):
                    process.send_signal(signal.SIGKILL)
                elif passed > HUNG_SECONDS:
                    process.send_signal(signal.SIGABRT)
                peak = max(peak, _peak_mb(process.pid))
                time.sleep(0.02)
        finally:
            process.kill()
            process.wait()
        said.seek(0)
        text = said.read().decode("utf-8", "replace")
    return Ended(process.returncode, time.monotonic() - began, peak, text)


def _peak_mb(pid: int) -> float:
    """A process's VmHWM; what wait4 gives begins at its parent's memory."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) * 1024 / 1e6
    except (OSError, IndexError):  # it has just ended
        return 0.0


@dataclass
class Rounds:
    """What came of one kind of round."""

    done: int = 0
    items: int = 0
    seconds: list[float] = field(default_factory=list)
    peak_mb: list[float] = field(default_factory=list)
    kills: int = 0
    faults: list[str] = field(default_factory=list)

    def note(self, ended: Ended, wanted: int, what: str) -> None:
        """Keep what ``ended`` took; a fault unless it ended with ``wanted`` and without a traceback."""
        self.seconds.append(round(ended.seconds, 1))
        self.peak_mb.append(round(ended.peak_mb))
        if ended.code != wanted or "Traceback" in ended.said:
            last = " / ".join(ended.said.strip().splitlines()[-4:])
            self.faults.append(f"{what} ended with {ended.code} instead of {wanted}: {last[-600:]}")


@contextmanager
def repeated(round_of: Callable[[int], None], rounds: Rounds) -> Iterator[None]:
    """Rounds in a thread while the block runs; the one under way at its end is finished."""
    end = threading.Event()

    def work() -> None:
        for number in itertools.count():
            if end.is_set() or len(rounds.faults) > MOST_FAULTS:
                return
            try:
                round_of(number)
            except Exception as error:  # told in the report instead of ending in silence
                rounds.faults.append(f"round {number}: {type(error).__name__}: {error}")

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()


# --- evaluations


def write_items(path: Path, tokens: Mapping[str, int]) -> Path:
    """Prompts with their answers' limits in tokens."""
    rows = [
        {"id": f"item-{n}", "prompt": prompt, "answer": "x", "max_tokens": limit}
        for n, (prompt, limit) in enumerate(tokens.items())
    ]
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), "utf-8")
    return path


class Evaluations:
    """Rounds of `ktbridge eval`: against the misbehaving server and the same one behaving, and against
    the server under attack."""

    def __init__(
        self,
        scratch: Path,
        bad_url: str,
        mode: Synchronized[int],
        url: str,
        lengths: Mapping[str, int],
    ) -> None:
        self._scratch = scratch / "evaluations"
        self._scratch.mkdir()
        self._mode = mode
        self._kinds = misbehaving.prompts()
        lows = {
            p: min(lengths.get(f"{arm}: {p}", 0) for arm in clients.ARMS) for p in clients.PROMPTS
        }
        bad = write_items(scratch / "bad.jsonl", dict.fromkeys(self._kinds, 64))
        real = write_items(scratch / "real.jsonl", {p: low for p, low in lows.items() if low})
        self._bad = ["--items", str(bad), "--arm", f"base={misbehaving.MODEL}@{bad_url}/v1"]
        self._real = ["--items", str(real), "--concurrency", "4"]
        for name, arm in zip(("base", "full"), clients.ARMS, strict=True):
            self._real += ["--arm", f"{name}={arm}@{url}"]
        self.misbehaving, self.real = Rounds(), Rounds()
        self._first: dict[str, tuple[object, object]] = {}

    def quiet(self) -> None:
        """A run against each server, both behaving."""
        self._mode.value = misbehaving.WELL
        self._whole(self.misbehaving, "misbehaving", self._ask(self._bad, "misbehaving"), 0)
        shutil.rmtree(self._scratch / "misbehaving")
        self._real_run()

    def round(self, number: int) -> None:
        """A run that the server spoils, the same command once it behaves, and a run beside the attacks."""
        gone = number % 3 == 2
        self._mode.value = misbehaving.GONE if gone else misbehaving.BADLY
        ended = self._ask(self._bad, "misbehaving")
        self.misbehaving.note(ended, 1, "an evaluation of a misbehaving server")
        if gone and "stopped answering" not in ended.said:
            self.misbehaving.faults.append("a server that is gone isn't told")
        elif not gone:
            self._compare_outcomes()
        self._mode.value = misbehaving.WELL
        self._whole(self.misbehaving, "misbehaving", self._ask(self._bad, "misbehaving"), 0)
        for path in (self._scratch / "misbehaving").rglob("*"):
            if path.is_file() and KEY.encode() in path.read_bytes():
                self.misbehaving.faults.append(f"the API key is in {path.name}")
        shutil.rmtree(self._scratch / "misbehaving")
        self._real_run()
        self.misbehaving.done += 1

    def _ask(self, words: list[str], name: str) -> Ended:
        out = ["--output", str(self._scratch / name), "--timeout", str(EVAL_TIMEOUT)]
        command = ["eval", "--bench", "generic", "--no-judge", *words, *out]
        ended = run(command, KTBRIDGE_API_KEY=KEY)
        if KEY in ended.said:
            self.misbehaving.faults.append("the API key is in the command's output")
        return ended

    def _real_run(self) -> None:
        # All its answers are cut, which a report counts as an error.
        self._whole(self.real, "attacked", self._ask(self._real, "attacked"), 1)
        shutil.rmtree(self._scratch / "attacked")
        self.real.done += 1

    def _whole(self, rounds: Rounds, name: str, ended: Ended, code: int) -> None:
        """Compare exit code, answers and results with those of the first time."""
        what = f"an evaluation of the {name} server"
        rounds.note(ended, code, what)
        if ended.code != code:
            return
        results = json.loads((self._scratch / name / "results.json").read_bytes())
        results.pop("date")  # a run may go past midnight
        records = self._records(name)
        answers = {key: (one["outcome"], one["text"]) for key, one in records.items()}
        rounds.items += len(answers)
        first = self._first.setdefault(name, (answers, results))
        if answers != first[0]:
            changed = [key for key in answers if answers[key] != first[0].get(key)]  # type: ignore[attr-defined]
            rounds.faults.append(f"{what}: other answers than at first to {changed[:5]}")
        elif results != first[1]:
            rounds.faults.append(f"{what}: other results than at first")

    def _records(self, name: str) -> dict[str, Any]:
        """The last record of each item and arm."""
        lines = (self._scratch / name / "answers.jsonl").read_text("utf-8").splitlines()
        return {f"{one['arm']} {one['item']}": one for one in map(json.loads, lines)}

    def _compare_outcomes(self) -> None:
        records = self._records("misbehaving")
        for number, prompt in enumerate(self._kinds):
            wanted = misbehaving.EXPECTED[misbehaving.kind_of(prompt)]
            record = records.get(f"base item-{number}", {})
            found = (record.get("outcome"), record.get("status"))
            if found != wanted[:2] or wanted.detail not in record.get("detail", ""):
                self.misbehaving.faults.append(
                    f"{prompt}: {found} {str(record.get('detail'))[:200]!r} instead of {tuple(wanted)}"
                )
        self.misbehaving.items += len(self._kinds)


# --- training


class Training:
    """`ktbridge train` of ``directory``/run.yaml on the CPU, killed and begun again."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._config = str(directory / "run.yaml")
        self._output = directory / "raw"
        self._checkpoints = directory / "raw.checkpoints"
        self._draw = random.Random(0)
        self.rounds = Rounds()
        self._whole: dict[str, str] = {}
        self._usual = 20.0  # seconds of a run that nothing interrupts

    def whole(self) -> dict[str, str]:
        """A run that nothing interrupts: what every other must end in."""
        output = self._directory / "whole"
        ended = self._train(f"output_dir={output}", "save_steps=0")
        self.rounds.note(ended, 0, "an uninterrupted run")
        self._usual = ended.seconds
        self._whole = self._hashes(output)
        return self._whole

    def round(self, number: int) -> None:
        """Killed at any moment, killed soon after it has saved another checkpoint, then let be."""
        moment = self._draw.uniform(0.5, 0.9 * self._usual)
        self._killed(lambda seconds: seconds > moment)
        before, late = self._saved(), self._draw.uniform(0, 0.5)
        seen: list[float] = []

        def after_another(seconds: float) -> bool:
            if not seen and self._saved() - before:
                seen.append(seconds)
            return bool(seen) and seconds > seen[0] + late

        self._killed(after_another)
        if not self._output.exists():
            self.rounds.note(self._train(), 0, "a run that went on")
        found = self._hashes(self._output)
        if found != self._whole:
            self.rounds.faults.append(f"round {number} ended in {found} instead of {self._whole}")
        self.rounds.faults += [
            f"round {number} left {path.name}" for path in self._directory.rglob(".partial-*")
        ]
        for path in (self._output, self._checkpoints):
            shutil.rmtree(path, ignore_errors=True)
        self.rounds.done += 1
        self.rounds.items += 1

    def _killed(self, moment: Callable[[float], bool]) -> None:
        if self._output.exists():  # the one before had ended first
            return
        ended = self._train(kill_when=moment)
        if ended.code == -signal.SIGKILL:
            self.rounds.kills += 1
        else:
            self.rounds.note(ended, 0, "a run that ended before it was killed")

    def _saved(self) -> set[str]:
        try:
            return {name for name in os.listdir(self._checkpoints) if name[0] != "."}
        except FileNotFoundError:
            return set()

    def _train(self, *overrides: str, kill_when: Callable[[float], bool] | None = None) -> Ended:
        words = ["train", self._config, f"output_dir={self._output}", *overrides]
        return run(words, kill_when or (lambda seconds: False), KTBRIDGE_THREADS="1")

    def _hashes(self, output: Path) -> dict[str, str]:
        """SHA-256 of the adapter's files, and of the losses that its log has."""
        if not output.is_dir():
            return {}
        found = {name: sha256((output / name).read_bytes()).hexdigest() for name in ARTIFACTS}
        lines = (output / "trainer_log.jsonl").read_text().splitlines()
        losses = [(one["step"], one["loss"]) for one in map(json.loads, lines)]
        return found | {"losses": sha256(json.dumps(losses).encode()).hexdigest()}
