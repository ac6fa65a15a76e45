"""Preflight checks that every arm is the model that it names. They fail closed.

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
from ktbridge.errors import KtbridgeError, Problem, ProblemsError, Severity, has_errors
from ktbridge.eval.arms import Arm, Listing, arm_card, arm_rank, check_roles, check_same, list_models
from ktbridge.eval.bench import Bench
from ktbridge.eval.request import EvalRequest, build_request
from ktbridge.eval.results.types import ArmCard, Identical
from ktbridge.files import digests
from ktbridge.server_api.client import Client
from ktbridge.server_api.failures import TRANSIENT, WHOLE, Kind, kind_of, remedies, remedy, think_only_remedy
from ktbridge.server_api.replies import OTHER_LIMIT, Answer
from ktbridge.server_api.served_names import BASE, adapter_name, bare_adapter, names_adapter, whole_name

PROBES = 8
PROBE_TOKENS = 32
ATTEMPTS = 4  # of a request here: what is wrong shouldn't be told after minutes
Answers = Mapping[str, Mapping[str, Answer]]  # by arm and item
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
    request: EvalRequest, clients: Mapping[str, Client], known_probes: Mapping[str, Mapping[str, str]]
) -> Preflight:
    """Run every check and return the results. Raises ProblemsError if any is an error.

    An arm that answers every probe with nothing is an error of that arm alone, if there is another:
    its card gets ``refused``, and the others can be asked. ``known_probes``: the probe hashes of
    earlier runs into the same directory, by fingerprint. For a dialogue the partner is only looked for
    in /v1/models.
    """
    arms, partner = request.arms, request.dialogue_partner
    result = Preflight({})
    problems, cards = result.problems, result.cards
    listings: dict[str, Listing] = {}
    for url, client in clients.items():
        try:
            listings[url] = await list_models(client)
        except KtbridgeError as error:
            found = error.sentence.removeprefix(url).strip().rstrip(".")
            problems.append(problem("KTB801", url, found, "a list of models", error.next_step))
    for arm in [*arms, partner] if partner else arms:
        listing = listings.get(arm.url)
        if listing is not None and listing.find(arm.model) is None:
            problems.append(_unlisted(arm, listing, arm is partner))
        elif listing is not None and arm is not partner:
            cards[arm.name] = arm_card(arm, listing.entry(arm.model), request.bench.sampling)
    problems += check_roles(arms, listings)
    problems += check_same(arms, listings)
    named = [arm for arm in arms if names_adapter(arm.model) and arm.name in cards]
    invented = await asyncio.gather(*(_check_invented(arm, clients[arm.url]) for arm in named))
    problems += filter(None, invented)
    _stop_on_errors(problems)
    answers = await _probe(request, clients)
    problems += _failed_probes(answers, len(request.bench.select(limit=PROBES)))
    blank = _blank_arms(answers, request.bench)
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
        card = cards[arm.name]
        _compare_runs(arm, card, answers, known_probes.get(card["fingerprint"], {}), result)
    _stop_on_errors([one for one in problems if one not in blank.values()])
    return result


def _stop_on_errors(problems: Sequence[Problem]) -> None:
    if has_errors(problems):
        count = sum(one.severity == "error" for one in problems)
        raise ProblemsError(f"preflight found {count} problem(s); no item was asked.", problems)


# --- what the servers list


def _unlisted(arm: Arm, listing: Listing, is_partner: bool) -> Problem:
    where = "the partner" if is_partner else f"arm {arm.name}"
    option = "--partner" if is_partner else "--arm"
    name = "" if is_partner else f"{arm.name}="
    if arm.model in listing.entries:  # under a name that requests can't use
        error = bare_adapter(arm.model, listing.models, option)
        right = whole_name(arm.model, listing.models)
        step = f"name it, {option} {name}{right}@{arm.place}"
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
    """Ask for an adapter that doesn't exist; anything but a refusal is a problem."""
    where = f"arm {arm.name}"
    invented = adapter_name(arm.served, f"no-such-adapter-{secrets.token_hex(4)}")
    messages = [{"role": "user", "content": "你好"}]
    request = {"model": invented, "messages": messages, "max_tokens": 1}
    answer = await client.chat(request, ATTEMPTS)
    if answer.outcome != "http-error":
        found = f"the server answered for {invented!r}, an adapter that does not exist"
        return problem("KTB803", where, found, "a refusal")
    if answer.status not in (400, 404, 422):
        code = _CODES.get(kind_of(answer.status, answer.detail), "KTB804")
        found = f"asked for an invented adapter, the server gave: {answer.detail}"
        expected = "HTTP 400 or 404, which shows that it checks names"
        return problem(code, where, found, expected, remedy(answer.status, answer.detail))
    client.faults[f"HTTP {answer.status}"] -= 1  # the expected refusal
    return None


# --- probes


