"""Fuzz everything that reads files, requests or replies until time is up; say how much was tried and found.

    python scripts/fuzz_readers.py --seconds 300 [--target NAME …] [--engine auto|atheris|random] [--seed 0]
    python scripts/fuzz_readers.py --seconds 300 --corpus DIR    # DIR/NAME grows, for the next run
    python scripts/fuzz_readers.py --merge DIR                   # the best of it goes into tests/fuzz/corpus

The targets are those of tests/fuzz/targets.py, one process after another. With atheris
(``pip install atheris``) coverage guides the damage; without it, or with ``--engine random``, the damage
is of the same kinds, at random. A finding is anything but success or one KtbridgeError in one sentence,
within five seconds and 300 MB: it is printed, its input is kept in the corpus, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
CORPUS = ROOT / "tests" / "fuzz" / "corpus"
LONGEST = 8192  # bytes of an input
NAMES = tuple("tensors adapter model directory gguf recipe bench run request reply".split())
"""The targets: importing the table itself before atheris would leave it without coverage."""


class Session:
    """One target: counts executions and keeps one example of each kind of finding."""

    def __init__(self, name: str, folder: Path, corpus: Path, engine: str, seconds: float) -> None:
        from fuzz import attacks, targets

        self.name, self.corpus, self.engine = name, corpus, engine
        self._check, self._late = targets.check, attacks.Late
        self.target = targets.TARGETS[name](folder / name)
        for data in self.target.seeds:  # imports take their time: not that of the first input
            self.target.read(data)
        self.started = time.monotonic()
        self.end = self.started + seconds
        self.outcomes: Counter[str] = Counter()
        self.findings: Counter[str] = Counter()

    def once(self, data: bytes) -> None:
        try:
            self.outcomes[self._check(self.target, data)] += 1
        except (Exception, self._late) as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            name = f"{type(error).__name__} at {Path(place.filename).name}:{place.lineno}"
            self.findings[name] += 1
            if self.findings[name] == 1:
                self.corpus.mkdir(parents=True, exist_ok=True)
                kept = self.corpus / f"found-{hashlib.sha1(data).hexdigest()[:12]}"
                kept.write_bytes(data)
                print(
                    f"finding: {self.name}: {name}\n    {error!s:.300}\n    input: {kept}",
                    file=sys.stderr,
                    flush=True,
                )

    def report(self) -> int:
        seconds = time.monotonic() - self.started
        total = sum(self.outcomes.values()) + sum(self.findings.values())
        for name, count in sorted(self.outcomes.items()):
            print(f"{count:12,}  {name}")
        print(
            f"{self.name}: {self.engine}: {total:,} executions in {seconds:.0f} s, "
            f"{total / seconds:,.0f} a second, {len(self.findings)} findings",
            flush=True,
        )
        return 1 if self.findings else 0


def known(*places: Path) -> list[bytes]:
    """The inputs that are kept in ``places``."""
    files = [path for place in places if place.is_dir() for path in sorted(place.iterdir())]
    return [path.read_bytes() for path in files if path.is_file()]


def run_random(session: Session, seed: int, kept: Path) -> int:
    rng = random.Random(seed)
    corpus = [*session.target.seeds, *known(kept, session.corpus)]
    while time.monotonic() < session.end:
        with suppress(Exception):  # what is damaged already may be no document any more
            session.once(session.target.mutate(rng.choice(corpus), rng)[:LONGEST])
    return session.report()


def run_atheris(session_of: Callable[[], Session], folder: Path, flags: list[str]) -> int:
    """Coverage-guided, in this process. libFuzzer ends a process its own way, so we do it first."""
    import atheris

    # An editable install's import hook hands out uninstrumented code, and then nothing is guided.
    sys.meta_path[:] = [hook for hook in sys.meta_path if "Editable" not in repr(hook)
                        and "ScikitBuild" not in type(hook).__name__]  # fmt: skip
    with atheris.instrument_imports(include=["ktbridge", "yaml", "gguf"]):
        session = session_of()
    session.corpus.mkdir(parents=True, exist_ok=True)
    for number, data in enumerate(session.target.seeds):
        (session.corpus / f"seed-{number}").write_bytes(data)

    def once(data: bytes) -> None:
        session.once(data)
        if time.monotonic() >= session.end:
            code = session.report()
            shutil.rmtree(folder, ignore_errors=True)
            os._exit(code)

    def mutate(data: bytes, most: int, seed: int) -> bytes:
        """Half by format, half as libFuzzer does, which knows what was compared with what."""
        rng = random.Random(seed)
        if rng.random() < 0.5:
            with suppress(Exception):  # what is damaged already may be no document any more
                return session.target.mutate(data, rng)[:most]
        return bytes(atheris.Mutate(data, most))

    atheris.Setup(flags, once, custom_mutator=mutate)
    atheris.Fuzz()
    return 1


def fuzz(name: str, options: argparse.Namespace, seconds: float) -> int:
    """One target in this process. ``options.flags``: libFuzzer's, of a merge's own processes."""
    place = "/dev/shm" if Path("/dev/shm").is_dir() else None  # millions of small files are written
    with tempfile.TemporaryDirectory(prefix="ktbridge-fuzz-", dir=place) as folder:
        corpus, kept = (options.corpus or Path(folder, "corpus")) / name, CORPUS / name
        session_of = partial(Session, name, Path(folder), corpus, options.engine, seconds)
        if options.engine == "random":
            return run_random(session_of(), options.seed, kept)
        flags = options.flags
        if not flags:
            corpus.mkdir(parents=True, exist_ok=True)
            flags = [sys.argv[0], f"-seed={options.seed + 1}", f"-max_len={LONGEST}", str(corpus)]
            flags += [str(kept)] if kept.is_dir() else []
        common = ["-verbosity=0", "-timeout=0", "-rss_limit_mb=4096"]
        return run_atheris(session_of, Path(folder), [flags[0], *common, *flags[1:]])


def merge(name: str, grown: Path) -> int:
    """Add to the kept corpus the inputs in ``grown`` that reach what none of it reaches, and all findings."""
    kept = CORPUS / name
    kept.mkdir(parents=True, exist_ok=True)
    for path in grown.glob("found-*"):
        shutil.copy(path, kept / path.name)
    with tempfile.TemporaryDirectory() as folder:
        # libFuzzer merges in processes of its own, which it starts by argv[0].
        again = Path(folder, "fuzz")
        own = shlex.join(
            [sys.executable, __file__, "--engine", "atheris", "--target", name, "--seconds", "1e9"]
        )
        again.write_text(f'#!/bin/sh\nexec {own} --libfuzzer "$0" "$@"\n')
        again.chmod(0o755)
        return subprocess.run([again, "-merge=1", f"-max_len={LONGEST}", kept, grown]).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60, help="of each target")
    parser.add_argument("--target", action="append", metavar="NAME", help="leave it out for all of them")
    parser.add_argument("--engine", choices=("auto", "atheris", "random"), default="auto")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--corpus", type=Path, help="keep what was reached there, for the next run")
    parser.add_argument(
        "--merge", type=Path, metavar="DIR", help="add the best of --corpus DIR to the tests' own"
    )
    parser.add_argument("--libfuzzer", dest="flags", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    options = parser.parse_args()
    names = options.target or NAMES
    if options.merge:
        return max(merge(name, options.merge / name) for name in names if (options.merge / name).is_dir())
    if options.engine == "auto":
        found = subprocess.run([sys.executable, "-c", "import atheris"], capture_output=True)
        options.engine = "random" if found.returncode else "atheris"
        if options.engine == "random":
            print("atheris is not installed: random damage without coverage", file=sys.stderr)
    if len(names) == 1:
        return fuzz(names[0], options, options.seconds)
    # A process each: coverage is counted from a target's own imports on.
    arguments = [sys.executable, __file__, *sys.argv[1:]]
    return max(subprocess.run([*arguments, "--target", name]).returncode for name in names)


if __name__ == "__main__":
    sys.exit(main())
