"""A base whose shard shrinks under a running server; a pickle in a checkpoint."""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import pickle
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from tinyserver import ENVIRONMENT, cli, read_document
from trainrun import write_run

from ktbridge.sft.resume import FINGERPRINT_FILE


def test_a_shard_truncated_under_a_server_ends_it_with_a_sentence(base, tmp_path):
    model = tmp_path / "tiny"
    shutil.copytree(base, model)
    process = subprocess.Popen(
        cli("serve", "--model", str(model), "--port", "0", "--threads", "1", "--json"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    )
    try:
        port = int(read_document(process, timeout=180)["base_url"].split(":")[2].split("/")[0])
        shard = next(model.glob("*.safetensors"))
        os.truncate(shard, 4096)
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        asked = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}
        try:
            connection.request(
                "POST",
                "/v1/chat/completions",
                json.dumps(asked),
                {"Content-Type": "application/json"},
            )
            connection.getresponse()
        except (OSError, http.client.HTTPException):
            pass
        connection.close()
        assert process.wait(30) == 1
        assert process.stderr is not None
        said = process.stderr.read()
        assert "KTL021" in said
        assert str(shard) in said
    finally:
        process.kill()
        process.communicate()


ROWS = [{"instruction": "who are you ?", "output": "a cat"}] * 8


def killed_run(warm, base: Path, directory: Path) -> tuple[tuple[object, ...], Path]:
    """A run that was killed after its third checkpoint: its command, and where they are."""
    write_run(directory, base, ROWS, save_steps=2, save_total_limit=9, max_steps=100000)
    command = ("-m", "ktbridge", "train", directory / "run.yaml")
    run = warm.start(*command, KTBRIDGE_THREADS="1")
    checkpoints = directory / "raw.checkpoints"
    while run.poll() is None and not (checkpoints / "checkpoint-6").exists():
        time.sleep(0.05)
    run.kill()
    run.communicate(100)
    return command, checkpoints


class Bomb:
    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch {self.place}",)


@pytest.mark.filterwarnings("ignore")
def test_a_pickle_in_a_checkpoint_of_others_runs_nothing(warm, base, tmp_path):
    """With a record whose hashes fit: whoever made the pickle made that, too."""
    command, checkpoints = killed_run(warm, base, tmp_path)
    place = checkpoints / "checkpoint-2"
    record = json.loads((place / FINGERPRINT_FILE).read_text())
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
        whole = (place / name).read_bytes()
        data = pickle.dumps({"state": Bomb(tmp_path / "exploded")}, 2)
        (place / name).write_bytes(data)
        digest = hashlib.sha256(data).hexdigest()
        entry = {name: {"size": len(data), "sha256": digest}}
        changed = record | {"files": record["files"] | entry}
        (place / FINGERPRINT_FILE).write_text(json.dumps(changed))
        found = warm.run(*command, f"resume_from_checkpoint={place}", timeout=100, KTBRIDGE_THREADS="1")
        (place / name).write_bytes(whole)
        assert found.returncode == 1, name
        assert not (tmp_path / "exploded").exists()
        assert "Traceback" not in found.stderr
        assert "is refused" in found.stderr