async def _probe(request: EvalRequest, clients: Mapping[str, Client]) -> Answers:
    """The arms' answers to the probes, by arm and item.

    It ends with the round in which an arm turns out to be hopeless: the run can't begin, and what is wrong
    shouldn't be told after minutes.
    """
    answers: dict[str, dict[str, Answer]] = {arm.name: {} for arm in request.arms}
    # The same for each part of the bench, so that runs can be compared. One at a time: batching with other
    # requests can change an answer on a real engine.
    for item in request.bench.select(limit=PROBES):
        for arm in request.arms:
            body = build_request(arm, item, request.bench)
            limit = OTHER_LIMIT if OTHER_LIMIT in body else "max_tokens"
            asked = body[limit]
            body[limit] = min(PROBE_TOKENS, asked) if isinstance(asked, int) else PROBE_TOKENS
            answers[arm.name][item.id] = await clients[arm.url].chat(body, ATTEMPTS)
        if any(_is_hopeless(list(given.values())) for given in answers.values()):
            break
    return answers


def _is_hopeless(given: Sequence[Answer]) -> bool:
    """Return whether an arm's probes show that the next one would fail too."""
    # A server may refuse one question for what it is.
    kinds = [kind_of(one.status, one.detail) if one.outcome == "http-error" else None for one in given]
    last, surely = kinds[-1], kinds[-1] in WHOLE or kinds[-1] in TRANSIENT
    if last is None or last in ("key", "quota"):
        return last is not None
    return surely if len(kinds) == 1 else kinds[-2] is not None and (surely or None not in kinds)


def _failed_probes(answers: Answers, planned: int) -> list[Problem]:
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


def _blank_arms(answers: Answers, bench: Bench) -> dict[str, Problem]:
    """A problem for each arm whose answers to all probes were empty, or thinking that had an end."""
    blank = {}
    for name, given in answers.items():
        ended = all(one.outcome == "empty" or not one.cut for one in given.values())
        outcomes = {one.outcome for one in given.values()}
        if ended and outcomes and outcomes <= {"empty", "think-only"}:
            thought = "think-only" in outcomes
            what = "reasoning alone, without an answer" if thought else "nothing"
            found = f"all of {len(given)} probes were answered with {what}"
            step = think_only_remedy(bench.sampling) if thought else None
            blank[name] = problem("KTB805", f"arm {name}", found, "some text", step)
    return blank


def _compare_arms(arms: Sequence[Arm], answers: Answers, result: Preflight) -> None:
    """Each arm with each other. Identical probes stop the run where one is the last arm, which the
    verdict is about; else the arms are asked all the same, and their answers tell (KTB822).
    """
    last = sorted(arms, key=lambda arm: arm_rank(arm.name))[-1].name
    for one, other in itertools.combinations(arms, 2):
        pairs = [
            (mine, theirs)
            for key, mine in answers[one.name].items()
            if (theirs := answers[other.name][key]).outcome != "http-error" and mine.outcome != "http-error"
        ]
        if not pairs:
            continue
        where = f"arms {one.name} and {other.name}"
        same = sum((a.text, a.thinking) == (b.text, b.thinking) for a, b in pairs)
        result.identical.append({"arms": [one.name, other.name], "n": len(pairs), "share": same / len(pairs)})
        if same == len(pairs):
            found = f"adapter not applied: all {same} probe answers are byte-identical"
            severity: Severity = "error" if last in (one.name, other.name) else "warning"
            result.problems.append(problem("KTB806", where, found, "answers that differ", severity=severity))
        for a, b in pairs:
            tokens = (a.prompt_tokens, b.prompt_tokens)
            if None not in tokens and tokens[0] != tokens[1]:
                found = f"the same messages make {tokens[0]} and {tokens[1]} prompt tokens"
                result.problems.append(problem("KTB807", where, found, "one chat template for all arms"))
                break


def _compare_runs(
    arm: Arm, card: ArmCard, answers: Answers, before: Mapping[str, str], result: Preflight
) -> None:
    """Record the hashes of an arm's probe answers; if the model with this fingerprint has changed since
    ``before``, that is a problem."""
    now = {
        # A different chat template may change only the prompt length.
        name: digests.of_text(f"{one.outcome}\n{one.prompt_tokens}\n{one.text}")
        for name, one in answers[arm.name].items()
        if one.outcome != "http-error"
    }
    result.probes[card["fingerprint"]] = now
    both = before.keys() & now.keys()
    if changed := sum(before[key] != now[key] for key in both):
        found = f"{changed} of {len(both)} probe answers differ from those of the stored run"
        expected = "the same model and chat template as before behind the same name and URL"
        severity: Severity = "error" if 2 * changed > len(both) else "warning"
        card["changed"] = found
        result.problems.append(problem("KTB808", f"arm {arm.name}", found, expected, severity=severity))
