"""Answer a dataset's prompts by the embedded engine, in one continuous batch, and write the results."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ktbridge.codes import problem
from ktbridge.errors import KtbridgeError, Problem
from ktbridge.files import digests
from ktbridge.files.locks import lock_target
from ktbridge.predict import results
from ktbridge.predict.journal import Answered, Identity, Journal, journal_of
from ktbridge.predict.prompts import Prepared, Prompt
from ktbridge.serve.local.batch import Ask, Batch
from ktbridge.serve.local.plan import ServePlan, fingerprints, plan_local
from ktbridge.serve.local.sampling import SEED_STEP, Delta, Event, Finish, Sampling
from ktbridge.serve.request import ServeRequest
from ktbridge.server_api.served_names import adapter_name
from ktbridge.sft.config import TrainConfig

if TYPE_CHECKING:
    import torch

ADAPTER_CONFIG = "adapter_config.json"
NAME, ADAPTER = "predict", "adapter"
SHOWN = 20
"""Rows without an answer that are listed one by one."""


@dataclass(frozen=True)
class PredictResult:
    """What a run left. ``cut``: answers that ``max_new_tokens`` ended; ``resumed``: rows answered before."""

    output_dir: str
    adapter: str | None
    rows: int
    answered: int
    resumed: int
    refused: int
    cut: int
    metrics: dict[str, float]
    files: list[str]
    problems: tuple[Problem, ...]

    def as_dict(self) -> dict[str, object]:
        """JSON-ready; ``ok`` is false where rows have no answer."""
        found = [each.as_dict() for each in self.problems]
        return {**asdict(self), "ok": not found, "problems": found}


def adapter_of(config: TrainConfig) -> str | None:
    """The adapter that answers: what this configuration trains, else the one it names; None: the base.

    Raises KtbridgeError where it is still to be trained.
    """
    trained = (Path(config.output_dir) / ADAPTER_CONFIG).is_file()
    if config.do_train and not trained:
        raise KtbridgeError(
            f"{config.output_dir} has no adapter yet.",
            "Train it first (`ktbridge train CONFIG`), or name one: do_train=false adapter_name_or_path=DIR.",
        )
    if config.do_train or (trained and not config.adapter_name_or_path):
        return config.output_dir
    return config.adapter_name_or_path


def plan_engine(prepared: Prepared) -> ServePlan:
    """The engine with the one arm that answers: the whole adapter, or the base. Raises as ``plan_local``."""
    config, adapter = prepared.config, adapter_of(prepared.config)
    request = ServeRequest(
        str(prepared.base),
        adapters={ADAPTER: adapter} if adapter else {},
        from_format=config.adapter_format,
        served_name=NAME,
        threads=config.kt_config.kt_num_threads or None,
    )
    plan = plan_local(request)
    wanted = adapter_name(NAME, ADAPTER) if adapter else NAME
    return replace(plan, arms=tuple(arm for arm in plan.arms if arm.name == wanted))


def identity(prepared: Prepared, plan: ServePlan) -> Identity:
    """Return what the answers depend on, by the name of the key that decides it."""
    config = prepared.config
    pictures = [[picture.identity for picture in prompt.pictures] for prompt in prepared.prompts]
    rows = json.dumps([[prompt.text, prompt.label] for prompt in prepared.prompts])
    rows += json.dumps(pictures) if any(pictures) else ""
    (fingerprint,) = fingerprints(plan).values()
    greedy = not config.do_sample or not config.temperature
    sampling = {} if greedy else {key: getattr(config, key) for key in _SAMPLING}
    return {
        "model and adapter": fingerprint,
        "eval_dataset": digests.of_text(rows),
        "max_new_tokens": config.max_new_tokens,
        "do_sample": not greedy,
        **sampling,
    }


_SAMPLING = ("temperature", "top_p", "top_k", "seed")


def sampling_of(config: TrainConfig, row: int, room: int) -> Sampling:
    """How row number ``row`` is answered, within ``room`` tokens: each row has random numbers of its own."""
    return Sampling(
        max_tokens=min(config.max_new_tokens, room),
        temperature=config.temperature if config.do_sample else 0.0,
        top_p=config.top_p,
        top_k=config.top_k,
        seed=config.seed + row * SEED_STEP,
    )


def predict(
    prepared: Prepared,
    plan: ServePlan,
    on_progress: Callable[[int, int], None] | None = None,
    on_loading: Callable[[], None] | None = None,
) -> PredictResult:
    """Answer the rows that have no answer yet, and write the files; calls ``on_progress(done, total)``.

    A killed run goes on with the same call. Rows that can't be answered are among the result's
    ``problems``, and are asked again by the same call. Raises ``ProblemsError`` where ``output_dir`` has
    unfinished answers of another configuration, and as ``load_engine``.
    """
    config, prompts = prepared.config, prepared.prompts
    output = Path(config.output_dir)
    with lock_target(output), Journal(journal_of(output), identity(prepared, plan)) as journal:
        resumed = len(journal.answers)
        failed: dict[int, str] = {}
        if resumed < len(prompts):
            if on_loading:
                on_loading()
            failed = _answer(prepared, plan, journal, on_progress or (lambda done, total: None))
        rows = [
            {"prompt": prompt.text, "predict": journal.answers[row].text, "label": prompt.label}
            for row, prompt in enumerate(prompts)
            if row in journal.answers
        ]
        metrics = results.measure(rows, len(failed), journal.seconds)
        files = results.write(output, rows, metrics, prepared.refused)
        if not failed:
            journal.remove()
    return PredictResult(
        output_dir=str(output),
        adapter=adapter_of(config),
        rows=prepared.total,
        answered=len(rows),
        resumed=resumed,
        refused=len(prepared.refused),
        cut=sum(answer.cut for answer in journal.answers.values()),
        metrics=metrics,
        files=files,
        problems=tuple(_unanswered(prepared, failed)),
    )


def _unanswered(prepared: Prepared, failed: dict[int, str]) -> Iterable[Problem]:
    shown = sorted(failed.items())[:SHOWN]
    for row, why in shown:
        yield problem("KTP001", prepared.prompts[row].where, why)
    if len(failed) > len(shown):
        yield problem("KTP001", "eval_dataset", f"{len(failed) - len(shown):,} more rows alike")


def _answer(
    prepared: Prepared, plan: ServePlan, journal: Journal, on_progress: Callable[[int, int], None]
) -> dict[int, str]:
    """Ask for what ``journal`` lacks; why rows couldn't be answered, by their number."""
    from transformers.utils import logging

    from ktbridge.serve.local.loading import load_engine

    logging.disable_progress_bar()
    config, prompts = prepared.config, prepared.prompts
    engine = load_engine(plan, prepared.vision is not None)
    failed: dict[int, str] = {}
    before, started = journal.seconds, time.monotonic()

    def finished(row: int, answer: Answered | BaseException) -> None:
        if isinstance(answer, BaseException):
            failed[row] = f"{type(answer).__name__}: {' '.join(str(answer).split())}"
        else:
            journal.add(row, answer, round(before + time.monotonic() - started, 3))
        on_progress(len(journal.answers) + len(failed), len(prompts))

    waiting = deque(
        Ask(
            plan.arms[0],
            prompt.ids,
            sampling_of(config, row, prepared.context - len(prompt.ids)),
            _Listener(row, finished),
            images=partial(_seen, prepared, prompt) if prompt.pictures else None,
        )
        for row, prompt in enumerate(prompts)
        if row not in journal.answers
    )
    on_progress(len(journal.answers), len(prompts))
    together = config.per_device_eval_batch_size if engine.batchable else 1
    batch = Batch(engine, together, engine.cells())
    while waiting or batch.rows or batch.pending:
        if waiting and batch.pending is None and batch.fits(waiting[0]):
            batch.begin(waiting.popleft())
        batch.advance()
        batch.step()
    return failed


def _seen(prepared: Prepared, prompt: Prompt) -> dict[str, torch.Tensor]:
    """The prompt's images, read now."""
    import torch

    assert prepared.vision is not None
    return prepared.vision.inputs(torch.tensor([prompt.ids]), prompt.pictures)


class _Listener:
    """Collects one row's answer."""

    cancelled = False

    def __init__(self, row: int, finished: Callable[[int, Answered | BaseException], None]) -> None:
        self._row, self._finished = row, finished
        self._pieces: list[str] = []

    def deliver(self, choice: int, event: Event) -> None:
        if isinstance(event, Delta):
            self._pieces.append(event.text)
        elif isinstance(event, Finish):
            self._finished(self._row, Answered("".join(self._pieces), event.reason == "length"))

    def fail(self, error: BaseException) -> None:
        self._finished(self._row, error)
