"""Words of a report in any format: its header (models, date, bench, items), axes and glossary."""

from __future__ import annotations

from collections.abc import Sequence

from ktbridge.eval.results.types import Results
from ktbridge.server_api.served_names import BASE, split_name

TITLES = {"persona": "Persona", "task": "Task quality", "judge": "Judged quality"}
_METRICS = {"rouge-1": "ROUGE-1", "rouge-2": "ROUGE-2", "rouge-l": "ROUGE-L"}
_METRICS |= {"bleu-4": "BLEU-4", "chrf": "chrF"}
_SCORERS_NAMED = 6


def report_header(results: Results) -> list[tuple[str, str]]:
    """(label, value) pairs of the run: model, adapter, date, bench, arms, items."""
    bench, cards = results["bench"], results["arms"]
    models, adapters = [], []
    for card in cards:
        served, adapter = split_name(card["model"])
        root = str(card["server"].get("root") or "")
        models.append(served if root in ("", served) else f"{served} ({root})")
        adapters += [adapter] if adapter not in (None, "", BASE) else []
    planned = f"{results['plan']['items']} planned, " if results["plan"] else ""
    counts = (
        f"{results['asked']} asked, {results['valid']} compared, of the bench's {bench['items']}"
    )
    return [
        ("Model", ", ".join(dict.fromkeys(models)) or "unknown"),
        ("Adapter", ", ".join(dict.fromkeys(adapters)) or "none named by the servers"),
        ("Date", results["date"] or "not recorded"),
        ("Bench", f"{bench['name']} {bench['version']}".strip()),
        ("Arms", ", ".join(f"{card['name']} = {card['model']}" for card in cards) or "none"),
        ("Items", planned + counts),
    ]


def axis_description(results: Results, axis: str) -> str:
    """Return how an axis is measured, in a few words."""
    if axis == "persona":
        return "by rules for address, tics and character, not for sense"
    if axis == "judge":
        if results["judge"] and results["judge"].get("digits"):  # of the public NekoBench
            return "the judge's digit from 0 to 5, divided by 5"
        return "share of the judge's yes/no questions answered yes"
    slices = [one for one in results["bench"]["slices"] if one["primary"] == "task"]
    checks = list(dict.fromkeys(check for one in slices for check in one["checks"]))
    if len(checks) == 1:
        name, _, metric = checks[0].rstrip(")").partition(" (")
        if name == "references":
            return f"{_METRICS.get(metric, metric)} with the reference it is nearest to"
        return f"the check {checks[0]!r}"
    more = f" and {len(checks) - _SCORERS_NAMED} more" if len(checks) > _SCORERS_NAMED else ""
    return f"mean of each item's checks: {', '.join(checks[:_SCORERS_NAMED])}{more}"


_OF_AXIS = {
    "persona": ("term of address", "tic", "out of character"),
    "judge": ("flipped", "anchors"),
}
TERMS = {
    "arm": "one thing under evaluation: base (no adapter), expert (its expert LoRA alone), full (all of "
    "it), or whatever name the command gave",
    "[95 %]": "the interval in which the true mean lies in 95 of 100 such evaluations",
    "adjusted p": "how often chance alone gives a difference like this: of a whole axis as it is, of the "
    "axis's own slices by Benjamini–Hochberg, of other arms and other axes by Holm",
    "improved, dropped": "the interval excludes 0 and p is below 0.05; of a slice the adjusted p is at most "
    "0.10, so that about one in ten such names is false",
    "may have improved, may have dropped": "the interval excludes 0, but the adjusted p is too large or the "
    "run was not made to find this; one interval in 40 does so by chance in each direction",
    "within margin": "a loss of the bench's margin or more is excluded (of the persona, a change of that "
    "size either way)",
    "inconclusive": "these items show neither a change nor its absence; see detectable",
    "detectable": "the smallest true change that these items would show in 8 of 10 runs, given their "
    "spread and the number of comparisons; none: so few items that no change would show",
    "gained / lost": "yes/no items that only the later arm, or only the earlier one, has right, with "
    "McNemar's p",
    "term of address": "what the persona calls the user, as persona.yaml lists it (主人, Master)",
    "tic": "a word that the persona puts into its sentences, as persona.yaml lists it (喵, nya)",
    "out of character": "an answer with a phrase that the persona would never say (as an AI model), "
    "which then earns no persona mark",
    "ok": "a finished answer; only these are scored",
    "truncated": "cut off at the token limit; not scored",
    "think-only": "nothing but thinking; not scored",
    "empty": "nothing at all; not scored",
    "http-error": "the request failed after every attempt; not scored, asked again by the next run",
    "score-error": "an answer on which a scorer failed; a fault of ktbridge, not of the arm",
    "not-run": "not asked yet",
    "byte-identical": "the same text to the last character",
    "could be read": "the answer holds the letter, number or JSON that is to be marked",
    "length ratio": "characters of the answers over characters of the references",
    "flipped": "the judge chose the other answer when the two changed places; counted as a tie",
    "anchors": "answers of known worth among those that the judge is shown; it is believed only if it "
    "tells them apart",
    "fingerprint": "a hash of what the server says of the model, and of the sampling",
    "cluster": "items that are not independent, such as two wordings of one question; counted as one",
}


def terms_for(axes: Sequence[str]) -> dict[str, str]:
    """``TERMS`` without those of axes that the report doesn't have."""
    absent = {term for axis, terms in _OF_AXIS.items() if axis not in axes for term in terms}
    return {term: meaning for term, meaning in TERMS.items() if term not in absent}
