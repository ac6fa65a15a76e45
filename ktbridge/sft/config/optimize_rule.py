"""KTransformers' older optimize rules: a list of which modules are replaced by what, and where they run.

Two things in it are used: the backend that the experts' rule names, and the device of each
rule that selects modules by name. Everything else chooses classes of KTransformers' own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from ktbridge.sft.config.findings import Findings

KEY = "kt_optimize_rule"
_DEVICE = re.compile(r"cpu|cuda(:[0-9]+)?")
_EXPERTS = "KTransformersExperts"
_LINEAR = "torch.nn.Linear"


def read_rules(
    path: Path, findings: Findings
) -> tuple[tuple[tuple[str, str], ...], tuple[str, ...]]:
    """(regular expression, device) of the rules that place modules, and the experts' backends.

    Both in the file's order, without repetitions. Problems in the file become errors that name the
    rule; rules that are ignored become one note.
    """
    try:
        rules = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        findings.error(
            KEY, f"{path} can't be read: {' '.join(str(error).split())}", "a YAML list of rules"
        )
        return (), ()
    if not isinstance(rules, list):
        findings.error(KEY, f"{path} holds a {type(rules).__name__}", "a list of match and replace")
        return (), ()
    devices: list[tuple[str, str]] = []
    backends: list[str] = []
    unused: list[int] = []
    for number, rule in enumerate(rules, 1):
        parts = _parts(rule)
        if parts is None:
            findings.error(KEY, f"rule {number} of {path} has no match and replace", "both")
            continue
        name, kind, target, options = parts
        if target.endswith(_EXPERTS):
            if isinstance(backend := options.get("backend"), str):
                backends.append(backend)
            if str(options.get("generate_device", "cpu")) != "cpu":
                unused.append(number)
            continue
        device = options.get("generate_device", options.get("prefill_device"))
        if name is None or kind not in (None, _LINEAR) or device is None:
            unused.append(number)
            continue
        if why := _why_wrong(name, device):
            findings.error(KEY, f"rule {number} of {path}: {why[0]}", why[1])
            continue
        devices.append((name, str(device)))
    if unused:
        findings.note(
            KEY,
            f"{len(unused)} of {len(rules)} rules in {path.name} have nothing that is used (rule "
            f"{', '.join(map(str, unused[:8]))}{', …' if len(unused) > 8 else ''})",
            "the experts' backend, and devices of modules by name",
            "Leave it out unless layers must be spread over several GPUs: without it all but the experts "
            "is on the first GPU.",
        )
    return tuple(dict.fromkeys(devices)), tuple(dict.fromkeys(backends))


def _parts(rule: Any) -> tuple[str | None, str | None, str, Mapping[str, Any]] | None:
    """Name and class that are matched, the class that replaces, and its options."""
    if not isinstance(rule, Mapping):
        return None
    match, replace = rule.get("match"), rule.get("replace")
    if not isinstance(match, Mapping) or not isinstance(replace, Mapping):
        return None
    name, kind = match.get("name"), match.get("class")
    options = replace.get("kwargs") or {}
    if not isinstance(options, Mapping):
        return None
    return (
        name if name is None else str(name),
        kind if kind is None else str(kind),
        str(replace.get("class", "default")),
        options,
    )


def _why_wrong(name: str, device: Any) -> tuple[str, str] | None:
    try:
        re.compile(name)
    except re.error as error:
        return f"{name!r} is no regular expression ({error})", "a regular expression"
    if not isinstance(device, str) or not _DEVICE.fullmatch(device):
        return f"{device!r} is no device", "cpu, cuda or cuda:N"
    return None
