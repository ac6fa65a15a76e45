"""`ktbridge serve`, `eval` and `train` under attack and fault, for SECONDS.

    python scripts/soak.py SECONDS OUTPUT_DIR

One server gets good, malformed, cancelled, hostile and slow requests from clients in a process of their
own; beside it, one after another, `ktbridge eval` asks a server that misbehaves, and the one under attack,
and `ktbridge train` is killed and begun again. Answers, results and adapters must be those of before the
attack, during and after it; memory and descriptors of all that lives long must be flat after the first
fifth. Writes soak.json and the page soak.md; exits with 1 where a line of it fell short.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from soaking import clients, misbehaving, page, watching
from soaking.rounds import STEPS, Evaluations, Rounds, Training, repeated
from tinyserver import ENVIRONMENT, cli, read_document

SPAWN = multiprocessing.get_context("spawn")
LET_GO_SECONDS = 13  # clients have left, and what they sent is let go


def prepare(scratch: Path) -> None:
    """The models, an adapter and a training run; in a process of its own, since it imports torch."""
    from tinymoe import tiny_model, tiny_tokenizer
    from tinyserver import save_adapter, save_model
    from trainrun import WORDS, conversation, write_run

    served = save_model(scratch / "tiny", seed=0)
    save_adapter(scratch / "neko", served)
    base = scratch / "base"
    tiny_model().save_pretrained(base)
    tiny_tokenizer().save_pretrained(base)
    rows = []
    for number in range(40):
        words = [WORDS[(number * step) % len(WORDS)] for step in range(1, 9)]
        rows.append(conversation(" ".join(words[:4]), " ".join(words[4:])))
    (scratch / "train").mkdir()
    rows_path = scratch / "train" / "rows.jsonl"
    write_run(
        scratch / "train", base, rows, dataset=str(rows_path),
        lora_dropout=0.1, learning_rate=1e-2, per_device_train_batch_size=2,
        gradient_accumulation_steps=2, max_steps=STEPS, save_steps=2,
    )  # fmt: skip


@contextmanager
def child(target: Callable[..., None], *given: object) -> Iterator[tuple[int, Connection]]:
    """A process that runs ``target`` (GIVEN, pipe) until something comes through it: its id, our end."""
    ours, theirs = SPAWN.Pipe()
    process = SPAWN.Process(target=target, args=(*given, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        yield process.pid or 0, ours
    finally:
        ours.close()
        process.join(30)
        process.kill()


@contextmanager
def serving(scratch: Path, log: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`ktbridge serve` of the tiny model with its adapter, and its URL."""
    adapter = f"neko={scratch / 'neko'}"
    options = ("--served-model-name", "tiny", "--port", "0", "--threads", "1", "--json")
    words = cli("serve", "--model", str(scratch / "tiny"), "--adapter", adapter, *options)
    with log.open("wb") as written:
        process = subprocess.Popen(
            words, stdout=subprocess.PIPE, stderr=written, text=True, env=ENVIRONMENT
        )
    try:
        yield process, read_document(process, timeout=300)["base_url"]
    finally:
        process.kill()
        process.wait()


def port_of(url: str) -> int:
    return int(url.split(":")[2].split("/")[0])


class Progress:
    """A line on stderr: over and over on a terminal, else one a minute."""

    def __init__(self, seconds: float, *rounds: Rounds) -> None:
        self._seconds, self._rounds = seconds, rounds
        self._next = 0.0
        self._terminal = sys.stderr.isatty()

    def __call__(self, passed: float) -> None:
        if passed < self._next:
            return
        self._next = passed + (1 if self._terminal else 60)
        faults = sum(len(one.faults) for one in self._rounds)
        done = ", ".join(
            f"{one.done} {name}"
            for name, one in zip(("evaluations", "trainings"), self._rounds, strict=True)
        )
        text = (
            f"{passed:.0f} of {self._seconds:.0f} s, {self._seconds - passed:.0f} s and a few minutes to go; "
            f"{done}, {faults} faults in them; load {os.getloadavg()[0]:.1f}"
        )
        print(
            f"\r{text}\033[K" if self._terminal else text,
            end="" if self._terminal else "\n",
            file=sys.stderr,
            flush=True,
        )


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def soak(seconds: float, scratch: Path) -> dict[str, Any]:
    """Everything that was found."""
    began = time.time()
    load_before = os.getloadavg()[0]
    say("making models ...")
    making = SPAWN.Process(target=prepare, args=(scratch,))
    making.start()
    making.join()
    if making.exitcode:
        raise RuntimeError("the models could not be made; see the lines above")
    mode = SPAWN.Value("i", misbehaving.WELL)
    log = scratch / "server.log"
    with (
        child(misbehaving.run, mode) as (bad_pid, bad),
        child(misbehaving.run, SPAWN.Value("i", misbehaving.WELL)) as (_, plain),
        serving(scratch, log) as (server, url),
    ):
        say("before the attack: asking each server ...")
        port, bad_url, plain_url = port_of(url), bad.recv(), plain.recv()
        lengths = clients.clear_lengths(port)
        expected = clients.answers(port, lengths)
        evaluations = Evaluations(scratch, bad_url, mode, url, lengths)
        evaluations.quiet()
        say("before the attack: training without interruption ...")
        training = Training(scratch / "train")
        adapter = training.whole()
        idle, log_before = watching.sample(server.pid, 0), log.stat().st_size
        with child(clients.run, port, lengths, expected) as (clients_pid, asking):
            asking.recv()
            pids = {"ktbridge serve": server.pid, "this script": os.getpid()}
            pids |= {"its clients": clients_pid, "its misbehaving server": bad_pid}
            watch = watching.Watch(port, port_of(plain_url), pids)
            with (
                repeated(evaluations.round, evaluations.misbehaving),
                repeated(training.round, training.rounds),
            ):
                watch.run(seconds, Progress(seconds, evaluations.misbehaving, training.rounds))
                say("ending the rounds under way ...")
            asking.send("end")
            counts, wrong = asking.recv()
        say("after the attack: asking each server once more ...")
        time.sleep(LET_GO_SECONDS)
        after = {}
        try:
            after = clients.answers(port, lengths)
        except (OSError, RuntimeError) as error:
            watch.faults.append(f"afterwards: {error}")
        evaluations.quiet()
        rest = None if server.poll() is not None else watching.sample(server.pid, seconds)
        log_bytes = log.stat().st_size - log_before
        stopping = time.monotonic()
        server.terminate()
        code, stopped = server.wait(120), time.monotonic() - stopping
    return {
        "began": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(began)),
        "seconds": round(time.time() - began),
        "seconds under attack": seconds,
        "load": [load_before, *watch.load, os.getloadavg()[0]],
        "watch": watch,
        "requests": counts,
        "wrong": wrong,
        "expected": expected,
        "after": after,
        "evaluations": evaluations.misbehaving,
        "attacked evaluations": evaluations.real,
        "training": training.rounds,
        "adapter": adapter,
        "descriptors": [one and one["descriptors"] for one in (idle, rest)],
        "log bytes": log_bytes,
        "log's end": log.read_bytes()[-2000:].decode("utf-8", "replace"),
        "sigterm": [code, round(stopped, 2)],
    }


def main() -> int:
    seconds, output = float(sys.argv[1]), Path(sys.argv[2])
    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        found = soak(seconds, Path(scratch))
    return page.write(found, output)


if __name__ == "__main__":
    sys.exit(main())
