"""The demo's plan: one directory, and the commands a user would type in it, in order.

Nothing here prints: ``ktbridge.cli.demo`` does. The commands are the real ones, run as
separate processes, so what the demo shows is what a user gets.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ktbridge import __version__
from ktbridge.adapter import validate_adapter
from ktbridge.errors import KtbridgeError, UsageError, has_errors
from ktbridge.publish import write_text
from ktbridge.served_names import adapter_name, base_name

SERVED, ADAPTER = "tiny", "neko"
ARMS = {"base": base_name(SERVED), "expert": SERVED, "full": adapter_name(SERVED, ADAPTER)}
STATE = ".ktbridge-demo.json"

CONFIG = """\
# A LoRA fine-tune with LLaMA-Factory's field names. Paths are relative to this file.
model_name_or_path: base
dataset: neko.jsonl
output_dir: adapter/raw

stage: sft
finetuning_type: lora
lora_rank: 16
lora_alpha: 16
lora_target: all          # every linear module outside the experts; the experts have LoRA of their own
cutoff_len: 160

per_device_train_batch_size: 16
learning_rate: 4.0e-3
lr_scheduler_type: cosine
warmup_ratio: 0.05
max_steps: 450
logging_steps: 5
bf16: false               # non-expert weights in float32: faster and finer on most CPUs
seed: 7
"""


@dataclass(frozen=True)
class Step:
    """One command of the loop: its purpose, and the command line."""

    title: str
    why: str
    command: str

    @property
    def argv(self) -> list[str]:
        """The command as this interpreter runs it; no argument contains a space."""
        return [sys.executable, "-m", *self.command.split()]


TRAIN = Step(
    "Train",
    "Routed experts on our C++ kernels, attention by PEFT, the trainer of trl.",
    "ktbridge train demo.yaml",
)
CONVERT = Step(
    "Convert",
    "The two artifacts of training become the directories that engines load.",
    "ktbridge convert adapter/raw --expert-output-dir adapter/expert"
    " --nonexpert-output-dir adapter/nonexpert --merged-output-dir adapter/merged --overwrite",
)
VALIDATE = Step(
    "Validate",
    "What an engine would load without complaint and compute wrongly is an error here.",
    "ktbridge validate adapter/raw adapter/expert adapter/nonexpert adapter/merged --base-model base",
)
SERVE = Step(
    "Serve",
    "An OpenAI-compatible server in a process of its own, here on loopback.",
    f"ktbridge serve --base-model base --expert-adapter adapter/expert"
    f" --nonexpert-adapter {ADAPTER}=adapter/nonexpert --served-model-name {SERVED} --port 0",
)


def verify_step(url: str) -> Step:
    return Step(
        "Verify",
        "Served logprobs against references computed without our kernels: did each half take effect?",
        f"ktbridge verify --server {url} --model {SERVED}:{ADAPTER} --adapter adapter/raw"
        " --base-model base",
    )


def eval_step(url: str) -> Step:
    arms = " ".join(f"--arm {name}={model}@{url}" for name, model in ARMS.items())
    return Step(
        "Eval",
        "The same questions to three arms; no prompt mentions the persona.",
        f"ktbridge eval --bench nekobench --limit 84 {arms} --output eval",
    )


def prepare(directory: Path) -> None:
    """Make (or reopen) the demo directory.

    Raises ``UsageError`` when it holds something that isn't a demo of ours: nothing there is touched.
    """
    if directory.exists() and not directory.is_dir():
        raise UsageError(f"{directory} is a file.", "Give another --output.")
    if directory.is_dir() and any(directory.iterdir()) and not (directory / STATE).is_file():
        raise UsageError(
            f"{directory} is not empty and was not made by `ktbridge demo`.",
            "Give another --output.",
        )
    directory.mkdir(parents=True, exist_ok=True)
    if not (directory / STATE).is_file():
        _write_state(directory, {})


def provide(directory: Path, name: str, text: str) -> None:
    """Write one of the demo's inputs, unless the user has changed it since we wrote it."""
    path, state = directory / name, _read_state(directory)
    if path.exists() and _sha256(path.read_bytes()) != state.get(name):
        return
    write_text(path, text)
    _write_state(directory, {**state, name: _sha256(text.encode())})


def training_digest(directory: Path) -> str:
    """Digest of the adapter's inputs: configuration, rows, the base's record and our version."""
    inputs = ("demo.yaml", "neko.jsonl", "base/ktbridge_demo.json")
    return _sha256(
        json.dumps(
            [__version__, *(_sha256((directory / name).read_bytes()) for name in inputs)]
        ).encode()
    )


def trained_digest(directory: Path) -> str | None:
    """The digest the finished adapter was trained with, or None when there is no finished one."""
    try:
        whole = not has_errors(
            validate_adapter([directory / "adapter/raw"], structure_only=True).problems
        )
    except KtbridgeError:
        whole = False
    return _read_state(directory).get("trained") if whole else None


def record_training(directory: Path, digest: str) -> None:
    _write_state(directory, {**_read_state(directory), "trained": digest})


def _read_state(directory: Path) -> dict[str, str]:
    """The recorded state; empty if the file is damaged, so that everything is made again."""
    try:
        state = json.loads((directory / STATE).read_text(encoding="utf-8"))
    except ValueError:
        return {}
    return state if isinstance(state, dict) else {}


def _write_state(directory: Path, state: dict[str, str]) -> None:
    write_text(
        directory / STATE, json.dumps({"made_by": "ktbridge demo", **state}, indent=1) + "\n"
    )


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def run(step: Step, directory: Path) -> None:
    """Run a command in the demo directory, with inherited stdout and stderr.

    Raises ``KtbridgeError`` if it fails; the command itself has printed the reason.
    """
    code = subprocess.call(step.argv, cwd=directory)
    if code != 0:
        raise KtbridgeError(
            f"`{step.command}` ended with exit code {code}.",
            f"cd {directory} and run it again with --debug.",
        )


@contextmanager
def served(step: Step, directory: Path) -> Iterator[str]:
    """Start the server, yield its URL once it is ready, and stop it.

    Raises ``KtbridgeError`` with the log's last lines if it exits before it is ready.
    """
    log = directory / "serve.log"
    with (
        open(log, "w") as output,
        subprocess.Popen(
            step.argv, cwd=directory, stdout=output, stderr=subprocess.STDOUT
        ) as server,
    ):
        try:
            yield _ready_url(server, log)
        finally:
            server.terminate()
            try:
                server.wait(15)
            except subprocess.TimeoutExpired:
                server.kill()


def _ready_url(server: subprocess.Popen[bytes], log: Path) -> str:
    """Wait for the line that `ktbridge serve` prints once every arm has answered."""
    while True:
        ended = server.poll() is not None
        lines = log.read_text(errors="replace").splitlines()
        for line in lines:
            if line.startswith("ready: "):
                return line.removeprefix("ready: ").strip()
        if ended:
            tail = " | ".join(lines[-3:])
            raise KtbridgeError(f"the server ended before it was ready: {tail}", f"See {log}.")
        time.sleep(0.1)
