"""The engine's log: written with the API key redacted, shown in readable form, searched for the last error.

Causes are one table; the patterns match the engines' own messages (sglang-kt 0.6.3 to 0.7.2, kt-kernel).
"""

from __future__ import annotations

import re
import signal
import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

from ktbridge.adapter.engines import install_engine

_KEPT = 4000  # lines: a traceback of eight ranks, and what led to it
_LONGEST = 1 << 16  # bytes of one line that are kept; progress bars end in no newline
_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_STAMP = re.compile(r"^\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[^\]]*\]\s*")
# Noise: traceback frames, the code they quote, progress bars.
_NOISE = re.compile(r"^\s*(File \"|\^+|~+|Traceback \(|During handling|The above exception)|\d+%\|")


class Pump:
    """A thread that moves a pipe's lines into a log file, and shows each to ``on_line`` first.

    ``secret`` is redacted (asterisks) in what is written and kept. Ends with the pipe.
    """

    def __init__(
        self, pipe: BinaryIO, path: Path, on_line: Callable[[bytes], None], secret: str | None
    ) -> None:
        self._pipe, self._on_line = pipe, on_line
        self._secrets = _redacted_forms(secret)
        self._lines: deque[str] = deque(maxlen=_KEPT)
        self._lock = threading.Lock()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "wb", buffering=0)  # noqa: SIM115 (closed by the thread)
        self._thread = threading.Thread(target=self._run, name="engine log", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        reach = max(map(len, self._secrets), default=1) - 1
        held = b""  # the end of a piece of a long line: a secret may begin there
        with self._pipe, self._file:
            while line := self._pipe.readline(_LONGEST):
                self._on_line(line)
                line = held + line
                for secret in self._secrets:
                    line = line.replace(secret, b"***")
                cut = len(line) if line.endswith(b"\n") else max(len(line) - reach, 0)
                line, held = line[:cut], line[cut:]
                self._keep(line)
            self._keep(held)

    def _keep(self, line: bytes) -> None:
        if line:
            self._file.write(line)
            with self._lock:
                self._lines.append(line.decode("utf-8", "replace"))

    def lines(self) -> list[str]:
        """The last lines, oldest first."""
        with self._lock:
            return list(self._lines)

    def join(self, seconds: float) -> None:
        """Wait until the pipe is closed, so that the last lines are there."""
        self._thread.join(seconds)


def _redacted_forms(secret: str | None) -> list[bytes]:
    """The forms of a secret to redact: as it is and as Python's repr writes it."""
    if not secret:
        return []
    forms = {secret, repr(secret)[1:-1]}
    return sorted((form.encode() for form in forms), key=len, reverse=True)


def clean(line: str) -> str:
    """A line without ANSI colors, timestamp, and text that a progress bar has overwritten."""
    text = _ANSI.sub("", line.rstrip("\r\n").rpartition("\r")[2])
    return _STAMP.sub("", text).rstrip()


def readable(lines: Sequence[str], count: int) -> list[str]:
    """The last ``count`` lines worth reading: no frames, no bars, no line twice in a row."""
    kept: list[str] = []
    quoted = False
    for line in lines:
        text = clean(line)
        frame = text.lstrip().startswith('File "')
        if text and not quoted and not _NOISE.search(text) and text not in kept[-1:]:
            kept.append(text if len(text) <= 300 else text[:297] + "...")
        quoted = frame  # the line after a frame is its code
    return kept[-count:]


_ERROR = re.compile(
    r"^(?:[A-Za-z_][\w.]*\.)?[A-Z]\w*(?:Error|Exception|Failure|Refused)\b(?::|$)"
    r"|^[\w.]+: error: |\bNo module named\b|^(?:RuntimeError|AssertionError)\b"
    r"|^Illegal instruction|^Killed$"
)
# Errors that only follow from the failure of another process.
_ECHO = re.compile(r"EOFError|BrokenPipeError|ConnectionResetError|[Ss]igquit|scheduler (?:died|is dead)")


class Cause(NamedTuple):
    """``pattern`` is searched in an error line."""

    pattern: str
    cause: str
    remedy: str


CAUSES = (
    Cause(r"unrecognized arguments: .*--kt-expert-lora-path", "this version has no expert LoRA",
          install_engine()),
    Cause(r"unrecognized arguments: .*--kt-", "the engine that runs is SGLang without KTransformers",
          f"{install_engine()}, and name its interpreter with --engine-python"),
    Cause(r"unrecognized arguments", "this version doesn't know a flag",
          "look at the flags after --; `ktbridge serve --dry-run` prints the whole command"),
    Cause(r"[Ee]xplicit --kt-expert-lora-path cannot be combined",
          "the engine is 0.7.0.post4 or newer, and its contract is the merged one",
          "serve with --layout merged"),
    Cause(r"raw KT training adapter|still compact",
          "a raw training directory was passed as a serving one",
          "pass it as --adapter NAME=DIR, so that it is converted"),
    Cause(r"Missing KT expert LoRA tensor", "the adapter lacks an expert or a layer that the model has",
          "ktbridge validate ADAPTER --base-model MODEL"),
    Cause(r"KT expert LoRA (?:rank|shape) mismatch",
          "the adapter was trained on another model, or with another rank than in its config",
          "ktbridge validate ADAPTER --base-model MODEL"),
    Cause(r"get_hidden_dim not implemented for",
          "this version can't size the LoRA of a module, a router for instance",
          f"{install_engine()}, or train without that module"),
    Cause(r"SFT-compatible KT methods", "this --kt-method takes no expert LoRA",
          "leave --kt-method out: the one that fits the checkpoint is chosen"),
    Cause(r"[Ee]xpert LoRA requires a clamp-aware|swiglu_alpha|Only SiLU",
          "the experts' activation has no LoRA kernel", "serve with --engine local"),
    Cause(r"max-running-requests >= 2", "expert LoRA needs room for two requests",
          "leave --max-running-requests out, or raise it"),
    Cause(r"only compatible with NGRAM", "LoRA goes with NGRAM speculation only",
          "leave --speculative-algorithm out"),
    Cause(r"kt-num-gpu-experts 0", "expert LoRA is applied by the CPU experts only",
          "leave --kt-num-gpu-experts and --kt-gpu-experts-ratio out"),
    Cause(r"AMX SFT (?:backend|method)|get_fp8_runtime|no native FP8 checkpoint|MXFP4 SFT build",
          "the kt-kernel that is installed has no LoRA kernel for this method on this CPU",
          "install the kt-kernel of the engine's own version; `ktbridge doctor` shows the CPU's ISA"),
    Cause(r"numa_count|threadpool_count",
          "converted expert weights are cut for another number of thread pools",
          "give that number after --: -- --kt-threadpool-count N"),
    Cause(r"[Nn]on-empty safetensors index|block_size=\(128, 128\)|per-expert HF checkpoint",
          "the method doesn't read expert weights stored this way",
          "name another method after --: -- --kt-method BF16"),
    Cause(r"CUDA out of memory|OutOfMemoryError|Not enough memory",
          "the GPU is too small for weights and cache at these settings",
          "raise --tp-size, or pass -- --mem-fraction-static 0.8 --context-length 8192"),
    Cause(r"[Aa]ddress already in use", "another program took the port meanwhile",
          "choose another with --port"),
    Cause(r"No CUDA GPUs|no NVIDIA driver|CUDA driver version|CUDA error: no kernel image",
          "torch and the GPU's driver don't go together, or no GPU is visible",
          "check nvidia-smi, CUDA_VISIBLE_DEVICES and the torch build of the engine's environment"),
    Cause(r"No module named '?(?:kt_kernel|kt_kernel_ext|sgl_kernel|flashinfer)",
          "the engine's environment is incomplete", f"{install_engine()} in it"),
    Cause(r"No module named", "the engine's environment is incomplete",
          "install what it misses there"),
    Cause(r"trust_remote_code", "the model brings its own Python code",
          "read it, then pass --trust-remote-code"),
    Cause(r"lora.*not supported|[Uu]nsupported (?:LoRA|target)|not support LoRA",
          "the engine has no LoRA for one of the adapted modules",
          "ktbridge validate ADAPTER --base-model MODEL --engine sglang-kt==VERSION"),
    Cause(r"[Dd]ist(?:Network|Store)Error|init_process_group|timed out.*(?:store|rendezvous)",
          "the nodes did not find each other",
          "start every node with the same --dist-init-addr, and let the port through"),
)  # fmt: skip

_SIGNALS = {
    signal.SIGILL: (
        "the CPU lacks an instruction that kt-kernel's build uses",
        "`ktbridge doctor` shows the CPU's ISA; set KT_KERNEL_CPU_VARIANT for an older build",
    ),
    signal.SIGKILL: (
        "the kernel killed it, most likely because the memory ran out",
        "look at `dmesg`; use a machine with more RAM",
    ),
    signal.SIGSEGV: ("the engine crashed in native code", "report it with the log"),
}


class FailureCause(NamedTuple):
    """``error`` is the engine's own message; ``cause`` and ``remedy`` are "" when not in the table."""

    error: str
    cause: str
    remedy: str


def explain_failure(lines: Sequence[str], code: int | None) -> FailureCause:
    """Diagnose a failure from the log and the exit code (negative: a signal, None: still running)."""
    errors = [text for text in map(clean, lines) if _ERROR.search(text)]
    own_errors = [text for text in errors if not _ECHO.search(text)]
    for text in reversed(own_errors):
        for row in CAUSES:
            if re.search(row.pattern, text):
                return FailureCause(text, row.cause, row.remedy)
    error = (own_errors or errors or [""])[-1]
    if code is not None and code < 0 and -code in _SIGNALS:
        cause, remedy = _SIGNALS[signal.Signals(-code)]
        return FailureCause(error, cause, remedy)
    return FailureCause(error, "", "")
