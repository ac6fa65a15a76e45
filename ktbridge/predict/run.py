"""Answer a dataset's prompts by the embedded engine, in one continuous batch, and write the results."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ktbridge.adapter.adapter import CONFIG_FILE
from ktbridge.codes import Problems
from ktbridge.errors import KtbridgeError, Problem
from ktbridge.files import digests
from ktbridge.files.locks import lock_target
from ktbridge.files.publish import OnProgress
from ktbridge.predict.output import Answered, Fingerprint, Journal, measure_answers, write_predictions
from ktbridge.predict.prompts import PredictionInputs, Prompt
from ktbridge.serve.local.batch import Ask, Batch
from ktbridge.serve.local.plan import ServePlan, fingerprints, plan_local
from ktbridge.serve.local.sampling import SEED_STEP, Event, Finish, Sampling, TextDelta
from ktbridge.serve.request import ServeRequest
from ktbridge.server_api.served_names import adapter_name

if TYPE_CHECKING:
    import torch

NAME, ADAPTER = "predict", "adapter"
SHOWN = 20
"""Rows without an answer that are listed one by one."""


@dataclass(frozen=True)
class PredictResult:
    """Result of a run. ``cut``: answers that ``max_new_tokens`` ended; ``resumed``: rows answered before."""

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
        """Return the result as JSON; ``ok`` is false if rows have no answer."""
        found = [problem.as_dict() for problem in self.problems]
        return {**asdict(self), "ok": not found, "problems": found}


def choose_adapter(prepared: PredictionInputs) -> str | None:
    """Return the adapter that answers: one that was named for that, what the configuration has trained, or
    what that began with; None: the base.

    Raises KtbridgeError if it is still to be trained.
    """
    config = prepared.config
    if prepared.named:
        return config.adapter_name_or_path
    trained = (Path(config.output_dir) / CONFIG_FILE).is_file()
    if config.do_train and not trained:
        raise KtbridgeError(
            f"{config.output_dir} has no adapter yet.",
            "Train it first (`ktbridge train CONFIG`), or name one: adapter_name_or_path=DIR.",
        )
    if trained:
        return config.output_dir
    return config.adapter_name_or_path


def plan_engine(prepared: PredictionInputs) -> ServePlan:
    """Plan the engine with the one arm that answers: the whole adapter, or the base.

    Raises as ``plan_local``.
    """
    config, adapter = prepared.config, choose_adapter(prepared)
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


def make_fingerprint(prepared: PredictionInputs, plan: ServePlan) -> Fingerprint:
    """Return all that decides the answers, by the name of the key that decides it."""
    config = prepared.config
    images = [[image.fingerprint for image in prompt.images] for prompt in prepared.prompts]
    rows = json.dumps([[prompt.text, prompt.label] for prompt in prepared.prompts])
    rows += json.dumps(images) if any(images) else ""
    (served,) = fingerprints(plan).values()
    samples = config.do_sample and bool(config.temperature)
    keys = ("temperature", "top_p", "top_k", "seed") if samples else ()
    return {
        "model and adapter": served,
        "eval_dataset": digests.of_text(rows),
        "max_new_tokens": config.max_new_tokens,
        "do_sample": samples,
        **{key: getattr(config, key) for key in keys},
    }


def choose_sampling(prepared: PredictionInputs, row: int) -> Sampling:
    """Return the sampling of a row's answer: each row has random numbers of its own."""
    config = prepared.config
    return Sampling(
        max_tokens=min(config.max_new_tokens, prepared.context - len(prepared.prompts[row].ids)),
        temperature=config.temperature if config.do_sample else 0.0,
        top_p=config.top_p,
        top_k=config.top_k,
        seed=config.seed + row * SEED_STEP,
    )


