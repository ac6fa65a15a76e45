"""Have a run's answers judged, and store the judge's replies. ``read.py`` scores them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ktbridge.codes import problem
from ktbridge.errors import KtbridgeError, Problem, ProblemsError, has_errors
from ktbridge.eval.arms import VOLATILE
from ktbridge.eval.asking import Asked, AskingLoop, is_silent, run_until_interrupt
from ktbridge.eval.bench import Bench, Item
from ktbridge.eval.compat import HIGHEST, is_compat
from ktbridge.eval.judging.plan import Ask, Judge, check_judge, digit_question, make_plan
from ktbridge.eval.judging.prompts import VERSION, JsonSchema, ReplyError, checklist_messages
from ktbridge.eval.judging.read import JUDGE, named_judge, read_card, read_judgements
from ktbridge.eval.results.cards import Json, JudgeOutcome, Message
from ktbridge.eval.results.rows import read_rows
from ktbridge.eval.store import JUDGE_FAILED, JUDGEMENTS, JudgementRecord, Ledger, write_json
from ktbridge.server_api.client import Client
from ktbridge.server_api.failures import remedy, think_only_remedy
from ktbridge.server_api.replies import OTHER_LIMIT, Answer

OnProgress = Callable[[int, int], None]


@dataclass(frozen=True)
class Judged:
    """The result of one invocation: judgements requested now, judgements found stored, problems."""

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
    on_progress: OnProgress | None = None,
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
    check_judge(bench, judge, may_be_remote)
    before = read_card(directory)
    if before and named_judge(before) == judge:
        pairs = pairs or before["pairs"]
    asks = make_plan(bench, rows, judge, pairs=pairs).mixed()
    if not asks:
        nothing = problem(
            "KTB887",
            f"judge {judge.model}",
            f"the bench {bench.name!r} has no ok answer to an item with questions for a judge",
            "items with `judge`",
        )
        return Judged(0, 0, (nothing,))
    report = on_progress or (lambda done, total: None)
    with Ledger(directory, JUDGEMENTS) as journal:
        todo = [ask for ask in asks if not journal.has(ask.key)]
        done = len(asks) - len(todo)

        async def ask_all() -> None:
            async with Client(
                judge.url, timeout=timeout, backoff=backoff, api_key=api_key
            ) as client:
                # Recorded before the first request, so that the report of an interrupted run knows
                # what is missing.
                _name_judge(directory, judge, pairs, await _entry(client, judge))
                report(done, len(asks))
                await asking(Asker(client, judge)).ask_all(todo)

        def asking(asker: Asker) -> AskingLoop[Ask, JudgementRecord]:
            next_step = (
                "see to its server and run the same command again; what was judged is stored"
            )
            return AskingLoop(asker.ask, journal, concurrency, count, "the judge at ", next_step)

        def count(asked: Asked[JudgementRecord]) -> None:
            nonlocal done
            done += 1
            report(done, len(asks))

        if todo:
            run_until_interrupt(ask_all())
        else:
            _name_judge(directory, judge, pairs, before["server"] if before else {})
            report(done, len(asks))
    found = read_judgements(directory, bench, rows)
    return Judged(len(todo), len(asks) - len(todo), tuple(found.problems if found else ()))


async def _entry(client: Client, judge: Judge) -> Json:
    """The judge's entry of /v1/models; {} where it lists none."""
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
        "version": VERSION,
        "extra_body": dict(judge.extra_body),
        "pairs": pairs,
        "server": server,
    }
    write_json(directory / JUDGE, card)


# --- before any arm is asked


_CANARY = Item(
    id="canary",
    slice="",
    sub="",
    lang="en",
    cluster="canary",
    messages=({"role": "user", "content": "What is 2 + 2?"},),
    gold=None,
    checks=(),
    max_tokens=1,
    judge=("Does the answer give the number four?", "Does the answer name the capital of Peru?"),
)
_CANARY_ANSWER = "2 + 2 = 4."
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
    asks = [digit_question(judge, bench) for bench in benches if is_compat(bench)]
    if not asks or len(asks) < len(benches):
        messages = tuple(checklist_messages(_CANARY, _CANARY_ANSWER))
        asks.append(Ask("canary", "checks", _CANARY, messages, "canary"))

    async def check() -> list[Problem]:
        async with Client(judge.url, timeout=timeout, backoff=backoff, api_key=api_key) as client:
            return await _preflight(judge, client, asks)

    problems = run_until_interrupt(check())
    if has_errors(problems):
        raise ProblemsError("the judge cannot be used; nothing was asked of the arms.", problems)
    return problems


async def _preflight(judge: Judge, client: Client, asks: Sequence[Ask]) -> list[Problem]:
    where = f"judge {judge.model}"
    problems = []
    try:
        names = [str(one["id"]) for one in await client.models()]
        if judge.model not in names:
            found = f"the server does not list {judge.model!r}"
            expected = "one of: " + (", ".join(sorted(names)[:20]) or "nothing")
            return [problem("KTB871", where, found, expected)]
    except KtbridgeError as error:
        expected = "a list that names the judge"
        problems.append(problem("KTB870", where, error.sentence, expected, error.next_step))
        if has_errors(problems):
            return problems
    asker = Asker(client, judge)
    for ask in asks:
        asked = await asker.ask(ask)
        found_now = _question_problems(judge, ask, asked)
        if asked.silence:  # unreachable: it is said once, and not that the list is missing too
            return found_now
        problems += found_now
    return problems


