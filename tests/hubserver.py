"""A small Hub on loopback: what huggingface_hub asks of the real one to list, download and upload.

Real HTTP, with ranges, ETags and commits; large files are LFS. ``cut`` and ``hold`` break or stop a download.
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest


def is_lfs(name: str, size: int) -> bool:
    return size > 1000 and not name.endswith((".json", ".md"))


@dataclass
class Repo:
    """The files of a repository's only commit. ``sizes``: what the metadata says instead of the truth."""

    files: dict[str, bytes] = field(default_factory=dict)
    gated: bool = False
    branches: tuple[str, ...] = ("main",)
    sizes: dict[str, int] = field(default_factory=dict)
    private: bool = False

    @property
    def commit(self) -> str:
        digest = hashlib.sha1()
        for name, data in sorted(self.files.items()):
            digest.update(f"{name}\0".encode() + data)
        return digest.hexdigest()

    def etag(self, name: str) -> str:
        data = self.files[name]
        return (hashlib.sha256 if is_lfs(name, len(data)) else hashlib.sha1)(data).hexdigest()

    def entry(self, name: str) -> dict[str, object]:
        """A file as listings have it: a repository's tree, and what is told of a model or a dataset."""
        size, etag = self.sizes.get(name, len(self.files[name])), self.etag(name)
        lfs = {"oid": etag, "sha256": etag, "size": size, "pointerSize": 130}
        return {"type": "file", "path": name, "rfilename": name, "size": size, "oid": etag,
                "blobId": etag, "lfs": lfs if len(etag) == 64 else None}  # fmt: skip


class Hub:
    """``repos``: (kind, org/name) -> Repo. ``asked``: (method, path, Range) of each request."""

    def __init__(self) -> None:
        self.repos: dict[tuple[str, str], Repo] = {}
        self.asked: list[tuple[str, str, str]] = []
        self.tokens: set[str] = set()
        self.cut: dict[str, list[int]] = {}
        """File name -> after how many bytes its next downloads break off."""
        self.hold: dict[str, int] = {}
        """File name -> after how many bytes its downloads stop until ``go`` is set."""
        self.held, self.go = threading.Event(), threading.Event()
        self.damaged: set[str] = set()
        self.objects: dict[str, bytes] = {}
        self.url = ""

    def model(self, name: str, files: dict[str, bytes], **options: Any) -> Repo:
        return self._add("model", name, Repo(files, **options))

    def dataset(self, name: str, files: dict[str, bytes]) -> Repo:
        return self._add("dataset", name, Repo(files))

    def _add(self, kind: str, name: str, repo: Repo) -> Repo:
        self.repos[kind, name] = repo
        return repo

    def downloads(self, ending: str) -> list[str]:
        """The Range of each GET of a file, "" for all of it."""
        return [r for method, path, r in self.asked if method == "GET" and path.endswith(ending)]

    def use(self, monkeypatch: pytest.MonkeyPatch, home: object) -> None:
        """The same for this process, which has imported huggingface_hub."""
        constants = {
            "ENDPOINT": self.url, "HF_HUB_CACHE": f"{home}/hub", "HF_HUB_DISABLE_XET": True,
            "HUGGINGFACE_CO_URL_TEMPLATE": self.url + "/{repo_id}/resolve/{revision}/{filename}",
        }  # fmt: skip
        for name, value in constants.items():
            monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)

    def environment(self, home: object) -> dict[str, str]:
        """For a process that is to see this Hub alone."""
        return {"HF_ENDPOINT": self.url, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1",
                "HF_TOKEN": "", "HF_HUB_OFFLINE": "0", "no_proxy": "*"}  # fmt: skip


