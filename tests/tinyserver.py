"""A tiny random Qwen3-MoE, raw adapters for it, and real servers in processes of their own."""

from __future__ import annotations

import http.client
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
from click.testing import CliRunner, Result
from warm import Process, WarmPython

from ktbridge.adapter import Tensor, write_raw_adapter
from ktbridge.cli import main

LAYERS, HIDDEN, INNER, EXPERTS = 2, 64, 32, 8  # tinymoe's
RANK, ALPHA = 4, 8
TEXTS = [
    "The cat sleeps on the warm stone. How are you today? I am fine, thank you.",
    "今天天气很好，我们去公园散步吧。你喜欢吃苹果吗？我很喜欢。",
    "user system assistant answer question yes no maybe",
]
ASCII = [*map(chr, range(33, 127)), "Ġ", "Ċ"]
"""Tokenizers of these alone have no parts of characters."""
TEMPLATE = (
    "{% if mood is defined %}<|im_start|>system\n{{ mood }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}"
    "{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('the system message comes first') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def save_tokenizer(directory: Path, alphabet: Sequence[str] | None = None):
    """A byte-level tokenizer of TEXTS, with a chat template; ``alphabet``: the letters that it has."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=specials,
        initial_alphabet=alphabet or pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        **({"limit_alphabet": len(alphabet)} if alphabet else {}),
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=TEMPLATE,
    )
    fast.save_pretrained(directory)
    return fast


def save_model(directory: Path, seed: int, alphabet: Sequence[str] | None = None) -> Path:
    import torch
    from tinymoe import tiny_config
    from transformers import Qwen3MoeForCausalLM

    fast = save_tokenizer(directory, alphabet)
    torch.manual_seed(seed)
    config = tiny_config(
        vocab_size=len(fast),
        max_position_embeddings=512,
        initializer_range=0.12,
        tie_word_embeddings=False,
        eos_token_id=fast.eos_token_id,
        bos_token_id=None,
        pad_token_id=fast.pad_token_id,
    )
    Qwen3MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)
    return directory


def save_adapter(
    directory: Path, base: Path, *, expert: bool = True, nonexpert: bool = True,
    strength: float = 0.3, hidden: int = HIDDEN, seed: int = 7,
) -> Path:  # fmt: skip
    """A raw adapter of ``base``, which it doesn't look at; ``strength`` 0 is the zero-B control."""
    import torch

    generator = torch.Generator().manual_seed(seed)

    def draw(key: str, *shape: int, scale: float) -> dict[str, Tensor]:
        values = (torch.randn(*shape, generator=generator) * scale).to(torch.bfloat16)
        return {key: Tensor(key, "BF16", shape, values.view(torch.int16).numpy().tobytes())}

    fused: dict[str, Tensor] = {}
    plain: dict[str, Tensor] = {}
    for layer in range(LAYERS):
        sizes = {"gate": (hidden, INNER), "up": (hidden, INNER), "down": (INNER, hidden)}
        for name, (inputs, outputs) in sizes.items():
            key = f"layers.{layer}.experts.{name}_lora_"
            fused |= draw(key + "a", EXPERTS, RANK, inputs, scale=inputs**-0.5)
            fused |= draw(key + "b", EXPERTS, outputs, RANK, scale=strength)
        sizes = {"q_proj": (hidden, 64), "v_proj": (hidden, 32), "o_proj": (64, hidden)}
        for name, (inputs, outputs) in sizes.items():
            key = f"base_model.model.model.layers.{layer}.self_attn.{name}.lora_"
            plain |= draw(key + "A.weight", RANK, inputs, scale=inputs**-0.5)
            plain |= draw(key + "B.weight", outputs, RANK, scale=strength)
    write_raw_adapter(
        directory,
        expert=fused if expert else {},
        nonexpert=plain if nonexpert else {},
        config={
            "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": ALPHA,
            "target_modules": ["q_proj", "v_proj", "o_proj"], "bias": "none", "lora_dropout": 0.0,
        },
        base_model=str(base),
        rank=RANK,
        alpha=ALPHA,
        fingerprint=False,  # whether it is this base's is for each test to find out
    )  # fmt: skip
    return directory


def cli(*args: str) -> list[str]:
    return [sys.executable, "-c", "from ktbridge.cli import main; main()", *args]


ENVIRONMENT = {key: value for key, value in os.environ.items() if key != "KTBRIDGE_API_KEY"} | {
    "OMP_NUM_THREADS": "1"
}


@pytest.fixture(scope="session")
def cli_command() -> Callable[..., list[str]]:
    return cli


@pytest.fixture(scope="session")
def cli_environment() -> dict[str, str]:
    return ENVIRONMENT


def read_document(process: subprocess.Popen[str], timeout: float) -> dict:
    """The JSON document on ``process``'s stdout; ``timeout`` is in seconds, for each line.

    The rest of stdout is read as well, so that the server never waits for a reader.
    """
    lines: queue.Queue[str] = queue.Queue()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.put(line)
        lines.put("")

    threading.Thread(target=read, daemon=True).start()
    text = ""
    while not text.endswith("\n}\n"):
        line = lines.get(timeout=timeout)
        assert line, f"the server ended before it was ready: {text}"
        text += line
    document: dict = json.loads(text)
    return document


@dataclass
class Server:
    """A running `ktbridge serve`; ``process`` is a Popen, or one of ``warm``'s."""

    process: Any
    url: str
    models: dict[str, str]

    @property
    def root(self) -> str:
        return self.url.removesuffix("/v1")

    @property
    def port(self) -> int:
        return int(self.root.rpartition(":")[2])

    def client(self, key: str = "unused") -> openai.OpenAI:
        return openai.OpenAI(base_url=self.url, api_key=key, max_retries=0, timeout=30)

    def stop(self, number: int = signal.SIGTERM) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(20)


def ready_document(process: Process, timeout: float = 180) -> dict:
    """The JSON document that a server says on stdout once it is ready; ``timeout`` is in seconds."""
    ends = time.monotonic() + timeout
    while not (said := process.said()).endswith("}\n"):
        assert process.poll() is None, process.communicate(5)
        assert time.monotonic() < ends
        time.sleep(0.02)
    document: dict = json.loads(said)
    return document


class Launcher:
    """Starts servers, by forks of a process that has imported all; those still alive end with the session."""

    def __init__(self, warm: WarmPython) -> None:
        self._warm = warm
        self._processes: list[Process] = []

    def begin(self, *args: object, **environment: str) -> Process:
        words = ("serve", "--port", "0", "--threads", "1", "--json", *args)
        process = self._warm.start("-m", "ktbridge", *words, OMP_NUM_THREADS="1", **environment)
        self._processes.append(process)
        return process

    def finish(self, process: Process) -> Server:
        """Wait for readiness."""
        ready = ready_document(process)
        return Server(process, ready["base_url"], ready["models"])

    def __call__(self, *args: object, **environment: str) -> Server:
        return self.finish(self.begin(*args, **environment))

    def end(self) -> None:
        for process in self._processes:
            process.kill()
            process.communicate(20)


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "tiny", seed=0)


