"""`ktbridge serve` under mixed good, malformed, cancelled, hostile and slow requests, for SECONDS.

    python scripts/soak.py SECONDS OUTPUT_DIR

Writes soak.json and soak.md: counts by kind and status, memory, descriptors and threads over time, the
longest wait for /health. Fails (1) where an answer at temperature 0 changes, memory grows by more than 5 %
between the first fifth and the end, descriptors grow, or /health takes more than a second.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from tinyserver import ENVIRONMENT, cli, read_document, save_model

CLIENTS = 6
GOOD = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "temperature": 0}
HEAD = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
)
HOSTILE = (
    json.dumps(GOOD | {f"x{i}": 1 for i in range(20_000)}),
    '{"model":' + "[" * 5000 + "]" * 5000 + "}",
    json.dumps(GOOD | {"max_tokens": -1}),
    "not json",
)
BARE = (
    HEAD + b"Content-Length: 99999999999\r\n\r\n",
    HEAD + b"Transfer-Encoding: chunked\r\n\r\nFFFFFFFFFFFFFFFFF\r\n",
    b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * 20_000,
    b"\x00\xff" * 100,
)


class Soak:
    """One server, its clients, and what was seen."""

    def __init__(self, port: int, pid: int) -> None:
        self.port, self.pid = port, pid
        self.counts: Counter[str] = Counter()
        self.answers: Counter[str] = Counter()
        self.health: list[float] = []
        self.samples: list[dict[str, float]] = []
        self.end = threading.Event()

    def post(self, body: str) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            headers = {"Content-Type": "application/json"}
            connection.request("POST", "/v1/chat/completions", body, headers)
            reply = connection.getresponse()
            return reply.status, reply.read().decode()
        finally:
            connection.close()

    def good(self) -> None:
        status, text = self.post(json.dumps(GOOD | {"max_tokens": 16}))
        self.counts[f"good: {status}"] += 1
        if status == 200:
            self.answers[json.loads(text)["choices"][0]["message"]["content"]] += 1

    def hostile(self, draw: random.Random) -> None:
        status, _ = self.post(draw.choice(HOSTILE))
        self.counts[f"hostile: {status}"] += 1

    def bare(self, draw: random.Random) -> None:
        with socket.create_connection(("127.0.0.1", self.port), timeout=30) as connection:
            connection.sendall(draw.choice(BARE))
            told = connection.recv(4096)
        self.counts[f"bare: {told[9:12].decode('latin-1') or 'closed'}"] += 1

    def cancelled(self) -> None:
        body = json.dumps(GOOD | {"max_tokens": 400, "stream": True}).encode()
        with socket.create_connection(("127.0.0.1", self.port), timeout=30) as connection:
            connection.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            connection.recv(100)
        self.counts["cancelled"] += 1

    def slow(self, draw: random.Random) -> None:
        with socket.create_connection(("127.0.0.1", self.port), timeout=30) as connection:
            for byte in HEAD[: draw.randrange(1, 20)]:
                connection.sendall(bytes([byte]))
                time.sleep(0.05)
        self.counts["slow"] += 1

    def client(self, seed: int) -> None:
        draw = random.Random(seed)
        while not self.end.is_set():
            kind = draw.choice(("good", "good", "hostile", "bare", "cancelled", "slow"))
            try:
                if kind in ("good", "cancelled"):
                    getattr(self, kind)()
                else:
                    getattr(self, kind)(draw)
            except (OSError, http.client.HTTPException) as error:
                self.counts[f"{kind}: {type(error).__name__}"] += 1

    def watch(self, seconds: float) -> None:
        start = time.monotonic()
        while (now := time.monotonic() - start) < seconds:
            asked = time.monotonic()
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
            connection.request("GET", "/health")
            assert connection.getresponse().status == 200
            connection.close()
            self.health.append(time.monotonic() - asked)
            self.sample(now)
            time.sleep(0.5)

    def sample(self, now: float) -> None:
        status = Path(f"/proc/{self.pid}/status").read_text()
        pick = {name: status.split(f"{name}:")[1].split()[0] for name in ("VmRSS", "Threads")}
        descriptors = len(os.listdir(f"/proc/{self.pid}/fd"))
        self.samples.append(
            {
                "seconds": round(now, 1),
                "rss_mb": int(pick["VmRSS"]) / 1e3,
                "threads": int(pick["Threads"]),
                "descriptors": descriptors,
            }
        )


def main() -> int:
    seconds, output = float(sys.argv[1]), Path(sys.argv[2])
    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        base = save_model(Path(scratch) / "tiny", seed=0)
        command = cli("serve", "--model", str(base), "--port", "0", "--threads", "1", "--json")
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT)
        try:
            url = read_document(process, timeout=180)["base_url"]
            soak = Soak(int(url.split(":")[2].split("/")[0]), process.pid)
            load = os.getloadavg()[0]
            soak.good()
            workers = [threading.Thread(target=soak.client, args=(i,)) for i in range(CLIENTS)]
            for worker in workers:
                worker.start()
            try:
                soak.watch(seconds)
            finally:
                soak.end.set()
                for worker in workers:
                    worker.join()
            time.sleep(12)  # half heads are let go after 10
            soak.good()
            soak.sample(seconds)
            began = time.monotonic()
            process.terminate()
            code = process.wait(60)
            ended = time.monotonic() - began
        finally:
            process.kill()
            process.wait()
    return report(soak, seconds, output, load, code, ended)


def report(soak: Soak, seconds: float, output: Path, load: float, code: int, ended: float) -> int:
    early, last = soak.samples[len(soak.samples) // 5], soak.samples[-1]
    faults = []
    if len(soak.answers) != 1:
        faults.append(f"{len(soak.answers)} different answers at temperature 0")
    if last["rss_mb"] > 1.05 * early["rss_mb"]:
        faults.append(f"memory grew from {early['rss_mb']:.0f} to {last['rss_mb']:.0f} MB")
    if last["descriptors"] > soak.samples[0]["descriptors"] + 2:
        faults.append(f"{last['descriptors']} descriptors at the end")
    if max(soak.health) > 1:
        faults.append(f"/health took {max(soak.health):.2f} s")
    if code:
        faults.append(f"SIGTERM ended the server with {code}")
    found = {
        "seconds": seconds,
        "cores": os.cpu_count(),
        "load_before": load,
        "load_after": os.getloadavg()[0],
        "requests": dict(sorted(soak.counts.items())),
        "answers_at_temperature_0": len(soak.answers),
        "health_ms": [
            round(1000 * sorted(soak.health)[int(q * (len(soak.health) - 1))])
            for q in (0.5, 0.99, 1)
        ],
        "early": early,
        "last": last,
        "sigterm_seconds": round(ended, 2),
        "faults": faults,
    }
    (output / "soak.json").write_text(json.dumps({**found, "samples": soak.samples}, indent=1))
    lines = [
        f"# Soak: {'held' if not faults else 'FELL SHORT'}",
        "",
        "| what | found |",
        "| --- | --- |",
    ]
    lines += [f"| {name} | {value} |" for name, value in found.items()]
    (output / "soak.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