def _question_problems(judge: Judge, ask: Ask, asked: Asked[JudgementRecord]) -> list[Problem]:
    where = f"judge {judge.model}"
    outcome, detail = asked.record["outcome"], asked.record["detail"]
    expected = "JSON with evidence and verdicts" if ask.schema else f"a digit from 0 to {HIGHEST}"
    if outcome == JUDGE_FAILED:
        next_step = asked.next_step or "start its server, or correct the URL in --judge"
        found = f"no answer from {judge.url}: {detail}"
        return [problem("KTB872", where, found, expected, next_step)]
    if outcome != "ok":
        found = f"no verdict that can be read: {detail}"
        return [problem("KTB872", where, found, expected, asked.next_step or None)]
    verdicts = ask.read(asked.record["reply"]).verdicts
    if ask.schema is None or verdicts == _CANARY_RIGHT:
        return []
    words = " and ".join("yes" if one else "no" for one in verdicts)
    found = f"asked whether {_CANARY_ANSWER!r} gives four and names a capital, it said {words}"
    return [problem("KTB873", where, found, "yes and no")]


# Leaves room for thinking; a verdict needs a tenth of it. Without a limit generation might not end.
MAX_TOKENS = 4096
# Statuses caused by authentication, rate limit or URL, not by an unsupported response_format.
_NOT_THE_FORM = {401, 403, 404, 408, 429}
_SAID_NOTHING = {
    "empty": "an empty reply",
    "think-only": "thinking without a reply",
}


class Asker:
    """Asks one judge through ``client``; remembers whether its server supports ``response_format``."""

    def __init__(self, client: Client, judge: Judge) -> None:
        self._client = client
        self._judge = judge
        self._takes_schema: bool | None = None
        given = (judge.extra_body.get(name) for name in ("max_tokens", OTHER_LIMIT))
        self._limit = next(filter(None, given), MAX_TOKENS)

    async def ask(self, ask: Ask) -> Asked[JudgementRecord]:
        """One judgement: the judge's last reply, unchanged. After an invalid one it is asked once more;
        then: parse failure."""
        messages = list(ask.messages)
        answers = [await self._chat(messages, ask.schema, ask.request)]
        fault = self._fault(ask, answers[0])
        # Digits are asked for as the public script does: once.
        if fault and answers[0].outcome != "http-error" and ask.form != "digit":
            # The same prompt at temperature 0 would give the same reply. Without the schema, because
            # a grammar that prevents thinking is one cause of empty replies.
            first_reply = answers[0].text or "(nothing)"
            messages.append({"role": "assistant", "content": first_reply})
            again = (
                f"That cannot be read: {fault}. Reply in the form that was asked for, only that."
            )
            messages.append({"role": "user", "content": again})
            answers.append(await self._chat(messages, None, ask.request))
            fault = self._fault(ask, answers[1])
        last = answers[-1]
        outcome: JudgeOutcome = "ok"
        if fault:
            outcome = JUDGE_FAILED if last.outcome == "http-error" else "parse-fail"
        record: JudgementRecord = {
            "key": ask.key,
            "form": ask.form,
            "item": ask.item.id,
            "of": ask.of,
            **ask.compared,
            "outcome": outcome,
            "reply": last.text,
            "detail": fault,
            "attempts": len(answers),
            "prompt_tokens": sum(one.prompt_tokens or 0 for one in answers),
            "completion_tokens": sum(one.completion_tokens or 0 for one in answers),
        }
        step = ""
        if outcome == JUDGE_FAILED and last.status:
            step = remedy(last.status, last.detail, "--judge-extra-body")
        elif fault and last.outcome == "think-only":
            step = think_only_remedy(self._judge.extra_body, "--judge-extra-body")
        gone = is_silent(outcome == JUDGE_FAILED, last.status, last.detail)
        return Asked(record, self._judge.url, fault if gone else "", step)

    async def _chat(
        self, messages: Sequence[Message], schema: JsonSchema | None, more: Json
    ) -> Answer:
        request: dict[str, object] = {
            "model": self._judge.model,
            "messages": [dict(one) for one in messages],
            "max_tokens": MAX_TOKENS,
            "temperature": 0,
            **more,
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
            plain = await self._client.chat(request)
            if plain.outcome != "http-error":
                self._takes_schema = False
            return plain
        return answer

    def _fault(self, ask: Ask, answer: Answer) -> str:
        """Why ``answer`` is not a valid judgement; "" if it is."""
        if answer.outcome == "http-error":
            return answer.detail or "no reply"
        if answer.outcome == "truncated" and ask.form != "digit":
            return f"a reply cut off after {self._limit} tokens"
        if answer.outcome in _SAID_NOTHING:
            return _SAID_NOTHING[answer.outcome]
        try:
            ask.read(answer.text)
        except ReplyError as error:
            return str(error)
        return ""
