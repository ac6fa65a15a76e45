"""Multi-turn dialogues with a partner model that plays the user."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeVar
from urllib.parse import urlsplit

from ktbridge.errors import UsageError
from ktbridge.eval.arms import Arm, parse_arm
from ktbridge.eval.asking import build_request, is_dialogue
from ktbridge.eval.bench import Bench, Item, Partner
from ktbridge.eval.client import Answer, Client, Outcome
from ktbridge.eval.results.types import PartnerCard

PARTNER = "partner"
_Count = TypeVar("_Count", int, float)


@dataclass(frozen=True)
class Dialogue:
    """``answer`` has all the arm's turns as its text; ``turns`` are the messages after the item's own;
    ``url`` is the server that was asked last."""

    answer: Answer
    turns: list[dict[str, str]]
    url: str


def parse_partner(text: str) -> Arm:
    """Parse MODEL@URL. Raises UsageError if it is invalid."""
    try:
        return parse_arm(f"{PARTNER}={text}")
    except UsageError:
        raise UsageError(
            f"the partner {text!r} is not of the form MODEL@URL, with an http or https URL.",
            "write it as partner-model@http://127.0.0.1:9000",
        ) from None


def check_partner(bench: Bench, items: tuple[Item, ...], partner: Arm | None) -> None:
    """Raise UsageError if dialogues among ``items`` have no partner, or may not be sent to this one."""
    if bench.partner is None or not any(is_dialogue(item, bench) for item in items):
        return
    if partner is None:
        rest = [one.name for one in bench.slices if one.name not in bench.partner.slices]
        without = f", or leave them out with --slices {','.join(rest)}" if rest else ""
        raise UsageError(
            f"the bench {bench.name!r} has dialogues ({', '.join(bench.partner.slices)}) and no "
            "partner to hold them with.",
            f"give --partner MODEL@URL{without}",
        )
    try:
        bench.refuse_remote_judge(partner.url)
    except UsageError:
        raise UsageError(
            f"the data of {bench.name!r} is private and the partner "
            f"{urlsplit(partner.url).hostname!r} is another machine.",
            "use a partner on loopback",
        ) from None


def partner_card(partner: Arm | None) -> PartnerCard | None:
    """The partner's entry in an arm's card in run.json."""
    return {"model": partner.model, "url": partner.url} if partner else None


async def hold_dialogue(
    arm: Arm, item: Item, bench: Bench, repeat: int, partner: Arm, clients: Mapping[str, Client]
) -> Dialogue:
    """Ask turn by turn; the arm has the first turn and the last. A failed turn ends the dialogue.

    A failed request, from either side, makes its outcome http-error; an arm's turn that is empty,
    truncated or thinking only gives the whole dialogue that outcome.
    """
    assert bench.partner is not None
    turns: list[dict[str, str]] = []
    given: list[Answer] = []
    request = build_request(arm, item, bench, repeat)
    for turn in range(1, bench.partner.turns + 1):
        answer = await clients[arm.url].chat(
            {**request, "messages": [*request["messages"], *turns]}
        )
        given.append(answer)
        if answer.outcome != "ok":
            detail = f"turn {turn}" + (f": {answer.detail}" if answer.detail else "")
            return Dialogue(_whole(given, answer.outcome, detail), turns, arm.url)
        turns.append({"role": "assistant", "content": answer.text})
        if turn == bench.partner.turns:
            break
        asked = {
            **request,
            "model": partner.model,
            "messages": _seen_by_partner(item, bench.partner, turns),
        }
        reply = await clients[partner.url].chat(asked)
        if reply.outcome not in ("ok", "truncated"):
            detail = f"turn {turn}: the partner's is {reply.outcome}"
            detail += f": {reply.detail}" if reply.detail else ""
            failed = replace(_whole(given, "http-error", detail), status=reply.status)
            return Dialogue(failed, turns, partner.url)
        turns.append({"role": "user", "content": reply.text})
    return Dialogue(_whole(given, "ok", ""), turns, arm.url)


def _seen_by_partner(
    item: Item, partner: Partner, turns: list[dict[str, str]]
) -> list[dict[str, str]]:
    """The dialogue with user and assistant swapped. The instruction and the scene are a first user
    message, as many templates require one before any answer, and some support no system message."""
    scene = [message["content"] for message in item.messages if message["role"] == "system"]
    other = {"user": "assistant", "assistant": "user"}
    messages = [*item.messages, *turns]
    return [
        {"role": "user", "content": "\n\n".join([partner.system.strip(), *scene])},
        *(
            {"role": other[message["role"]], "content": message["content"]}
            for message in messages
            if message["role"] in other
        ),
    ]


def _whole(given: list[Answer], outcome: Outcome, detail: str) -> Answer:
    """One answer from an arm's turns; tokens and seconds are sums, None if a turn has none."""

    def total(counts: list[_Count | None]) -> _Count | None:
        known = [one for one in counts if one is not None]
        return sum(known[1:], known[0]) if len(known) == len(counts) else None

    seconds = total([one.seconds for one in given])
    return Answer(
        outcome,
        "\n\n".join(one.text for one in given if one.text),
        "\n\n".join(one.thinking for one in given if one.thinking),
        detail,
        given[-1].status,
        total([one.prompt_tokens for one in given]),
        total([one.completion_tokens for one in given]),
        None if seconds is None else round(seconds, 3),
    )
