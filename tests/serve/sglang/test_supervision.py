"""`ktbridge serve --engine sglang` with a program that plays the engine: up, wrong, stuck, and gone."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
from click.testing import CliRunner
from waiting import is_alive, wait_for

from ktbridge.cli import main
from ktbridge.serve.sglang.processes import Tree, adopt_orphans, end_leftovers
from ktbridge.serve.sglang.supervise import GRACE_SECONDS

KEY = "a-secret_4711"


def log_of(env: dict[str, str]) -> str:
    logs = sorted(Path(env["XDG_STATE_HOME"]).rglob("*.log"))
    return logs[-1].read_text()


def seen(env: dict[str, str]) -> dict:
    return json.loads((Path(env["PLAYED_SCRATCH"]) / "seen.json").read_text())


@pytest.fixture
def expert_args(model, adapters, free_port):
    """Options of a server of the expert adapter."""
    return ("--model", model, "--expert-adapter", adapters["expert"], "--port", free_port)


@pytest.mark.quick(r"0\.7\.2")
@pytest.mark.parametrize("version", [pytest.param("0.6.4", marks=pytest.mark.slow), "0.7.2"])
def test_up_and_down(version, played, model, adapters, free_port, gone):
    """Converted, started, ready with the adapter, ended by SIGTERM; the key is nowhere to be read."""
    env = played.environment(version) | {"KTBRIDGE_API_KEY": KEY}
    adapter = ("--adapter", f"neko={adapters['raw']}")
    process = played.begin("--model", model, *adapter, "--port", free_port, "--json", env=env)
    ready = played.ready(process)
    merged = version == "0.7.2"
    assert ready["base_url"] == f"http://127.0.0.1:{free_port}/v1"
    assert (ready["layout"], "tiny" in ready["models"]) == (("merged", False) if merged else ("split", True))
    assert ready["ready"]["expert_lora_layers"] == [0, 1]
    # The engine got what was planned, plus a file with the key; that file is gone by now.
    argv, planned = seen(env)["argv"][1:], ready["launches"][0]["argv"][3:]
    assert argv[: len(planned)] == planned
    assert argv[len(planned)] == "--config"
    assert not Path(argv[-1]).exists()
    assert seen(env)["key"] == KEY
    assert KEY not in json.dumps([argv, seen(env)["environment"]])
    assert merged == ("SGLANG_KT_LORA_CACHE_DIR" in seen(env)["environment"])
    served = Path(planned[planned.index("--lora-paths") + 1].partition("=")[2])
    assert (served / "kt_adapter_manifest.json").is_file()

    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0
    gone(env, free_port)
    said = process.stderr.read()
    assert KEY not in said + json.dumps(ready) + log_of(env)
    assert "api_key='***'" in log_of(env)
    assert "expert LoRA loaded in 2 of 2 layers" in said


FAILED_STARTS = {
    # Its own last error rather than the echo of it, the cause, the remedy, the log; no frames.
    "dies": ("--merged-adapter neko={merged}", 3, ("exit code 3", "lacks an expert or a layer",
             "its last error: KeyError: 'Missing KT expert LoRA tensor for layer=1",
             "ktbridge validate", "the whole log is")),
    "waits": ("--expert-adapter {expert} --timeout 2", 1, ("not ready after 2 s: /health does not answer",)),
    # /health alone is no proof: this one would serve the base under the adapter's name.
    "swallows": ("--expert-adapter {expert}", 1,
                 ("has not loaded the adapter: 2 of 2 layers never logged",)),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("mode", FAILED_STARTS)
def test_what_never_gets_ready_is_ended_and_told(played, model, adapters, free_port, gone, mode):
    options, code, words = FAILED_STARTS[mode]
    env, start = played.environment("0.7.2", mode), time.monotonic()
    args = ("--model", model, "--port", free_port, *options.format(**adapters).split())
    done = played.run(*args, env=env)
    assert time.monotonic() - start < 40
    assert (done.returncode, done.stdout) == (code, ""), done.stderr
    assert [text for text in words if text not in done.stderr] == []
    assert "Traceback" not in done.stderr
    assert "wrapper.py" not in done.stderr
    assert ("wrapper.py" in log_of(env)) == (mode == "dies")
    gone(env, free_port)


@pytest.mark.slow
def test_deaf_to_sigterm(played, expert_args, free_port, gone):
    """A second signal takes the patience away; Ctrl-C does the same as SIGTERM."""
    env = played.environment("0.6.4", "stubborn")
    process = played.begin(*expert_args, "--json", env=env)
    played.ready(process)
    child = (Path(env["PLAYED_SCRATCH"]) / "child").read_text().split()[0]
    start = time.monotonic()
    process.send_signal(signal.SIGINT)
    time.sleep(2)
    assert process.poll() is None
    while Path(f"/proc/{child}").exists():  # two that come at once on a busy machine count as one
        process.send_signal(signal.SIGTERM)
        time.sleep(1)
        # Without the second signal it would have the whole grace time.
        assert time.monotonic() - start < GRACE_SECONDS
    assert process.wait(20) == 128 + signal.SIGKILL
    gone(env, free_port)


def test_interrupted_while_loading(played, expert_args, free_port, gone, monkeypatch):
    """The command in this process, which gets SIGTERM once its engine loads."""
    env, over = played.environment("0.7.2", "waits"), threading.Event()
    for name, value in env.items():
        monkeypatch.setenv(name, value)

    def interrupt() -> None:
        while not (Path(env["PLAYED_SCRATCH"]) / "child").exists() and not over.wait(0.02):
            pass
        if not over.is_set():
            os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=interrupt)
    thread.start()
    words = ["serve", "--engine", "sglang", "--allow", "KTB958", *map(str, expert_args)]
    done = CliRunner().invoke(main, words)
    over.set()
    thread.join()
    assert done.exit_code in (0, 128 + signal.SIGTERM), done.output
    assert "Traceback" not in done.output
    gone(env, free_port)


@pytest.mark.slow
def test_crashes_while_serving(played, expert_args, free_port, gone):
    env = played.environment("0.7.2")
    process = played.begin(*expert_args, "--json", env=env)
    played.ready(process)
    connection = http.client.HTTPConnection("127.0.0.1", free_port, timeout=10)
    connection.request("GET", "/crash")
    with pytest.raises((http.client.HTTPException, OSError)):
        connection.getresponse()
    connection.close()
    assert process.wait(20) == 9
    said = process.stderr.read()
    assert "while it was serving" in said
    assert "the GPU is too small" in said
    gone(env, free_port)


@pytest.mark.slow
def test_we_are_killed(played, expert_args, free_port):
    """SIGKILL leaves us no chance to end anything: the engine hears of it from the kernel."""
    env = played.environment("0.7.2")
    process = played.begin(*expert_args, "--json", env=env)
    played.ready(process)
    process.kill()
    process.wait(10)

    def is_free() -> bool:
        with suppress(OSError), socket.create_server(("127.0.0.1", free_port)):
            return True
        return False

    wait_for(is_free)


def test_all_problems_at_once(played, model, adapters):
    """A busy port, a public address, a bad name, a wrong flag, an unknown flag: one refusal."""
    env = played.environment("0.7.2", kernel="0.7.0")
    with socket.create_server(("0.0.0.0", 0)) as listener:
        port = listener.getsockname()[1]
        args = ("--model", model, "--adapter", f"neko={adapters['raw']}", "--host", "0.0.0.0")
        flags = ("--", "--kt-num-gpu-experts", "4", "--max-runing-requests", "8", "--api-key", "x")
        names = ("--served-model-name", "a:b", "--port", port)
        done = played.run(*args, *names, *flags, env=env)
    assert done.returncode == 1
    for code, words in {
        "KTB953": "--kt-num-gpu-experts 4",
        "KTB954": "did you mean --max-running-requests?",
        "KTB955": "is already in use",
        "KTB961": "no API key is set",
        "KTB962": "is 0.7.0, beside sglang-kt 0.7.2",
        "KTB963": "a:b",
    }.items():
        assert code in done.stderr, done.stderr
        assert words in done.stderr, done.stderr
    assert not (Path(env["PLAYED_SCRATCH"]) / "seen.json").exists()


@pytest.mark.slow
def test_requests_that_make_no_sense(model):
    for words, said in (
        (("--allow", "KTB101"), "no launch problem has this code"),
        (("--engine-version", "0.6.4"), "add --dry-run"),
    ):
        args = ["serve", "--engine", "sglang", "--model", str(model), *words]
        done = CliRunner().invoke(main, args)
        assert (done.exit_code, done.stdout) == (2, "")
        assert said in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_outlives_ktbridge_or_the_next_start(played, expert_args, free_port, gone, number):
    """The key is in no file, and the next start ends and names what -9 left, an orphan too."""
    env = played.environment("0.7.2", "orphans") | {"KTBRIDGE_API_KEY": KEY}
    scratch = Path(env["PLAYED_SCRATCH"])
    args = (*expert_args, "--json")
    process = played.begin(*args, env=env)
    wait_for(lambda: (scratch / "orphan").exists() and (scratch / "orphan").read_text())
    orphan = int((scratch / "orphan").read_text())
    seen = json.loads((scratch / "seen.json").read_text())
    assert seen["key"] == KEY
    if number == signal.SIGKILL:
        wait_for(lambda: any(str(orphan) in each.read_text() for each in scratch.glob("*/engine.json")))
    process.send_signal(number)
    process.wait(20)
    for directory, _, files in os.walk(scratch):
        for name in files:
            place = Path(directory) / name
            assert name == "seen.json" or not place.exists() or KEY not in place.read_text()
    if number == signal.SIGKILL:
        assert is_alive(orphan)
        again = played.begin(*args, env=env | {"PLAYED": ""})
        played.ready(again)
        assert not is_alive(orphan)
        again.send_signal(signal.SIGTERM)
        assert again.wait(20) == 0
        said = again.stderr.read()
        assert "KTB964" in said
        assert str(orphan) in said
    wait_for(lambda: not is_alive(orphan))
    gone(env, free_port)


def test_a_record_that_cannot_be_read_is_not_taken_for_nothing_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    left = tmp_path / "ktbridge-left"
    left.mkdir(mode=0o700)
    (left / "engine.json").write_text("{")
    (told,) = end_leftovers()
    assert told.code == "KTB964"
    assert "processes of that engine may be left" in told.found
    assert not left.exists()


HEADLESS = """
import ctypes, threading, time
threading.Thread(target=time.sleep, args=(60,)).start()
print("up", flush=True)
ctypes.CDLL(None).pthread_exit(None)
"""


def test_a_process_counts_until_its_last_thread_is_gone() -> None:
    """Its first thread is a zombie while others may still hold the GPU."""
    with subprocess.Popen(
        [sys.executable, "-c", HEADLESS], stdout=subprocess.PIPE, start_new_session=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        wait_for(lambda: not is_alive(process.pid))
        assert Tree(process.pid, "no mark").members() == {process.pid}
        assert Tree(process.pid, "no mark").end(grace=0.0) == set()
        assert process.wait(20) < 0


ORPHAN = """
import subprocess, sys
print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]).pid, flush=True)
"""


def test_orphans_are_buried() -> None:
    """As in a container whose first process reaps nothing: what the engine left is reaped by us."""
    adopt_orphans()
    with subprocess.Popen(
        [sys.executable, "-c", ORPHAN], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        orphan = int(process.stdout.readline())
        process.wait(20)
        os.kill(orphan, signal.SIGKILL)

        def is_buried() -> bool:
            Tree(process.pid, "no mark").reap(set())
            return not Path(f"/proc/{orphan}").exists()

        wait_for(is_buried)
