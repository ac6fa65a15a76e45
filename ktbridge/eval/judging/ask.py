"""Request one judgement: temperature 0, a JSON schema if the server supports it, one retry."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ktbridge.eval.client import Answer, Client
from ktbridge.eval.judging.journal import FAILED, Outcome
from ktbridge.eval.judging.judge import Judge
from ktbridge.eval.judging.plan import Ask
from ktbridge.eval.judging.prompts import ReplyError

# Leaves room for thinking; a verdict needs a tenth of it. Without a limit generation might not end.
MAX_TOKENS = 4096
# Statuses caused by authentication, rate limit or URL, not by an unsupported response_format.
_NOT_THE_FORM = {401, 403, 404, 408, 429}
_SAID_NOTHING = {
    "empty": "an empty reply",
    "think-only": "thinking without a reply",
}


@dataclass(frozen=True)
class Judgement:
    """The result of one question to the judge. ``reply`` is its last text, unchanged; ``status`` is
    the HTTP status of the last answer, 0 if there was none."""

    outcome: Outcome
    reply: str
    detail: str
    attempts: int
    status: int
    prompt_tokens: int
    completion_tokens: int


class Asker:
    """Asks one judge through ``client``; remembers whether its server supports ``response_format``."""

    def __init__(self, client: Client, judge: Judge) -> None:
        self._client = client
        self._judge = judge
        self._takes_schema: bool | None = None
        self._limit = judge.extra_body.get("max_tokens", MAX_TOKENS)

    async def ask(self, ask: Ask) -> Judgement:
        """One judgement. After an invalid reply the judge is asked once more; then: parse failure."""
        messages: list[Mapping[str, str]] = list(ask.messages)
        answers = [await self._chat(messages, ask.schema)]
        fault = self._fault(ask, answers[0])
        if fault and answers[0].outcome != "http-error":
            # The same prompt at temperature 0 would give the same reply. Without the schema, because
            # a grammar that prevents thinking is one cause of empty replies.
            first_reply = answers[0].text or "(nothing)"
            messages.append({"role": "assistant", "content": first_reply})
            again = (
                f"That cannot be read: {fault}. Reply in the form that was asked for, only that."
            )
            messages.append({"role": "user", "content": again})
            answers.append(await self._chat(messages, None))
            fault = self._fault(ask, answers[1])
        last = answers[-1]
        outcome: Outcome = "ok"
        if fault:
            outcome = FAILED if last.outcome == "http-error" else "parse-fail"
        return Judgement(
            outcome,
            last.text,
            fault,
            len(answers),
            last.status,
            sum(one.prompt_tokens or 0 for one in answers),
            sum(one.completion_tokens or 0 for one in answers),
        )

    async def _chat(
        self, messages: Sequence[Mapping[str, str]], schema: dict[str, Any] | None
    ) -> Answer:
        request: dict[str, Any] = {
            "model": self._judge.model,
            "messages": [dict(one) for one in messages],
            "max_tokens": MAX_TOKENS,
            "temperature": 0,
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
        if answer.outcome == "truncated":
            return f"a reply cut off after {self._limit} tokens"
        if answer.outcome in _SAID_NOTHING:
            return _SAID_NOTHING[answer.outcome]
        try:
            ask.read(answer.text)
        except ReplyError as error:
            return str(error)
        return ""