@pytest.fixture(scope="session")
def other_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "other", seed=1)


@pytest.fixture(scope="session")
def make_adapter(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    root = tmp_path_factory.mktemp("adapters")

    def make(name: str, **options: object) -> Path:
        directory = root / name
        return directory if directory.exists() else save_adapter(directory, base, **options)

    return make


@pytest.fixture(scope="session")
def adapter(make_adapter: Callable[..., Path]) -> Path:
    return make_adapter("right")


@pytest.fixture(scope="session")
def launch(warm: WarmPython) -> Iterator[Launcher]:
    launcher = Launcher(warm)
    yield launcher
    launcher.end()


@pytest.fixture(scope="session")
def server(launch: Launcher, base: Path, adapter: Path) -> Server:
    return launch("--model", base, "--adapter", f"neko={adapter}", "--served-model-name", "tiny")


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with server.client() as client:
        yield client


@pytest.fixture(scope="session")
def begin_answer() -> Callable[..., socket.socket]:
    """Ask a server for a long answer on a bare socket, and leave it unread."""

    def begin(server: Server, *, stream: bool, **headers: str) -> socket.socket:
        asked = {
            "model": "tiny",
            "messages": [{"role": "user", "content": "hi"}],
            "max_tokens": 450,
        }
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
        body = json.dumps({**asked, "temperature": 0, "stream": stream})
        headers = {"Content-Type": "application/json", **headers}
        connection.request("POST", "/v1/chat/completions", body, headers)
        assert connection.sock
        return connection.sock

    return begin


@pytest.fixture(scope="session")
def run_cli() -> Callable[..., subprocess.CompletedProcess[str]]:
    def run(*args: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            cli(*args), capture_output=True, text=True, timeout=180, env=ENVIRONMENT | environment
        )

    return run


def run_verify(*args: object, **environment: str) -> Result:
    """`ktbridge verify` in this process, without a key unless one is given."""
    environment = {"KTBRIDGE_API_KEY": ""} | environment
    done = CliRunner().invoke(main, ["verify", *map(str, args)], env=environment)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exc_info
    return done
