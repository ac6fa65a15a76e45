"""What can stand in the way of a launch: one table of codes, beside the rules for adapters.

Codes KTB951 to KTB979; those below 950 are ``ktbridge.adapter.rules``'. ``--allow CODE`` turns an error
of this table into a warning, where the user knows better than an estimate does.
"""

from __future__ import annotations

from ktbridge.errors import Problem, Severity

# code -> (severity, what to do unless the finding knows better)
_CODES: dict[str, tuple[Severity, str]] = {
    "KTB951": ("error", "check the path"),  # an adapter can't be opened as the option says
    "KTB952": ("error", "use a version that does"),  # the version doesn't grant what is asked for
    "KTB953": ("error", "leave it out"),  # an engine flag contradicts the contract
    "KTB954": ("error", "see the engine's --help"),  # the engine's parser doesn't know a flag
    "KTB955": ("error", "choose another with --port"),  # the port can't be had
    "KTB956": ("error", "use a machine with more memory"),  # weights don't fit into RAM
    "KTB957": ("error", "use a GPU machine, or --engine local"),  # no GPU, or too small
    "KTB958": ("error", "use a CPU with AMX, or --engine local"),  # no kernel for this CPU
    "KTB959": ("info", "keep its ports off untrusted networks"),  # known vulnerabilities
    "KTB960": ("error", "read it, then pass --trust-remote-code"),  # the model brings code
    "KTB961": ("error", "set KTBRIDGE_API_KEY, or bind to 127.0.0.1"),  # public without a key
    "KTB962": ("warning", "install matching versions"),  # kt-kernel of another version
    "KTB963": ("error", "choose another name"),  # a name that requests couldn't select
    "KTB964": ("error", "correct it"),  # nodes, ranks and GPUs that don't go together
    "KTB965": ("warning", "unset it"),  # an environment variable that hides what is waited for
    "KTB966": ("error", "name the interpreter that has it with --engine-python"),  # there is no engine
    "KTB967": ("error", "use sglang-kt 0.7.0 or newer, or -- --attention-backend"
               " torch_native"),  # prompts computed with keys that aren't rotated
}  # fmt: skip

CODES = frozenset(_CODES)


def problem(
    code: str,
    where: str,
    found: str,
    expected: str = "",
    next_step: str = "",
    severity: Severity | None = None,
) -> Problem:
    """A finding of this table."""
    usual, step = _CODES[code]
    return Problem(code, severity or usual, where, found, expected, next_step or step)


def allow(problems: list[Problem], allowed: frozenset[str]) -> tuple[Problem, ...]:
    """The problems, worst first, with allowed errors as warnings. Other codes can't be allowed."""
    eased = [
        Problem(p.code, "warning", p.where, p.found, p.expected, p.next_step)
        if p.severity == "error" and p.code in allowed and p.code in _CODES
        else p
        for p in problems
    ]
    return sort_problems(eased)


def sort_problems(problems: list[Problem]) -> tuple[Problem, ...]:
    """Each problem once, the worst first."""
    order = {"error": 0, "warning": 1, "info": 2}
    return tuple(sorted(dict.fromkeys(problems), key=lambda p: order[p.severity]))
