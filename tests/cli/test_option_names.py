"""One name for one thing in all commands; names of earlier versions stay accepted.

``NAMES`` lists every option there is. An option that isn't there fails, so that whoever adds one looks here
for the name that the thing has already.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import click
from click.testing import CliRunner

import ktbridge
from ktbridge.cli import COMMANDS, main

# What each name means wherever it stands.
NAMES = {
    "the base model's directory": "--base-model",
    "an adapter": "--adapter --expert-adapter --nonexpert-adapter --merged-adapter",
    "a running server": "--server",
    "a merged checkpoint": "--merged",
    "a name that a server serves": "--model --expert-model",
    "names and addresses of what is served": "--served-model-name --host --port --api-key",
    "where something is written": "--output --html --expert-output-dir --nonexpert-output-dir "
                                  "--merged-output-dir --log",
    "what may be written over": "--overwrite",
    "threads of this process": "--threads",
    "another machine": "--cores --memory --gpus --gpu-memory",
    "the engine": "--engine --engine-version --engine-python --layout --trust-remote-code --tp-size "
                  "--allow --allow-other-base",
    "limits of the embedded engine": "--max-running --max-waiting --context-length --prefill-chunk "
                                     "--max-n --max-body-mib --body-seconds --drain-seconds",
    "one answer": "--system --temperature --max-tokens --seed --extra-body --judge-extra-body",
    "time and number of requests": "--timeout --concurrency --repeat",
    "formats of adapters": "--to --from --lora-alpha --dtype --unwrap",
    "how much is checked or measured": "--structure-only --strict --strict-data --measure --no-measure "
                                       "--quick --logprobs-from --reload",
    "an evaluation": "--bench --compat --items --train-data --arm --slices --limit --partner --judge "
                     "--no-judge --judge-pairs --judge-may-be-remote --fail-on --resume",
    "a repository on the Hub": "--private --revision --eval",
    "several runs": "--sweep",
    "which demo": "--tiny",
    "what is printed": "--dry-run --json --markdown --github --debug --help",
}  # fmt: skip

# Names of earlier versions, and the one that the thing has now.
OLD = {
    "--base-url": "--server",
    "--dir": "--output",
    "--out": "--output",
    "--output-dir": "--output",
    "--base-model-name-or-path": "--base-model",
}
SERVED_NAME_ONCE = {("serve", "--model"): "--base-model"}


def options() -> Iterator[tuple[str, click.Option]]:
    for name in COMMANDS:
        command = main.get_command(click.Context(main), name)
        assert command is not None
        for parameter in command.get_params(click.Context(command)):
            if isinstance(parameter, click.Option):
                yield name, parameter


def long_names(option: click.Option) -> list[str]:
    return [name for name in (*option.opts, *option.secondary_opts) if name.startswith("--")]


def option_of(command: str, name: str) -> click.Option:
    return next(o for c, o in options() if c == command and name in long_names(o))


def test_every_option_has_a_name_from_the_table() -> None:
    known = {name for names in NAMES.values() for name in names.split()}
    strange = [
        f"{command} {name}"
        for command, option in options()
        for name in long_names(option)[:1]
        if name not in known
    ]
    assert strange == [], "is there a name for it in NAMES already? else add it there"


def test_old_names_never_come_first() -> None:
    first = {(command, long_names(option)[0]) for command, option in options()}
    old = {pair for pair in first if pair[1] in OLD or pair in SERVED_NAME_ONCE}
    assert old == set()
    for command, option in options():
        for name in long_names(option)[1:]:
            now = SERVED_NAME_ONCE.get((command, name)) or OLD.get(name)
            assert now == long_names(option)[0], f"{command} {name}"


def test_names_of_earlier_versions_are_still_taken() -> None:
    for command, old in (("serve", "--model"), ("chat", "--base-url"), ("demo", "--dir")):
        assert old in long_names(option_of(command, SERVED_NAME_ONCE.get((command, old)) or OLD[old]))


def test_a_model_without_a_server_is_a_base_model() -> None:
    """What `ktbridge chat --model DIR` was; the same complaint comes from the same place."""
    said = [
        CliRunner().invoke(main, ["chat", option, "no/such/model"], input="hi\n").stderr
        for option in ("--model", "--base-model")
    ]
    assert said[0] == said[1]
    assert "the engine ended with code 1 before it was ready" in said[0]


def test_another_machine_is_described_alike() -> None:
    for name in NAMES["another machine"].split():
        plan, serve = option_of("plan", name), option_of("serve", name)
        assert plan.to_info_dict() == serve.to_info_dict()


def test_commands_in_texts_use_the_names_of_today() -> None:
    sources = Path(ktbridge.__file__).parent
    texts = [*sources.rglob("*.py"), *(sources.parent / "docs").glob("*.md")]
    wrong = re.compile(
        r"ktbridge serve[^`\n]* --model |ktbridge (?:chat|verify)[^`\n]* --base-url "
        r"|ktbridge demo[^`\n]* --dir "
    )
    found = [
        f"{path.name}: {line.strip()}"
        for path in texts
        for line in path.read_text(encoding="utf-8").splitlines()
        if wrong.search(line)
    ]
    assert found == []


def test_help_of_serve_lists_each_engines_options_under_its_title() -> None:
    """What a title has under it is what the other engine refuses."""
    shown = CliRunner().invoke(main, ["serve", "--help"]).output
    common, local, sglang = re.split(r"\nOptions of .*:\n", shown)
    assert "--host HOST" in common
    assert "ENGINE FLAGS" not in common.partition("\nOptions:")[2]
    for option in NAMES["limits of the embedded engine"].split():
        assert f"  {option} " in local
        refused = CliRunner().invoke(main, ["serve", "--model", "m", "--engine", "sglang", option, "1"])
        assert f"{option}: for the local engine only" in refused.stderr
    for option, value in (
        ("--tp-size", "2"),
        ("--log", "x"),
        ("--cores", "4"),
        ("--allow", "KTB956"),
    ):
        assert f"  {option} " in sglang
        refused = CliRunner().invoke(main, ["serve", "--model", "m", "--engine", "local", option, value])
        assert f"{option}: not for the local engine" in refused.stderr
    assert len(re.findall(r"^  --", local, re.MULTILINE)) == 8
    assert len(re.findall(r"^  --", sglang, re.MULTILINE)) == 12
