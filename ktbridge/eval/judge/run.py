"""Have a run's answers judged, and store the judge's replies. ``score.py`` scores them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ktbridge.codes import problem
from ktbridge.errors import KtbridgeError, Problem, ProblemsError, has_errors
from ktbridge.eval.arms import VOLATILE
from ktbridge.eval.bench import HIGHEST, Bench
from ktbridge.eval.judge import prompts
from ktbridge.eval.judge.prompts import JsonSchema, Judge, JudgeRequest, ReplyError, ShownAnswer
from ktbridge.eval.judge.score import named_judge, read_card, read_judgements
from ktbridge.eval.results.rows import read_rows
from ktbridge.eval.results.types import Json, Message
from ktbridge.eval.run import Asked, AskingLoop, is_silent, run_until_interrupt
from ktbridge.eval.schema import Item
from ktbridge.eval.store import JUDGE, JUDGE_FAILED, JUDGEMENTS, JudgementRecord, Ledger, write_json
from ktbridge.server_api.client import Client
from ktbridge.server_api.failures import remedy, think_only_remedy
from ktbridge.server_api.replies import OTHER_LIMIT, Answer


@dataclass(frozen=True)
class Judged:
    """Result of one invocation: judgements requested now, judgements found stored, problems."""

    asked: int
    stored: int
    problems: tuple[Problem, ...]


def judge_run(
    directory: Path,
    judge: Judge,
    *,
    pairs: bool = False,
    concurrency: int = 4,
    timeout: float = 900.0,
    backoff: float = 0.5,
    api_key: str | None = None,
    may_be_remote: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
) -> Judged:
    """Request the judgements missing from ``directory``'s judgements.jsonl, ``concurrency`` at a time.

    Every ok answer to an item with questions is judged, for each repeat, mixed with the bench's
    anchors; with ``pairs`` arms are compared too, by the first ok answer. judge.json then names this
    judge as the one to report. Raises UsageError if private data would leave this machine, ProblemsError
    for bad anchors, KtbridgeError if another run judges ``directory`` or the judge stops answering;
    judgements received until then are stored, and the same call resumes. Nothing to judge is a
    warning.
    """
    _, stored, rows = read_rows(directory)
    bench = stored.bench
    prompts.check_judge(bench, judge, may_be_remote)
    before = read_card(directory)
    if before and named_judge(before) == judge:
        pairs = pairs or before["pairs"]
    requests = prompts.plan_judging(bench, rows, judge, pairs=pairs).mixed()
    if not requests:
        nothing = problem(
            "KTB887",
            f"judge {judge.model}",
            f"the bench {bench.name!r} has no ok answer to an item with questions for a judge",
            "items with `judge`",
        )
        return Judged(0, 0, (nothing,))
    with Ledger(directory, JUDGEMENTS) as ledger:
        todo = [one for one in requests if not ledger.has(one.key)]
        done = itertools.count(len(requests) - len(todo))

        def report(asked: Asked[JudgementRecord] | None = None) -> None:
            if on_progress:
                on_progress(next(done), len(requests))

        async def ask_all() -> None:
            async with Client(judge.url, timeout=timeout, backoff=backoff, api_key=api_key) as client:
                # Recorded before the first request, so that the report of an interrupted run knows
                # what is missing.
                _name_judge(directory, judge, pairs, await _entry(client, judge))
                report()
                next_step = "see to its server and run the same command again; what was judged is stored"
                ask = Asker(client, judge).ask
                loop = AskingLoop(ask, ledger, concurrency, report, "the judge at ", next_step)
                await loop.ask_all(todo)

        if todo:
            run_until_interrupt(ask_all())
        else:
            _name_judge(directory, judge, pairs, before["server"] if before else {})
            report()
    found = read_judgements(directory, bench, rows)
    return Judged(len(todo), len(requests) - len(todo), tuple(found.problems if found else ()))


async def _entry(client: Client, judge: Judge) -> Json:
    """Return the judge's entry of /v1/models; {} where it lists none."""
    try:
        listed = await client.models()
    except KtbridgeError:
        return {}
    entry = next((one for one in listed if one["id"] == judge.model), {})
    return {key: entry[key] for key in sorted(entry) if key not in VOLATILE}


