"""A base whose shard shrinks under a running server."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import subprocess
from pathlib import Path

from tinyserver import ENVIRONMENT, cli, read_document


def test_a_shard_truncated_under_a_server_ends_it_with_a_sentence(
    base: Path, tmp_path: Path
) -> None:
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
