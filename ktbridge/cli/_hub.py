"""Base models of commands: a directory, or a name on the Hub, which is downloaded where it isn't cached."""

from __future__ import annotations

from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from ktbridge.cli._ui import progress_bar
from ktbridge.errors import KtbridgeError
from ktbridge.model import hub
from ktbridge.model.stub import CheckpointStub
from ktbridge.sft.data.records import find_sources

if TYPE_CHECKING:
    from ktbridge.sft.config import TrainConfig


def ensure_model(named: str, weights: bool = True, *, quiet: bool = False) -> None:
    """Download ``org/name`` or ``org/name@revision`` unless the Hub cache has it; paths are left alone.

    Without ``weights`` only config.json and the other small files. Afterwards ``find_model`` and
    ``resolve_model`` find it by its name. Raises KtbridgeError in one sentence. ``quiet`` shows no progress.
    """
    wanted = hub.repository(named)
    if wanted is None or hub.find_whole(wanted, weights):
        return
    with nullcontext() if quiet else progress_bar(f"downloading {wanted}", "bytes") as bar:
        hub.fetch_model(wanted, weights, bar)


def stub_on_hub(named: str) -> CheckpointStub | None:
    """Return a stub of a model on the Hub whose weights aren't here, by their headers; its small files come.

    None for a directory, for weights that are here, and where headers can't be read but config.json is here.
    """
    wanted = hub.repository(named)
    if wanted is None or hub.find_whole(wanted):
        return None
    ensure_model(named, weights=False)
    path = hub.fetch_model(wanted, weights=False)
    try:
        return CheckpointStub(path, hub.read_headers(wanted, path), from_files=True)
    except KtbridgeError:  # without a network, the sizes are config.json's
        return None


def wait_for_model(named: str) -> None:
    """Wait until another process of this host has downloaded it; the launcher ends us if that one fails."""
    import time

    wanted = hub.repository(named)
    while wanted is not None and hub.find_whole(wanted) is None:
        time.sleep(0.5)


def ensure_rows(config: TrainConfig) -> None:
    """Download the run's datasets that are on the Hub, with a progress bar.

    What can't be downloaded is left to the reader of the rows, who reports it with all else that is wrong.
    """
    sources, failed = find_sources(replace(config, dataset=(*config.dataset, *config.eval_dataset)))
    for source in sources if not failed else ():
        if source.remote and source.remote.cached() is None:
            with suppress(KtbridgeError), progress_bar(f"downloading {source.name}", "bytes") as bar:
                source.remote.fetch(bar)
