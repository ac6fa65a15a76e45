"""Preflight checks of the servers: is every arm really the model it names? Fails closed.

Some engines serve the base model, with HTTP 200, under any requested name. So an invented adapter
must be refused, /v1/models must list each arm, and the arms' answers to a few short probes must not
all be identical.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ktbridge.codes import problem
from ktbridge.errors import KtbridgeError, Problem, ProblemsError, has_errors
from ktbridge.eval.arms import (
    Arm,
    Listing,
    arm_card,
    arm_rank,
    check_roles,
    check_same,
    list_models,
)
from ktbridge.eval.asking import build_request, with_limit
from ktbridge.eval.bench import Bench, Item
from ktbridge.eval.results.cards import ArmCard
from ktbridge.eval.results.types import Identical
from ktbridge.files import digests
from ktbridge.server_api.client import Client
from ktbridge.server_api.failures import (
    TRANSIENT,
    WHOLE,
    Kind,
    kind_of,
    remedies,
    remedy,
    think_only_remedy,
)
from ktbridge.server_api.replies import Answer
from ktbridge.server_api.served_names import (
    BASE,
    adapter_name,
    bare_adapter,
    names_adapter,
    whole_name,
)

PROBES = 8
PROBE_TOKENS = 32
ATTEMPTS = 4  # of a request here: what is wrong shouldn't be told after minutes
_CODES: Mapping[Kind, str] = {"key": "KTB819", "quota": "KTB819", "reply": "KTB818"}


@dataclass
class Preflight:
    """The results of preflight. ``identical`` has, for each pair of arms, the share of probes with
    byte-identical answers; ``probes`` has the hash of each answer by arm fingerprint; ``notes`` say what is
    done because a server needs it."""

    cards: dict[str, ArmCard]
    identical: list[Identical] = field(default_factory=list)
    probes: dict[str, dict[str, str]] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


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
    listings = await _read_listings(clients, problems)
    cards = _make_cards(arms, listings, bench, partner, problems)
    problems += check_roles(arms, listings)
    same = check_same(arms, listings)
    problems += same
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
    items = bench.select(limit=PROBES)
    answers = await _probe(arms, clients, bench, items)
    problems += _failed_probes(answers, len(items))
    blank = _blank_arms(answers, bench)
    _stop_on_errors(problems)
    problems += blank.values()
    if len(blank) == len(arms):
        _stop_on_errors(problems)
    for name, silent in blank.items():
        cards[name]["refused"] = silent.found
    arms = [arm for arm in arms if arm.name not in blank]
    result.notes = [note for client in clients.values() for note in client.notes]
    _compare_arms(arms, answers, result)
    for arm in arms:
        fingerprint = cards[arm.name]["fingerprint"]
        hashes = {
            # A different chat template may change only the prompt length.
            name: digests.of_text(f"{one.outcome}\n{one.prompt_tokens}\n{one.text}")
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


async def _read_listings(
    clients: Mapping[str, Client], problems: list[Problem]
) -> dict[str, Listing]:
    """Return what each server says of its models, by URL."""
    listings = {}
    for url, client in clients.items():
        try:
            listings[url] = await list_models(client)
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
    return listings


def _make_cards(
    arms: Sequence[Arm],
    listings: Mapping[str, Listing],
    bench: Bench,
    partner: Arm | None,
    problems: list[Problem],
) -> dict[str, ArmCard]:
    cards = {}
    for arm in arms:
        if (listing := listings.get(arm.url)) is not None:
            if listing.find(arm.model) is None:
                problems.append(_unlisted(arm, listing, f"arm {arm.name}", "--arm"))
            else:
                cards[arm.name] = arm_card(arm, listing.entry(arm.model), bench.sampling)
    listing = listings.get(partner.url) if partner is not None else None
    if partner is not None and listing is not None and listing.find(partner.model) is None:
        problems.append(_unlisted(partner, listing, "the partner", "--partner"))
    return cards


def _unlisted(arm: Arm, listing: Listing, where: str, option: str) -> Problem:
    if arm.model in listing.entries:  # under a name that requests can't use
        error = bare_adapter(arm.model, listing.models, option)
        right = whole_name(arm.model, listing.models)
        step = f"name it, {option} {arm.name}={right}@{arm.place}"
        if option == "--partner":
            step = f"name it, {option} {right}@{arm.place}"
        return problem("KTB816", where, error.sentence.rstrip("."), repr(right), step)
    models = sorted(listing.models.items())
    names = ", ".join(f"{name} ({one.says})" if one.says else name for name, one in models)
    base = next((one.name for one in listing.models.values() if one.variant == "base"), "")
    step = f"name a listed model in {option}, or serve the adapter under that name"
    if base and arm.name == BASE:
        step = f"name the base model, {option} {arm.name}={base}@{arm.place}"
    found = f"the server does not list {arm.model!r}"
    return problem("KTB802", where, found, f"one of: {names or 'nothing'}", step)


async def _check_invented(arm: Arm, client: Client) -> Problem | None:
    invented = adapter_name(arm.served, f"no-such-adapter-{secrets.token_hex(4)}")
    answer = await client.chat(
        {"model": invented, "messages": [{"role": "user", "content": "你好"}], "max_tokens": 1},
        ATTEMPTS,
    )
    if answer.outcome != "http-error":
        return problem(
            "KTB803",
            f"arm {arm.name}",
            f"the server answered for {invented!r}, an adapter that does not exist",
            "a refusal",
        )
    if answer.status not in (400, 404, 422):
        kind = kind_of(answer.status, answer.detail)
        return problem(
            _CODES.get(kind, "KTB804"),
            f"arm {arm.name}",
            f"asked for an invented adapter, the server gave: {answer.detail}",
            "HTTP 400 or 404, which shows that it checks names",
            remedy(answer.status, answer.detail),
        )
    client.faults[f"HTTP {answer.status}"] -= 1  # the expected refusal
    return None


async def _probe(
    arms: Sequence[Arm], clients: Mapping[str, Client], bench: Bench, items: Sequence[Item]
) -> dict[str, dict[str, Answer]]:
    """The arms' answers to ``items``, by arm and item.

    It ends with the round in which an arm turns out to be hopeless: the run can't begin, and what is wrong
    shouldn't be told after minutes.
    """
    answers: dict[str, dict[str, Answer]] = {arm.name: {} for arm in arms}
    # One at a time: batching with other requests can change an answer on a real engine.
    for item in items:
        for arm in arms:
            request = with_limit(build_request(arm, item, bench), PROBE_TOKENS)
            answers[arm.name][item.id] = await clients[arm.url].chat(request, ATTEMPTS)
        if any(_is_hopeless(list(given.values())) for given in answers.values()):
            break
    return answers


def _is_hopeless(given: Sequence[Answer]) -> bool:
    """Return whether an arm's probes show that the next one would fail too."""
    kinds = [
        kind_of(one.status, one.detail) if one.outcome == "http-error" else None for one in given
    ]
    if kinds[-1] is None:
        return False
    # A server may refuse one question for what it is.
    surely = [kind in WHOLE or kind in TRANSIENT for kind in kinds]
    return (
        kinds[-1] in ("key", "quota")
        or (len(kinds) == 1 and surely[0])
        or (len(kinds) > 1 and None not in kinds[-2:] and (surely[-1] or None not in kinds))
    )


