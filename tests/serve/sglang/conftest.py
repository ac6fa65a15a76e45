"""A model and adapters made without torch, facts written down, and a small program that plays the engine."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rawadapter import write_config, write_raw
from tensorfiles import write_tensor_file
from tinyserver import read_document

from ktbridge.adapter import convert_adapter
from ktbridge.model import Tensor

HIDDEN, INNER, EXPERTS, LAYERS = 16, 8, 3, 2

# Played by a process of its own, so that what is watched and ended is real: a port, a log, a child
# that left its session. It parses its flags with a parser of its own, as the engine does.
VALUES = """--kt-weight-path --kt-method --kt-cpuinfer --kt-threadpool-count --kt-num-gpu-experts
--kt-expert-lora-path --lora-backend --max-loras-per-batch --max-running-requests --host --port
--served-model-name --log-level --api-key --config""".split()
PARSER = (
    "def add_cli_args(parser):\n"
    + "".join(f'    parser.add_argument(\n        "{name}",\n        type=str,\n    )\n' for name in VALUES)
    + """    parser.add_argument("--model-path", "--model", type=str)
    parser.add_argument("--kt-numa-nodes", nargs="+")
    parser.add_argument("--lora-paths", nargs="*", default=[])
    parser.add_argument("--enable-lora", action="store_true")
    parser.add_argument("--disable-cuda-graph", action="store_true")
"""
)
ENGINE = '''
import argparse, http.server, json, os, signal, subprocess, sys, time
from sglang.srt.server_args import add_cli_args

mode, scratch = os.environ.get("PLAYED", ""), os.environ["PLAYED_SCRATCH"]
parser = argparse.ArgumentParser(prog="launch_server.py")
add_cli_args(parser)
args = parser.parse_args()
if args.config:
    with open(args.config) as file:
        args.api_key = json.loads(file.read().partition(": ")[2])
print(f"[2026-11-21 10:00:00] server_args=ServerArgs(api_key={args.api_key!r}, port={args.port})", flush=True)
with open(scratch + "/seen.json", "w") as file:
    json.dump({"argv": sys.argv, "key": args.api_key, "environment": dict(os.environ)}, file)
# A scheduler: deaf to SIGTERM, in a session of its own, and holding a port as the real ones do.
child = subprocess.Popen([sys.executable, "-c", """
import os, signal, socket, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.setsid()
listener = socket.create_server(("127.0.0.1", 0))
open(sys.argv[1], "w").write(f"{os.getpid()} {listener.getsockname()[1]}")
time.sleep(600)
""", scratch + "/child"])
while not os.path.exists(scratch + "/child") or not open(scratch + "/child").read():
    time.sleep(0.01)
if mode == "orphans":  # in a session of its own, without a variable, its parent gone
    subprocess.run([sys.executable, "-c", """
import os, signal, subprocess, sys
code = "import os, signal, sys, time; signal.signal(15, signal.SIG_IGN);"
code += "print(os.getpid(), file=open(sys.argv[1], 'w'), flush=True); time.sleep(600)"
subprocess.Popen([sys.executable, "-c", code, sys.argv[1]], start_new_session=True, env={})
""", scratch + "/orphan"])

def stop(number, frame):
    if mode != "stubborn":
        child.kill()
        sys.exit(0)

signal.signal(signal.SIGTERM, stop)
signal.signal(signal.SIGINT, signal.SIG_IGN)
path = args.kt_expert_lora_path or args.lora_paths[0].partition("=")[2]
for layer in range(2):
    if mode == "dies" and layer == 1:
        print("Traceback (most recent call last):\\n  File \\"wrapper.py\\", line 1, in load\\n    boom()")
        print("KeyError: 'Missing KT expert LoRA tensor for layer=1, expert=0, proj=gate_proj'")
        print("[2026-11-21 10:00:01] Received sigquit from a child process.\\nEOFError", flush=True)
        os._exit(3)
    if mode != "swallows":
        print(f"[2026-11-21 10:00:01 TP0] Loaded KT expert LoRA for layer {layer} from {path}", flush=True)
if mode == "waits":
    print("Loading: 10%|#", end="\\r", flush=True)
    time.sleep(600)

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        known = not args.api_key or self.headers["Authorization"] == f"Bearer {args.api_key}"
        if self.path == "/health" or (self.path == "/v1/models" and known):
            names = [args.served_model_name] + [p.partition("=")[0] for p in args.lora_paths]
            body = json.dumps({"data": [{"id": name} for name in names]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
        elif self.path == "/crash":
            print("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", flush=True)
            os._exit(9)
        else:
            self.send_error(401)
    def log_message(self, *_):
        pass

http.server.ThreadingHTTPServer((args.host, int(args.port)), Handler).serve_forever()
'''


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = write_config(tmp_path_factory.mktemp("models") / "tiny", num_hidden_layers=LAYERS, head_dim=6)
    shapes = {"model.embed_tokens.weight": (8, HIDDEN)}
    for layer in range(LAYERS):
        for name, rows in (("q_proj", 24), ("v_proj", 12)):
            shapes[f"model.layers.{layer}.self_attn.{name}.weight"] = (rows, HIDDEN)
        for expert in range(EXPERTS):
            prefix = f"model.layers.{layer}.mlp.experts.{expert}"
            shapes |= {f"{prefix}.{name}_proj.weight": (INNER, HIDDEN) for name in ("gate", "up")}
            shapes[f"{prefix}.down_proj.weight"] = (HIDDEN, INNER)
    tensors = [Tensor(n, "BF16", s, bytes(2 * s[0] * s[1])) for n, s in sorted(shapes.items())]
    write_tensor_file(directory / "model.safetensors", tensors, {"format": "pt"})
    return directory


@pytest.fixture(scope="session")
def adapters(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same adapter in each layout: raw, expert, nonexpert, merged."""
    root = tmp_path_factory.mktemp("adapters")
    modules = {"q_proj": (24, HIDDEN), "v_proj": (12, HIDDEN)}
    raw = write_raw(root / "raw", layers=(0, 1), modules=modules, base_model=str(model))
    made = {name: root / name for name in ("expert", "nonexpert", "merged")}
    convert_adapter(raw, **{f"{name}_output_dir": path for name, path in made.items()})
    return {"raw": raw, **made}


