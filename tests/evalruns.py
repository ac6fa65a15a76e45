"""Short evaluations for tests: 84 items of nekobench, asked of a mock server with quick retries."""

from __future__ import annotations

from pathlib import Path

from click.testing import CliRunner

from ktbridge.eval import collect, load_bench, parse_arms

SMALL = Path(__file__).with_name("eval") / "small"
BENCH = load_bench(SMALL)


def run(server, out, **options):
    """One invocation against ``server``: 16 items of all its arms, unless told otherwise."""
    arms = parse_arms(options.pop("arms", server.arms))
    bench = options.pop("bench", BENCH)
    return collect(bench, arms, out, backoff=0.001, **{"concurrency": 8, "limit": 16, **options})


def prompt_of(request):
    return request["messages"][-1]["content"]


def is_item(request):
    """Whether this asks an item, not a probe (short) or the invented adapter (shorter)."""
    return request["max_tokens"] > 32


def invoke(command, *words):
    return CliRunner().invoke(command, [str(word) for word in words], standalone_mode=False)


def arm_words(server):
    """The command line's words for the arms of ``server``."""
    return [word for arm in server.arms for word in ("--arm", arm)]