def _name_judge(directory: Path, judge: Judge, pairs: bool, server: Json) -> None:
    card = {
        "schema": "ktbridge.judge/1",
        "model": judge.model,
        "url": judge.url,
        "version": prompts.VERSION,
        "extra_body": dict(judge.extra_body),
        "pairs": pairs,
        "server": server,
    }
    write_json(directory / JUDGE, card)


# --- before any arm is asked


_CANARY = Item.model_construct(
    id="canary",
    slice="",
    messages=[{"role": "user", "content": "What is 2 + 2?"}],
    checks=[],
    judge=["Does the answer give the number four?", "Does the answer name the capital of Peru?"],
)
_CANARY_ANSWER = ShownAnswer("2 + 2 = 4.")
_CANARY_RIGHT = [True, False]


def judge_preflight(
    judge: Judge, benches: Sequence[Bench] = (), *,
    timeout: float = 900.0, backoff: float = 0.5, api_key: str | None = None,
) -> list[Problem]:  # fmt: skip
    """Ask the judge one question with obvious verdicts: is it available, is its reply valid?

    The form is that of ``benches``: a digit for the public NekoBench, JSON for all others. Returns the
    warnings; raises ProblemsError if it isn't listed, doesn't answer, or not in that form (JSON may come
    on the second request).
    """
    requests = [prompts.read_anchors(one, judge)[0] for one in benches if one.is_compat]
    if not requests or len(requests) < len(benches):
        requests.append(JudgeRequest(judge, _CANARY, (_CANARY_ANSWER,), "canary"))

    async def check() -> list[Problem]:
        async with Client(judge.url, timeout=timeout, backoff=backoff, api_key=api_key) as client:
            problems = await _check_listed(client, judge)
            asker = Asker(client, judge)
            for request in [] if has_errors(problems) else requests:
                asked = await asker.ask(request)
                if asked.silence:  # unreachable: it is said once, and not that the list is missing too
                    return _check_reply(request, asked)
                problems += _check_reply(request, asked)
            return problems

    problems = run_until_interrupt(check())
    if has_errors(problems):
        raise ProblemsError("the judge cannot be used; nothing was asked of the arms.", problems)
    return problems


async def _check_listed(client: Client, judge: Judge) -> list[Problem]:
    where = f"judge {judge.model}"
    try:
        names = sorted(str(one["id"]) for one in await client.models())
    except KtbridgeError as error:
        expected = "a list that names the judge"
        return [problem("KTB870", where, error.sentence, expected, error.next_step)]
    if judge.model in names:
        return []
    found = f"the server does not list {judge.model!r}"
    return [problem("KTB871", where, found, "one of: " + (", ".join(names[:20]) or "nothing"))]


def _check_reply(request: JudgeRequest, asked: Asked[JudgementRecord]) -> list[Problem]:
    where, is_digit = f"judge {request.judge.model}", request.form == "digit"
    outcome, detail = asked.record["outcome"], asked.record["detail"]
    if outcome == "ok":
        verdicts = request.read(asked.record["reply"]).verdicts
        if is_digit or verdicts == _CANARY_RIGHT:
            return []
        words = " and ".join("yes" if one else "no" for one in verdicts)
        asks = f"asked whether {_CANARY_ANSWER.text!r} gives four and names a capital"
        return [problem("KTB873", where, f"{asks}, it said {words}", "yes and no")]
    expected = f"a digit from 0 to {HIGHEST}" if is_digit else "JSON with evidence and verdicts"
    found, next_step = f"no verdict that can be read: {detail}", asked.next_step
    if outcome == JUDGE_FAILED:
        found = f"no answer from {request.judge.url}: {detail}"
        next_step = next_step or "start its server, or correct the URL in --judge"
    return [problem("KTB872", where, found, expected, next_step or None)]


# --- one request