def _failed_probes(answers: Mapping[str, Mapping[str, Answer]], planned: int) -> list[Problem]:
    """A problem for each arm of which probes failed."""
    problems = []
    for name, answered in answers.items():
        given = list(answered.values())
        errors = [one for one in given if one.outcome == "http-error"]
        if not errors:
            continue
        fatal = len(errors) == len(given) or _is_hopeless(given)
        failed = f"{len(errors)} of {len(given)} probes failed"
        if len(given) < planned:
            failed = "the first probe failed" if len(given) == 1 else failed
            failed += ", and the rest was not asked"
        problems.append(
            problem(
                _CODES.get(kind_of(errors[-1].status, errors[-1].detail), "KTB805"),
                f"arm {name}",
                f"{failed}: {errors[-1].detail}",
                "an answer to each",
                remedies((one.status, one.detail) for one in errors),
                severity="error" if fatal else "warning",
            )
        )
    return problems


def _blank_arms(answers: Mapping[str, Mapping[str, Answer]], bench: Bench) -> dict[str, Problem]:
    """A problem for each arm whose answers to all probes were empty, or thinking that had an end."""
    blank = {}
    for name, given in answers.items():
        ended = [one for one in given.values() if one.outcome == "empty" or not one.cut]
        outcomes = {one.outcome for one in ended}
        if given and len(ended) == len(given) and outcomes <= {"empty", "think-only"}:
            thought = "think-only" in outcomes
            what = "reasoning alone, without an answer" if thought else "nothing"
            blank[name] = problem(
                "KTB805",
                f"arm {name}",
                f"all of {len(given)} probes were answered with {what}",
                "some text",
                think_only_remedy(bench.sampling) if thought else None,
            )
    return blank


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
