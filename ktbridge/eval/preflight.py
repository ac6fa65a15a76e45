"""Preflight checks of the servers: is every arm really the model it names? Fails closed.

Some engines serve the base model, with HTTP 200, under any requested name. So an invented adapter
must be refused, /v1/models must list each arm, and the arms' answers to a few short probes must not
all be identical.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ktbridge.codes import problem
from ktbridge.errors import KtbridgeError, Problem, ProblemsError, has_errors
from ktbridge.eval.arms import Arm, arm_card, arm_rank
from ktbridge.eval.asking import build_request as build_request
from ktbridge.eval.bench import Bench, Item
from ktbridge.eval.client import Answer, Client, ModelEntry, remedies, remedy
from ktbridge.eval.results.cards import ArmCard
from ktbridge.eval.results.types import Identical
from ktbridge.served_names import adapter_name, listed_as, names_adapter

PROBES = 8
PROBE_TOKENS = 32


@dataclass
class Preflight:
    """The results of preflight. ``identical`` has, for each pair of arms, the share of probes with
    byte-identical answers; ``probes`` has the hash of each answer by arm fingerprint."""

    cards: dict[str, ArmCard]
    identical: list[Identical] = field(default_factory=list)
    probes: dict[str, dict[str, str]] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)


async def check_arms(
    arms: Sequence[Arm],
    clients: Mapping[str, Client],
    bench: Bench,
    known_probes: Mapping[str, Mapping[str, str]],
    partner: Arm | None = None,
) -> Preflight:
    """Run every check and return the results. Raises ProblemsError if any is an error.

    An arm that answers every probe with nothing is an error of that arm alone, if there is another:
    its card gets ``refused``, and the others can be asked. ``known_probes``: the probe hashes of
    earlier runs into the same directory, by fingerprint. For a dialogue ``partner`` only its presence
    in /v1/models is checked.
    """
    problems: list[Problem] = []
    cards = await _read_cards(arms, clients, bench, partner, problems)
    invented = await asyncio.gather(
        *(
            _check_invented(arm, clients[arm.url])
            for arm in arms
            if names_adapter(arm.model) and arm.name in cards
        )
    )
    problems += [problem for problem in invented if problem]
    _stop_on_errors(problems)
    result = Preflight(cards, problems=problems)
    # The probes don't depend on which part of the bench is asked, so that runs can be compared.
    answers = await _probe(arms, clients, bench, bench.select(limit=PROBES), problems)
    blank = _blank_arms(answers)
    _stop_on_errors(problems)
    problems += blank.values()
    if len(blank) == len(arms):
        _stop_on_errors(problems)
    for name, silent in blank.items():
        cards[name]["refused"] = silent.found
    arms = [arm for arm in arms if arm.name not in blank]
    _compare_arms(arms, answers, result)
    for arm in arms:
        fingerprint = cards[arm.name]["fingerprint"]
        hashes = {
            # A different chat template may change only the prompt length.
            name: hashlib.sha256(
                f"{one.outcome}\n{one.prompt_tokens}\n{one.text}".encode()
            ).hexdigest()
            for name, one in answers[arm.name].items()
            if one.outcome != "http-error"
        }
        _compare_times(arm, known_probes.get(fingerprint, {}), hashes, problems)
        result.probes[fingerprint] = hashes
    _stop_on_errors([one for one in problems if one not in blank.values()])
    return result


def _stop_on_errors(problems: Sequence[Problem]) -> None:
    if has_errors(problems):
        count = sum(one.severity == "error" for one in problems)
        raise ProblemsError(f"preflight found {count} problem(s); no item was asked.", problems)


async def _read_cards(
    arms: Sequence[Arm],
    clients: Mapping[str, Client],
    bench: Bench,
    partner: Arm | None,
    problems: list[Problem],
) -> dict[str, ArmCard]:
    cards = {}
    for url, client in clients.items():
        try:
            listed = {str(entry["id"]): entry for entry in await client.models()}
        except KtbridgeError as error:
            problems.append(
                problem(
                    "KTB801",
                    url,
                    error.sentence.removeprefix(url).strip().rstrip("."),
                    "a list of models",
                    error.next_step,
                )
            )
            continue
        for arm in arms:
            if arm.url == url:
                entry = _entry(arm, listed, f"arm {arm.name}", "--arm", problems)
                if entry is not None:
                    cards[arm.name] = arm_card(arm, entry, bench.sampling)
        if partner is not None and partner.url == url:
            _entry(partner, listed, "the partner", "--partner", problems)
    return cards


def _entry(
    arm: Arm, listed: Mapping[str, ModelEntry], where: str, option: str, problems: list[Problem]
) -> ModelEntry | None:
    name = listed_as(arm.model, listed)
    entry: ModelEntry | None = None if name is None else listed[name]
    if entry is None:
        names = ", ".join(sorted(listed)) or "nothing"
        problems.append(
            problem(
                "KTB802",
                where,
                f"the server does not list {arm.model!r}",
                f"one of: {names}",
                f"name a listed model in {option}, or serve the adapter under that name",
            )
        )
    return entry


async def _check_invented(arm: Arm, client: Client) -> Problem | None:
    invented = adapter_name(arm.served, f"no-such-adapter-{secrets.token_hex(4)}")
    answer = await client.chat(
        {"model": invented, "messages": [{"role": "user", "content": "你好"}], "max_tokens": 1}
    )
    if answer.outcome != "http-error":
        return problem(
            "KTB803",
            f"arm {arm.name}",
            f"the server answered for {invented!r}, an adapter that does not exist",
            "a refusal",
        )
    if answer.status not in (400, 404, 422):
        return problem(
            "KTB804",
            f"arm {arm.name}",
            f"asked for an invented adapter, the server gave: {answer.detail}",
            "HTTP 400 or 404, which shows that it checks names",
            remedy(answer.status, answer.detail),
        )
    client.faults[f"HTTP {answer.status}"] -= 1  # the expected refusal
    return None


async def _probe(
    arms: Sequence[Arm],
    clients: Mapping[str, Client],
    bench: Bench,
    items: Sequence[Item],
    problems: list[Problem],
) -> dict[str, dict[str, Answer]]:
    answers: dict[str, dict[str, Answer]] = {arm.name: {} for arm in arms}
    # One at a time: batching with other requests can change an answer on a real engine.
    for item in items:
        for arm in arms:
            request = build_request(arm, item, bench)
            request["max_tokens"] = min(PROBE_TOKENS, item.max_tokens)
            answers[arm.name][item.id] = await clients[arm.url].chat(request)
    for arm in arms:
        given = list(answers[arm.name].values())
        errors = [one for one in given if one.outcome == "http-error"]
        if errors:
            problems.append(
                problem(
                    "KTB805",
                    f"arm {arm.name}",
                    f"{len(errors)} of {len(given)} probes failed: {errors[0].detail}",
                    "an answer to each",
                    remedies((one.status, one.detail) for one in errors),
                    severity="error" if len(errors) == len(given) else "warning",
                )
            )
    return answers


def _blank_arms(answers: Mapping[str, Mapping[str, Answer]]) -> dict[str, Problem]:
    """A problem for each arm whose answers to all probes were empty."""
    return {
        name: problem(
            "KTB805",
            f"arm {name}",
            f"all of {len(given)} probes were answered with nothing",
            "some text",
        )
        for name, given in answers.items()
        if given and all(one.outcome == "empty" for one in given.values())
    }


def _compare_arms(
    arms: Sequence[Arm], answers: Mapping[str, Mapping[str, Answer]], result: Preflight
) -> None:
    """Each arm with each other. Identical probes stop the run where one is the last arm, which the
    verdict is about; else the arms are asked all the same, and their answers tell (KTB822).
    """
    last = sorted(arms, key=lambda arm: arm_rank(arm.name))[-1].name
    for one, other in itertools.combinations(arms, 2):
        pairs = [
            (mine, theirs)
            for key, mine in answers[one.name].items()
            if (theirs := answers[other.name][key]).outcome != "http-error"
            and mine.outcome != "http-error"
        ]
        if not pairs:
            continue
        same = sum((a.text, a.thinking) == (b.text, b.thinking) for a, b in pairs)
        result.identical.append(
            {"arms": [one.name, other.name], "n": len(pairs), "share": same / len(pairs)}
        )
        where = f"arms {one.name} and {other.name}"
        if same == len(pairs):
            result.problems.append(
                problem(
                    "KTB806",
                    where,
                    f"adapter not applied: all {same} probe answers are byte-identical",
                    "answers that differ",
                    severity="error" if last in (one.name, other.name) else "warning",
                )
            )
        drift = [
            (a.prompt_tokens, b.prompt_tokens)
            for a, b in pairs
            if None not in (a.prompt_tokens, b.prompt_tokens) and a.prompt_tokens != b.prompt_tokens
        ]
        if drift:
            result.problems.append(
                problem(
                    "KTB807",
                    where,
                    f"the same messages make {drift[0][0]} and {drift[0][1]} prompt tokens",
                    "one chat template for all arms",
                )
            )


def _compare_times(
    arm: Arm, before: Mapping[str, str], now: Mapping[str, str], problems: list[Problem]
) -> None:
    """Has the model with this fingerprint changed since answers were stored for it?"""
    both = before.keys() & now.keys()
    changed = sum(before[key] != now[key] for key in both)
    if changed:
        problems.append(
            problem(
                "KTB808",
                f"arm {arm.name}",
                f"{changed} of {len(both)} probe answers differ from those of the stored run",
                "the same model and chat template as before behind the same name and URL",
                severity="error" if 2 * changed > len(both) else "warning",
            )
        )