# Leaves room for thinking; a verdict needs a tenth of it. Without a limit generation might not end.
MAX_TOKENS = 4096
# Statuses caused by authentication, rate limit or URL, not by an unsupported response_format.
_NOT_THE_FORM = {401, 403, 404, 408, 429}
_SAID_NOTHING = {"empty": "an empty reply", "think-only": "thinking without a reply"}


class Asker:
    """Asks one judge through ``client``; remembers whether its server supports ``response_format``."""

    def __init__(self, client: Client, judge: Judge) -> None:
        self._client = client
        self._judge = judge
        self._takes_schema: bool | None = None

    async def ask(self, request: JudgeRequest) -> Asked[JudgementRecord]:
        """Ask for one judgement: the judge's last reply, unchanged. After an invalid one it is asked once
        more; then: parse failure."""
        answers = [await self._chat(request, request.messages, request.schema)]
        fault = self._fault(request, answers[0])
        # Digits are asked for as the public script does: once.
        if fault and answers[0].outcome != "http-error" and request.form != "digit":
            # The same prompt at temperature 0 would give the same reply. Without the schema, because
            # a grammar that prevents thinking is one cause of empty replies.
            again = f"That cannot be read: {fault}. Reply in the form that was asked for, only that."
            more = [{"role": "assistant", "content": answers[0].text or "(nothing)"}]
            more.append({"role": "user", "content": again})
            answers.append(await self._chat(request, [*request.messages, *more], None))
            fault = self._fault(request, answers[1])
        last = answers[-1]
        failed = bool(fault) and last.outcome == "http-error"
        record: JudgementRecord = {
            "key": request.key,
            "form": request.form,
            "item": request.item.id,
            "of": request.of,
            **request.compared,
            "outcome": JUDGE_FAILED if failed else "parse-fail" if fault else "ok",
            "reply": last.text,
            "detail": fault,
            "attempts": len(answers),
            "prompt_tokens": sum(one.prompt_tokens or 0 for one in answers),
            "completion_tokens": sum(one.completion_tokens or 0 for one in answers),
        }
        step = ""
        if failed and last.status:
            step = remedy(last.status, last.detail, "--judge-extra-body")
        elif fault and last.outcome == "think-only":
            step = think_only_remedy(self._judge.extra_body, "--judge-extra-body")
        gone = is_silent(failed, last.status, last.detail)
        return Asked(record, self._judge.url, fault if gone else "", step)

    async def _chat(
        self, asked: JudgeRequest, messages: Sequence[Message], schema: JsonSchema | None
    ) -> Answer:
        request: dict[str, object] = {
            "model": self._judge.model,
            "messages": list(messages),
            "max_tokens": MAX_TOKENS,
            "temperature": 0,
            **asked.fields,
            **self._judge.extra_body,
        }
        request = {key: value for key, value in request.items() if value is not None}
        if schema is None or self._takes_schema is False:
            return await self._client.chat(request)
        form = {"name": "judgement", "strict": True, "schema": schema}
        answer = await self._client.chat(
            {**request, "response_format": {"type": "json_schema", "json_schema": form}}
        )
        if answer.outcome != "http-error":
            self._takes_schema = True
        elif self._takes_schema is None and answer.status >= 400:
            if answer.status in _NOT_THE_FORM:
                return answer
            answer = await self._client.chat(request)
            if answer.outcome != "http-error":
                self._takes_schema = False
        return answer

    def _fault(self, request: JudgeRequest, answer: Answer) -> str:
        """Return why ``answer`` is not a valid judgement; "" if it is."""
        if answer.outcome == "http-error":
            return answer.detail or "no reply"
        if answer.outcome == "truncated" and request.form != "digit":
            given = (self._judge.extra_body.get(name) for name in ("max_tokens", OTHER_LIMIT))
            return f"a reply cut off after {next(filter(None, given), MAX_TOKENS)} tokens"
        if answer.outcome in _SAID_NOTHING:
            return _SAID_NOTHING[answer.outcome]
        try:
            request.read(answer.text)
        except ReplyError as error:
            return str(error)
        return ""
