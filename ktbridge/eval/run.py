"""Ask a bench's questions of each arm and store the answers. Scoring is another module's work."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ktbridge
from ktbridge.errors import KtbridgeError, Problem
from ktbridge.eval.arms import Arm, arm_rank
from ktbridge.eval.bench import FILES, Bench, Item
from ktbridge.eval.client import Answer, Client
from ktbridge.eval.preflight import Preflight, build_request, check_arms
from ktbridge.eval.store import Store, request_key
from ktbridge.publish import write_text

RUN = "run.json"
BENCH = "bench"
_CARD = {"name": str, "model": str, "url": str, "server": dict, "sampling": dict}
_CARD["fingerprint"] = str
_SILENT = 6  # requests in a row that got no reply at all: the server is gone
OnProgress = Callable[[int, int], None]


@dataclass(frozen=True)
class Collected:
    """What one invocation did: answers asked now and found stored, outcomes of all of them."""

    asked: int
    stored: int
    outcomes: dict[str, int]
    identical: list[dict[str, Any]]
    problems: tuple[Problem, ...]


def collect(
    bench: Bench,
    arms: Sequence[Arm],
    directory: Path,
    *,
    slices: tuple[str, ...] = (),
    limit: int | None = None,
    concurrency: int = 4,
    timeout: float = 900.0,
    backoff: float = 0.5,
    api_key: str | None = None,
    on_preflight: Callable[[Preflight], None] | None = None,
    on_progress: OnProgress | None = None,
) -> Collected:
    """Preflight, then ask what is not yet stored in ``directory``; ``concurrency`` at a time.

    Items are asked of all arms in turn, so that an interrupted run is still paired. Arms may come
    in separate invocations; ``directory`` collects them. Raises UsageError for an unknown slice,
    ProblemsError when preflight fails, KtbridgeError when another run writes to ``directory`` or
    a server stops answering.
    An interrupt (KeyboardInterrupt) passes through after everything received has been stored.
    """
    items = bench.select(slices, limit)
    with Store(directory) as store:
        collected = asyncio.run(
            _until_interrupt(
                _collect(
                    bench,
                    arms,
                    items,
                    store,
                    concurrency,
                    {"timeout": timeout, "backoff": backoff, "api_key": api_key},
                    on_preflight,
                    on_progress,
                )
            )
        )
    if collected is None:
        raise KeyboardInterrupt
    return collected


async def _until_interrupt(work: Coroutine[Any, Any, Collected]) -> Collected | None:
    """``work``'s result, or None when Ctrl-C ended it.

    Before Python 3.11 an interrupt strikes whichever task is running; here it always cancels the work as
    a whole, which then puts away what it holds.
    """
    task = asyncio.ensure_future(work)
    with contextlib.suppress(ValueError, RuntimeError):  # not the main thread: no signals there
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, task.cancel)
    try:
        return await task
    except asyncio.CancelledError:
        return None


async def _collect(
    bench: Bench,
    arms: Sequence[Arm],
    items: Sequence[Item],
    store: Store,
    concurrency: int,
    options: dict[str, Any],
    on_preflight: Callable[[Preflight], None] | None,
    on_progress: OnProgress | None,
) -> Collected:
    run = read_run(store.directory)
    async with contextlib.AsyncExitStack() as stack:
        clients = {
            url: await stack.enter_async_context(Client(url, **options))
            for url in dict.fromkeys(arm.url for arm in arms)
        }
        preflight = await check_arms(arms, clients, bench, run["probes"])
        if on_preflight:
            on_preflight(preflight)
        _write_run(store.directory, run, bench, preflight)
        work = []
        keys = []
        for item in items:
            for arm in arms:
                request = build_request(arm, item, bench)
                key = request_key(preflight.cards[arm.name]["fingerprint"], request)
                keys.append(key)
                if not store.answered(key):
                    work.append((key, arm, item, request))
        done = len(keys) - len(work)
        stored = done
        if on_progress:
            on_progress(done, len(keys))
        queue = iter(work)

        silent = dict.fromkeys(clients, 0)

        async def worker(queue: Iterator[tuple[str, Arm, Item, dict[str, Any]]]) -> None:
            nonlocal done
            for key, arm, item, request in queue:
                answer = await clients[arm.url].chat(request)
                store.add(_record(key, arm, item, answer))
                gone = answer.outcome == "http-error" and answer.status == 0
                silent[arm.url] = silent[arm.url] + 1 if gone else 0
                if silent[arm.url] == _SILENT:
                    raise KtbridgeError(
                        f"{arm.url} stopped answering ({answer.detail}).",
                        "see to the server and run the same command again; what was answered is "
                        "stored",
                    )
                done += 1
                if on_progress:
                    on_progress(done, len(keys))

        workers = [asyncio.create_task(worker(queue)) for _ in range(concurrency)]
        try:
            await asyncio.gather(*workers)
        finally:
            # The first failure (a full disk) must not leave the others asking on.
            for task in workers:
                task.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
    outcomes: dict[str, int] = {}
    for key in keys:
        outcome = store.records[key]["outcome"]
        outcomes[outcome] = outcomes.get(outcome, 0) + 1
    return Collected(len(work), stored, outcomes, preflight.identical, tuple(preflight.problems))


def _record(key: str, arm: Arm, item: Item, answer: Answer) -> dict[str, Any]:
    return {"key": key, "arm": arm.name, "item": item.id, **answer.as_dict()}


def read_run(directory: Path) -> dict[str, Any]:
    """What run.json holds: ``arms`` (name -> card) and ``probes`` (fingerprint -> hashes)."""
    path = directory / RUN
    try:
        run = json.loads(path.read_text("utf-8"))
        arms, probes = dict(run["arms"]), dict(run["probes"])
        json.dumps(run, ensure_ascii=False, allow_nan=False).encode()
    except FileNotFoundError:
        return {"arms": {}, "probes": {}}
    except (ValueError, KeyError, TypeError, RecursionError):
        raise KtbridgeError(
            f"{str(path)!r} is not a run's description.", "use another --out directory"
        ) from None
    sound = all(
        isinstance(card, dict)
        and all(isinstance(card.get(key), kind) for key, kind in _CARD.items())
        and card["name"] == name
        for name, card in arms.items()
    ) and all(
        isinstance(hashes, dict) and all(isinstance(one, str) for one in hashes.values())
        for hashes in probes.values()
    )
    if not sound:
        raise KtbridgeError(
            f"{str(path)!r} is damaged.",
            "delete it and run the same `ktbridge eval` command again; the answers are kept",
        )
    return {"arms": arms, "probes": probes}


def _write_run(directory: Path, run: dict[str, Any], bench: Bench, preflight: Preflight) -> None:
    """Record arms and bench, so that a report needs this directory and nothing else.

    Probe hashes stay those of an arm's first run: drift is measured from there.
    """
    folder = directory / BENCH
    folder.mkdir(exist_ok=True)
    for name in FILES:
        if not (folder / name).is_file() or (folder / name).read_bytes() != bench.files[name]:
            write_text(folder / name, bench.files[name].decode("utf-8"))
    arms = {**run["arms"], **preflight.cards}
    probes = dict(run["probes"])
    for fingerprint, hashes in preflight.probes.items():
        probes[fingerprint] = {**hashes, **probes.get(fingerprint, {})}
    document = {
        "schema": "ktbridge.run/1",
        "ktbridge": ktbridge.__version__,
        "arms": {name: arms[name] for name in sorted(arms, key=arm_rank)},
        "probes": probes,
    }
    write_text(directory / RUN, json.dumps(document, indent=2, ensure_ascii=False) + "\n")
