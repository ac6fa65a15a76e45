"""Execute a plan: convert, check what will be served, start, wait, serve, stop."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from ktbridge.adapter import validate_adapter
from ktbridge.adapter.engines import ENGINE
from ktbridge.errors import Problem, ProblemsError, has_errors
from ktbridge.serve.request import SglangRequest
from ktbridge.serve.sglang.adapters import convert
from ktbridge.serve.sglang.facts import Facts
from ktbridge.serve.sglang.leftovers import place
from ktbridge.serve.sglang.plan import Plan
from ktbridge.serve.sglang.supervise import GRACE_SECONDS, Engine, Progress
from ktbridge.server_api.hosts import url_from_here

# Problems that a conversion fixes: the layout isn't served as it is.
_LAYOUT = "KTB901"


def check_sources(plan: Plan, facts: Facts, allow_other_base: bool = False) -> list[Problem]:
    """Check the given adapters against the engine's rules; headers only.

    The layout of adapters that the plan converts is not a problem.
    """
    if not facts.sources:
        return []
    report = validate_adapter(
        list(dict.fromkeys(source.path for source in facts.sources)),
        base_model=facts.model_path,
        engine=f"{ENGINE}=={plan.version}",
        structure_only=True,
        allow_other_base=allow_other_base,
    )
    # KTB901 is planned for: a layout that can't be served is a problem of the plan already.
    return [found for found in report.problems if found.code != _LAYOUT]


def prepare(
    plan: Plan,
    facts: Facts,
    on_step: Callable[[str], None] = lambda _: None,
    allow_other_base: bool = False,
) -> list[Problem]:
    """Make the conversions and check what will be served, values too. Returns warnings.

    Raises ProblemsError when the engine would refuse or silently ignore something.
    """
    for step in plan.conversions:
        on_step(f"converting to the {step.layout} layout")
        made = convert(step)
        on_step(f"{'wrote' if made else 'found'} {step.target}")
    if not plan.directories:
        return []
    on_step("checking the adapter")
    directories = list(dict.fromkeys(plan.directories))
    report = validate_adapter(
        directories,
        base_model=facts.model_path,
        engine=f"{ENGINE}=={plan.version}",
        allow_other_base=allow_other_base,
    )
    if has_errors(report.problems):
        raise ProblemsError(
            f"{ENGINE} {plan.version} would not serve this adapter as it was trained",
            report.problems,
            "see the problems above",
        )
    return [found for found in report.problems if found.severity != "info"]


def default_log(port: int) -> Path:
    """$XDG_STATE_HOME/ktbridge/logs/serve-PORT-TIME.log, or below ~/.local/state."""
    home = Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser()
    stamp = time.strftime("%Y%m%d-%H%M%S")
    return home / "ktbridge" / "logs" / f"serve-{port}-{stamp}.log"


def serve(
    plan: Plan,
    request: SglangRequest,
    *,
    log: Path,
    timeout: float,
    grace: float = GRACE_SECONDS,
    on_progress: Callable[[Progress], None] = lambda _: None,
    on_ready: Callable[[str], None] = lambda _: None,
) -> int:
    """Start the engine of ``plan`` and serve until it ends or KeyboardInterrupt is raised here.

    ``on_ready(base_url)`` is called when requests are answered with the adapter. Returns the
    engine's exit code (128 + n where signal n ended it) after an interrupt, 0 when it ended well.
    Raises EngineFailed otherwise. Nothing of the engine is left running, whatever happens.
    """
    url = f"{url_from_here(plan.host, plan.port)}/v1"
    with ExitStack() as stack, ExitStack() as key:
        home = stack.enter_context(place())
        key_flags = key.enter_context(home.key_file(request.api_key))
        engine = stack.enter_context(
            Engine(
                (*plan.argv, *key_flags),
                plan.environment,
                plan.ready,
                url=url,
                log=log,
                secret=request.api_key,
                grace=grace,
                home=home,
            )
        )
        try:
            engine.wait_until_ready(timeout, on_progress)
            key.close()  # the engine has read it
            on_ready(url)
            return engine.wait()
        except KeyboardInterrupt:
            return engine.end()