def predict(
    prepared: PredictionInputs,
    plan: ServePlan,
    on_progress: OnProgress | None = None,
    on_loading: Callable[[], None] | None = None,
) -> PredictResult:
    """Answer the rows that have no answer yet, and write the files; calls ``on_progress(done, total)``.

    A killed run goes on with the same call. Rows that can't be answered are among the result's
    ``problems``, and are asked again by the same call. Raises ``ProblemsError`` if ``output_dir`` has
    unfinished answers of another configuration, and as ``load_engine``.
    """
    prompts, output = prepared.prompts, Path(prepared.config.output_dir)
    fingerprint = make_fingerprint(prepared, plan)
    with lock_target(output), closing(Journal(output, fingerprint)) as journal:
        answers, resumed = journal.answers, len(journal.answers)
        failed: dict[int, str] = {}
        if resumed < len(prompts):
            if on_loading:
                on_loading()
            failed = _answer(prepared, plan, journal, on_progress or (lambda done, total: None))
        rows = [
            {"prompt": prompt.text, "predict": answers[row].predict, "label": prompt.label}
            for row, prompt in enumerate(prompts)
            if row in answers
        ]
        metrics = measure_answers(rows, len(failed), journal.seconds)
        files = write_predictions(output, rows, metrics, prepared.refused)
        if not failed:
            journal.path.unlink(missing_ok=True)
    problems = Problems(code="KTP001")
    for row, why in sorted(failed.items())[:SHOWN]:
        problems.error(prompts[row].where, why, next_step=None)
    if len(failed) > SHOWN:
        more = f"{len(failed) - SHOWN:,} more rows alike"
        problems.error("eval_dataset", more, next_step=None)
    return PredictResult(
        output_dir=str(output),
        adapter=choose_adapter(prepared),
        rows=prepared.total,
        answered=len(rows),
        resumed=resumed,
        refused=len(prepared.refused),
        cut=sum(answer.cut for answer in answers.values()),
        metrics=metrics,
        files=files,
        problems=tuple(problems),
    )


def _answer(
    prepared: PredictionInputs, plan: ServePlan, journal: Journal, on_progress: OnProgress
) -> dict[int, str]:
    """Ask for what ``journal`` lacks; return why rows couldn't be answered, by their number."""
    from transformers.utils import logging

    from ktbridge.serve.local.loading import load_engine

    logging.disable_progress_bar()
    prompts = prepared.prompts
    engine = load_engine(plan, prepared.vision is not None)
    failed: dict[int, str] = {}
    began = time.monotonic() - journal.seconds

    def finish(row: int, text: str, cut: bool, error: BaseException | None = None) -> None:
        if error is not None:
            failed[row] = f"{type(error).__name__}: {' '.join(str(error).split())}"
        else:
            seconds = round(time.monotonic() - began, 3)
            journal.store(Answered(row=row, predict=text, cut=cut, seconds=seconds))
        on_progress(len(journal.answers) + len(failed), len(prompts))

    waiting = deque(
        Ask(
            plan.arms[0],
            prompt.ids,
            choose_sampling(prepared, row),
            _Listener(partial(finish, row)),
            images=partial(_read_images, prepared, prompt) if prompt.images else None,
        )
        for row, prompt in enumerate(prompts)
        if row not in journal.answers
    )
    on_progress(len(journal.answers), len(prompts))
    together = prepared.config.per_device_eval_batch_size if engine.batchable else 1
    batch = Batch(engine, together, engine.cells())
    while waiting or batch.rows or batch.pending:
        if waiting and batch.pending is None and batch.fits(waiting[0]):
            batch.begin(waiting.popleft())
        batch.advance()
        batch.step()
    return failed


def _read_images(prepared: PredictionInputs, prompt: Prompt) -> dict[str, torch.Tensor]:
    import torch

    assert prepared.vision is not None
    return prepared.vision.inputs(torch.tensor([prompt.ids]), prompt.images)


class _Listener:
    """Collects one row's answer."""

    cancelled = False

    def __init__(self, finish: Callable[..., None]) -> None:
        self._finish, self._text = finish, ""

    def deliver(self, choice: int, event: Event) -> None:
        if isinstance(event, TextDelta):
            self._text += event.text
        elif isinstance(event, Finish):
            self._finish(self._text, event.reason == "length")

    def fail(self, error: BaseException) -> None:
        self._finish("", False, error)