class Played:
    """Environments with an engine in them, and `ktbridge serve` processes that use it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.processes: list[subprocess.Popen[str]] = []
        tools = root / "tools"
        tools.mkdir()
        smi = tools / "nvidia-smi"
        smi.write_text("#!/bin/sh\necho '0, A GPU, 9.0, 81559'\n")
        smi.chmod(0o755)

    def environment(self, version: str, mode: str = "", kernel: str | None = None) -> dict[str, str]:
        site = self.root / f"site-{version}-{kernel}"
        if not site.exists():
            (site / "sglang/srt").mkdir(parents=True)
            (site / "sglang/__init__.py").touch()
            (site / "sglang/srt/__init__.py").touch()
            (site / "sglang/srt/server_args.py").write_text(PARSER)
            (site / "sglang/launch_server.py").write_text(ENGINE)
            for name, number in (("sglang_kt", version), ("kt_kernel", kernel or version)):
                info = site / f"{name}-{number}.dist-info"
                info.mkdir()
                metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {number}\n"
                (info / "METADATA").write_text(metadata)
        scratch = self.root / f"scratch-{len(list(self.root.iterdir()))}"
        scratch.mkdir()
        return {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, (str(site), os.environ.get("PYTHONPATH")))),
            "PATH": f"{self.root / 'tools'}:{os.environ['PATH']}",
            "PLAYED": mode,
            "PLAYED_SCRATCH": str(scratch),
            "XDG_CACHE_HOME": str(self.root / "cache"),
            "XDG_STATE_HOME": str(self.root / "state"),
            "XDG_RUNTIME_DIR": str(scratch),
            "COLUMNS": "200",
        }

    def begin(self, *args: Any, env: dict[str, str]) -> subprocess.Popen[str]:
        words = "-m ktbridge serve --engine sglang --allow KTB958".split()
        process = subprocess.Popen(
            [sys.executable, *words, *map(str, args)],
            env=env,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self.processes.append(process)
        return process

    def run(self, *args: Any, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
        process = self.begin(*args, env=env)
        out, err = process.communicate(timeout=60)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def ready(self, process: subprocess.Popen[str]) -> dict[str, Any]:
        """The JSON document that `--json` prints when the server is ready."""
        document = read_document(process, timeout=60)
        assert document["ok"], (document["error"], document["problems"])
        return document

    def end(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            process.wait(10)
            for stream in (process.stdout, process.stderr):
                if stream is not None:
                    stream.close()


@pytest.fixture
def played(tmp_path: Path) -> Iterator[Played]:
    played = Played(tmp_path)
    yield played
    played.end()


@pytest.fixture
def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


@pytest.fixture
def gone() -> Callable[[dict[str, str], int], None]:
    """Assert that nothing of a played engine is left: not its child, not either port."""

    def check(env: dict[str, str], port: int) -> None:
        pid, held = map(int, (Path(env["PLAYED_SCRATCH"]) / "child").read_text().split())
        assert not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text()
        for number in (port, held):
            with socket.create_server(("127.0.0.1", number)):
                pass
        assert not list(Path(env["XDG_RUNTIME_DIR"]).glob("ktbridge-*"))

    return check