@contextmanager
def running_hub() -> Iterator[Hub]:
    hub = Hub()
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield hub
    finally:
        hub.go.set()
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *_: object) -> None:
        pass

    def _json(self, status: int, value: object, **headers: str) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        for name, text in headers.items():
            self.send_header(name.replace("_", "-"), text)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _fail(self, status: int, code: str) -> None:
        self._json(status, {"error": code}, X_Error_Code=code, X_Error_Message=code)

    def _repo(self, kind: str, name: str, revision: str) -> Repo | None:
        """The repository, or None when it was refused."""
        repo = self.hub.repos.get((kind, name))
        allowed = self.headers.get("Authorization", "").removeprefix("Bearer ") in self.hub.tokens
        if repo is None or (repo.private and not allowed):
            self._fail(404 if allowed else 401, "RepoNotFound")
        elif revision not in (*repo.branches, repo.commit):
            self._fail(404, "RevisionNotFound")
        elif repo.gated and not allowed and "/resolve/" in self.path:
            self._fail(403, "GatedRepo")
        else:
            return repo
        return None

    def _asked(self) -> list[str]:
        path = unquote(urlsplit(self.path).path)
        self.hub.asked.append((self.command, path, self.headers.get("Range", "")))
        return path.strip("/").split("/")

    def do_GET(self) -> None:
        parts = self._asked()
        if parts[0] == "api" and parts[1] in ("models", "datasets"):
            kind, name, rest = parts[1][:-1], "/".join(parts[2:4]), parts[4:]
            if repo := self._repo(kind, name, rest[1] if rest else "main"):
                self._list(name, repo, tree=rest[:1] == ["tree"])
            return
        kind = "dataset" if parts[0] == "datasets" else "model"
        parts = parts[1:] if kind == "dataset" else parts
        if len(parts) < 5 or parts[2] != "resolve":
            self._fail(404, "EntryNotFound")
        elif repo := self._repo(kind, "/".join(parts[:2]), parts[3]):
            self._send(repo, "/".join(parts[4:]))

    do_HEAD = do_GET

    def _list(self, name: str, repo: Repo, tree: bool) -> None:
        files = [repo.entry(path) for path in repo.files]
        whole = {"id": name, "sha": repo.commit, "siblings": files, "private": repo.private}
        self._json(200, files if tree else whole)

    def _send(self, repo: Repo, name: str) -> None:
        if name not in repo.files:
            self._fail(404, "EntryNotFound")
            return
        data = repo.files[name]
        start, end = 0, len(data)
        if given := self.headers.get("Range", "").removeprefix("bytes="):
            first, _, last = given.partition("-")
            start, end = int(first), min(int(last) + 1 if last else end, end)
        self.send_response(206 if given else 200)
        self.send_header("ETag", f'"{repo.etag(name)}"')
        self.send_header("X-Repo-Commit", repo.commit)
        self.send_header("Content-Length", str(end - start))
        self.send_header("Accept-Ranges", "bytes")
        if given:
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(data)}")
        self.end_headers()
        body = b"" if self.command == "HEAD" else data[start:end]
        if name in self.hub.damaged:
            body = bytes(len(body))
        if body and self.hub.cut.get(name):
            self.wfile.write(body[: self.hub.cut[name].pop(0)])
            self.close_connection = True
            return
        stop = self.hub.hold.get(name, len(body))
        self.wfile.write(body[:stop])
        if stop < len(body):
            self.wfile.flush()
            self.hub.held.set()
            self.hub.go.wait(60)
        with suppress(OSError):  # whoever waited may have been killed
            self.wfile.write(body[stop:])

    def do_PUT(self) -> None:
        self.hub.objects[self._asked()[-1]] = self._body()
        self._json(200, {})

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def do_POST(self) -> None:
        parts, body = self._asked(), self._body()
        if self.headers.get("Authorization", "").removeprefix("Bearer ") not in self.hub.tokens:
            self._fail(401, "Unauthorized")
        elif parts == ["api", "repos", "create"]:
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}"
            there = ("model", name) in self.hub.repos
            if not there:
                private = asked.get("private") or asked.get("visibility") == "private"
                self.hub.model(name, {}, private=bool(private))
            self._json(409 if there else 200, {"url": f"{self.hub.url}/{name}", "id": name})
        elif parts[-1] == "validate-yaml":
            self._json(200, {"errors": [], "warnings": []})
        elif "preupload" in parts:
            self._json(200, {"files": [
                {"path": one["path"], "shouldIgnore": False,
                 "uploadMode": "lfs" if is_lfs(one["path"], one["size"]) else "regular"}
                for one in json.loads(body)["files"]]})  # fmt: skip
        elif parts[-1] == "batch":
            self._json(200, {"transfer": "basic", "objects": [
                {**one, "actions": {"upload": {"href": f"{self.hub.url}/lfs/{one['oid']}"}}}
                for one in json.loads(body)["objects"]]})  # fmt: skip
        else:
            self._commit("/".join(parts[2:4]), [json.loads(line) for line in body.splitlines()])

    def _commit(self, name: str, lines: list[dict[str, dict[str, str]]]) -> None:
        repo = self.hub.repos["model", name]
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                repo.files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                repo.files[value["path"]] = self.hub.objects[value["oid"]]
        url = f"{self.hub.url}/{name}/commit/{repo.commit}"
        self._json(200, {"commitUrl": url, "commitOid": repo.commit, "success": True})
