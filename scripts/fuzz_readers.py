"""Fuzz everything that reads files or requests until time is up; say how much was tried and found.

    python scripts/fuzz_readers.py --seconds 300 [--engine auto|atheris|random] [--seed 0] [--corpus D]
    python scripts/fuzz_readers.py --seconds 300 --what requests

Of files two harnesses take turns, those of the suite (tests/fuzz/attacks.py): one safetensors file, read by
us and by the safetensors library, and a whole adapter with its base model, of which one file is
damaged. With atheris (``pip install atheris``) coverage guides the damage; without it, or with
``--engine random``, the same harnesses are fed random numbers. A finding is anything but success or
one KtbridgeError in one sentence within seconds: it is printed with the seed that repeats it, and
the exit code is 1.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))


class Session:
    """Counts executions and keeps one example of each kind of finding."""

    def __init__(self, folder: Path, seconds: float, engine: str) -> None:
        from fuzz import attacks

        self.attacks = attacks
        self.victim = attacks.Victim(folder)
        self.single = folder / "single.safetensors"
        self.tensor_file = self.victim.files[self.victim.adapter / "adapter_model.safetensors"]
        self.engine = engine
        self.started = time.monotonic()
        self.end = self.started + seconds
        self.outcomes: Counter[str] = Counter()
        self.findings: dict[str, str] = {}

    def request(self, seed: bytes) -> None:
        """One execution: a request whose damage ``seed`` repeats."""
        with self._finding(seed):
            body = self.attacks.mutate_request(random.Random(seed))
            self.outcomes[f"request {self.attacks.check_request(body)}"] += 1

    def once(self, data: bytes) -> None:
        """One execution: ``data`` is raw material for a file, and seeds structured damage."""
        rng = random.Random(data)
        choice = data[0] % 4 if data else 0
        with self._finding(data):
            if choice == 0:
                self._count("tensor file, raw: read by", data[1:])
            elif choice == 1:
                bad = self.attacks.mutate_tensor_file(self.tensor_file, rng)
                self._count("tensor file, structured: read by", bad)
            elif choice == 2 and len(data) > 2:
                path = list(self.victim.files)[data[1] % len(self.victim.files)]
                self.outcomes[f"directory, raw {path.name}"] += 1
                self.victim.try_with(path, data[2:])
            else:
                self.outcomes[f"directory, structured {self.victim.attack(rng)}"] += 1

    @contextmanager
    def _finding(self, data: bytes) -> Iterator[None]:
        try:
            yield
        except (Exception, self.attacks.Late) as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            name = f"{type(error).__name__} at {Path(place.filename).name}:{place.lineno}"
            if name not in self.findings:
                self.findings[name] = f"{error!s:.300}\n    input: {data[:200].hex()}"
                print(f"finding: {name}\n    {self.findings[name]}", file=sys.stderr, flush=True)

    def _count(self, kind: str, data: bytes) -> None:
        taken = self.attacks.check_tensor_file(self.single, data)
        self.outcomes[f"{kind} {taken}"] += 1

    def report(self) -> int:
        seconds = time.monotonic() - self.started
        total = sum(self.outcomes.values()) + len(self.findings)
        for name, count in sorted(self.outcomes.items()):
            print(f"{count:12,}  {name}")
        print(
            f"{self.engine}: {total:,} executions in {seconds:.0f} s, {total / seconds:,.0f} a second, "
            f"{len(self.findings)} findings",
            flush=True,
        )
        return 1 if self.findings else 0


def seeds(session: Session) -> list[bytes]:
    """A small corpus, made here: each file of the victim behind the bytes that choose it."""
    files = list(session.victim.files.items())
    corpus = [bytes([2, number]) + data for number, (_, data) in enumerate(files)]
    corpus += [b"\0" + data for path, data in files if path.suffix == ".safetensors"]
    return [*corpus, *(bytes([choice, 0]) for choice in range(4))]


def run_random(session: Session, seed: int) -> int:
    rng = random.Random(seed)
    corpus = seeds(session)
    while time.monotonic() < session.end:
        data = session.attacks.mutate_bytes(rng.choice(corpus), rng)
        session.once(data if rng.random() < 0.5 else bytes([rng.randrange(4)]) + rng.randbytes(12))
    return session.report()


def run_requests(session: Session, seed: int) -> int:
    """Bodies of requests, as the embedded server reads them. pydantic's core can't be instrumented."""
    rng = random.Random(seed)
    while time.monotonic() < session.end:
        session.request(rng.randbytes(8))
    return session.report()


def run_atheris(folder: Path, seconds: float, seed: int, corpus: Path) -> int:
    """Coverage-guided, in this process. libFuzzer ends a process its own way, so we do it first."""
    import atheris

    # An editable install's import hook hands out uninstrumented code, and then nothing is guided.
    sys.meta_path[:] = [hook for hook in sys.meta_path if "Editable" not in repr(hook)
                        and "ScikitBuild" not in type(hook).__name__]  # fmt: skip
    sys.path.insert(0, str(ROOT))
    with atheris.instrument_imports(include=["ktbridge.model", "ktbridge.adapter"]):
        session = Session(folder, seconds, "atheris")
    corpus.mkdir(parents=True, exist_ok=True)
    for number, data in enumerate(seeds(session)):
        (corpus / f"seed-{number}").write_bytes(data)

    def once(data: bytes) -> None:
        session.once(data)
        if time.monotonic() >= session.end:
            code = session.report()
            shutil.rmtree(folder, ignore_errors=True)
            os._exit(code)

    options = [
        f"-seed={seed + 1}",
        "-max_len=4096",
        "-verbosity=0",
        "-timeout=0",
        "-rss_limit_mb=2048",
    ]
    atheris.Setup([sys.argv[0], *options, str(corpus)], once)
    atheris.Fuzz()
    return 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--engine", choices=("auto", "atheris", "random"), default="auto")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--what", choices=("files", "requests"), default="files")
    parser.add_argument("--corpus", type=Path, help="keep atheris's corpus there, for the next run")
    options = parser.parse_args()
    engine = "random" if options.what == "requests" else options.engine
    if engine == "auto":
        found = subprocess.run([sys.executable, "-c", "import atheris"], capture_output=True)
        engine = "random" if found.returncode else "atheris"
        if engine == "random":
            print("atheris is not installed: random damage without coverage", file=sys.stderr)
    place = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(prefix="ktbridge-fuzz-", dir=place) as folder:
        if engine == "atheris":
            corpus = options.corpus or Path(folder, "corpus")
            return run_atheris(Path(folder), options.seconds, options.seed, corpus)
        session = Session(Path(folder), options.seconds, engine)
        if options.what == "requests":
            return run_requests(session, options.seed)
        return run_random(session, options.seed)


if __name__ == "__main__":
    sys.exit(main())
