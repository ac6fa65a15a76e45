"""The click classes shared by every command: lazy loading, titled options, error messages."""

from __future__ import annotations

import importlib
import logging
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import click

from ktbridge.errors import KtbridgeError, ProblemsError

_Function = TypeVar("_Function", bound=Callable[..., Any])
"""A command, or a function that is to be one."""


class Terminated(KeyboardInterrupt):
    """SIGTERM, handled like Ctrl-C, so that cleanup runs."""


class TitledOption(click.Option):
    """An option that --help lists under a title of its own."""

    def __init__(self, *args: Any, title: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.title = title


from_option = click.option(
    "--from",
    "from_format",
    default="auto",
    show_default=True,
    metavar="FORMAT",
    help="The adapter's format if it is ambiguous: as `ktbridge convert --from` has it.",
)


fail_on_option = click.option(
    "--fail-on",
    multiple=True,
    metavar="CONDITION",
    help='Exit with 1 where it holds, e.g. "KRI<-0.2"; repeat it; `ktbridge report --help` tells more.',
)
ENGINES = click.Choice(["auto", "sglang", "local"])
"""Values of --engine where a server is started."""


def output_option(parameter: str, text: str, **more: Any) -> Callable[[_Function], _Function]:
    """Add --output, by all its names, of a command that writes one directory."""
    names = ("--output", "--output-dir", "--out", parameter)
    return click.option(*names, metavar="DIR", help=text, **more)


def base_model_option(text: str = "The base model") -> Callable[[_Function], _Function]:
    """Add --base-model, which has to be given."""
    text += ": a directory, or org/name on the Hub."
    return click.option("--base-model", required=True, metavar="DIR", help=text)


def json_option(text: str = "Print JSON instead of text.") -> Callable[[_Function], _Function]:
    """Add --json, which a command gets as ``as_json``."""
    return click.option("--json", "as_json", is_flag=True, help=text)


def dry_run_option(text: str) -> Callable[[_Function], _Function]:
    """Add --dry-run; ``text`` says what is done in place of the work."""
    return click.option("--dry-run", is_flag=True, help=text)


def training_arguments(command: _Function) -> _Function:
    """Add CONFIG, its overrides and --from to a command that reads a training configuration."""
    config = click.argument("config", type=click.Path(dir_okay=False))
    overrides = click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
    return config(overrides(from_option(command)))


def run_arguments(command: _Function) -> _Function:
    """Add ``training_arguments`` and what else a command takes that runs such a configuration."""
    strict = click.option("--strict-data", is_flag=True, help="Refuse the run if any row can't be used.")
    dry_run = dry_run_option("Check everything that needs no weights, then stop.")
    return training_arguments(dry_run(strict(json_option("Print the result as JSON.")(command))))


def told_format(from_format: str) -> tuple[str, ...]:
    """The override of a training configuration that ``from_option`` stands for."""
    return () if from_format == "auto" else (f"adapter_format={from_format}",)


def named_directories(
    _: click.Context | None, parameter: click.Parameter | None, values: Sequence[str]
) -> dict[str, str]:
    """Read NAME=DIR options as a mapping. Raises BadParameter for any other, and for a NAME given twice."""
    named: dict[str, str] = {}
    for value in values:
        name, equals, directory = value.partition("=")
        if not equals or not name or not directory:
            hint = "" if equals else f" Name it as requests will: NAME={value}."
            raise click.BadParameter(f"{value!r} is not NAME=DIR.{hint}", param=parameter)
        if name in named:
            raise click.BadParameter(f"the name {name!r} is given twice.", param=parameter)
        named[name] = directory
    return named


class Command(click.Command):
    """A click command that turns ``KtbridgeError`` into a one-sentence message and an exit code.

    With ``--json``, stdout gets a document with ``ok`` false as well. ``--debug`` (or
    KTBRIDGE_DEBUG=1) lets the traceback through.
    """

    def __init__(self, *args: Any, extra: str = "", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.extra = extra
        """What it needs of pyproject.toml's extras ("train,serve")."""
        self.params.append(
            click.Option(["--debug"], is_flag=True, expose_value=False, help="Show tracebacks of failures.")
        )

    def get_help_option_names(self, ctx: click.Context) -> list[str]:
        # Not by context_settings: click keeps the option that the first context got, and one that was not
        # made by make_context (`run` reads each command's options) has no settings.
        return ["-h", "--help"]

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        own = args[: args.index("--")] if "--" in args else args
        debug = "--debug" in own or os.environ.get("KTBRIDGE_DEBUG", "") not in ("", "0")
        try:
            context = super().make_context(info_name, args, parent, **extra)
        except KtbridgeError as error:  # of a file that gives the options their defaults
            if debug:
                raise
            render(error, "--json" in own)
            sys.exit(error.exit_code)
        context.meta["ktbridge.debug"] = debug
        return context

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {"Options": []}
        for parameter in self.get_params(ctx):
            row = parameter.get_help_record(ctx)
            if row is not None and isinstance(parameter, click.Option):
                sections.setdefault(getattr(parameter, "title", "Options"), []).append(row)
        for title, rows in sections.items():
            with formatter.section(title):
                formatter.write_dl(rows)

    def invoke(self, ctx: click.Context) -> Any:
        _quiet_libraries()
        if ctx.meta.get("ktbridge.debug"):
            return super().invoke(ctx)
        try:
            return super().invoke(ctx)
        except KtbridgeError as error:
            failed = error
        except BrokenPipeError:
            # The reader closed the pipe (`| head`); that is not an error.
            _drop_stdout()
            sys.exit(1)
        except OSError as error:
            _forget_unprinted()
            where = f": {error.filename!r}" if error.filename else ""
            failed = KtbridgeError(f"{error.strerror or error}{where}")
        except ModuleNotFoundError as error:
            failed = _not_installed(error.name or str(error), self.extra)
        except KeyboardInterrupt as stop:
            failed = KtbridgeError(f"interrupted: {stop}" if str(stop) else "interrupted")
            failed.exit_code = 128 + (signal.SIGTERM if isinstance(stop, Terminated) else signal.SIGINT)
        render(failed, bool(ctx.params.get("as_json")))
        sys.exit(failed.exit_code)


def _not_installed(module: str, extra: str) -> KtbridgeError:
    """The error for a module that a command whose extra is ``extra`` doesn't find."""
    from ktbridge.install import extra_with, install_hint

    if module.partition(".")[0] in sys.stdlib_module_names:
        message = f"Python has no module {module!r} on this system, which the command needs"
        return KtbridgeError(message, "Use Linux")
    found = extra_with(module, extra)
    step = install_hint(found) if found else f"pip install {module.partition('.')[0]}"
    return KtbridgeError(f"the Python package {module!r} is not installed", step)


def _quiet_libraries() -> None:
    """Keep off the terminal what libraries say of themselves: deprecations, advice for developers.

    What a user has to know is a problem of ours. Who asked Python for warnings (-W), or for errors in their
    place, gets them; the libraries' own variables, such as TRANSFORMERS_VERBOSITY, go before ours.
    """
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    for name in ("trl", "peft", "accelerate"):
        if logging.getLogger(name).level == logging.NOTSET:
            logging.getLogger(name).setLevel(logging.ERROR)
    if sys.warnoptions or any(action == "error" for action, *_ in warnings.filters):
        return
    for category in (FutureWarning, DeprecationWarning, PendingDeprecationWarning):
        warnings.filterwarnings("ignore", category=category)


def _open_closed_streams() -> None:
    """Put /dev/null in the place of standard streams that are closed (``>&-``).

    Else Python has None for them, and the next file that is opened gets their number: what libraries and
    child processes print would be written into it.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:  # whatever has the number is nobody's stream
                os.dup2(opened, number)
                os.close(opened)
            os.set_inheritable(number, True)
            stream = open(number, "r" if number == 0 else "w", closefd=False)  # noqa: SIM115
            setattr(sys, name, stream)


def _forget_unprinted() -> None:
    """Keep Python from trying again, at its end, to print what stdout (a full disk) didn't take."""
    try:
        sys.stdout.flush()
    except OSError:
        _drop_stdout()


def _drop_stdout() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextmanager
def terminable() -> Iterator[None]:
    """Make SIGTERM end the block like Ctrl-C, unless another handler is installed."""

    def stop(number: int, frame: object) -> None:
        raise Terminated

    before = signal.getsignal(signal.SIGTERM)
    if before is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def render(error: KtbridgeError, as_json: bool = False) -> None:
    """Print an error the same way everywhere: problems first, then the message, then the next step."""
    from ktbridge.cli._ui import emit_json, print_problems, printable

    problems = error.problems if isinstance(error, ProblemsError) else ()
    print_problems(problems)
    for head, text in (("error", error.sentence), ("  next", error.next_step)):
        if text:
            lines = "\n".join(map(printable, text.rstrip(".").split("\n")))
            click.echo(f"{head}: {lines}", err=True)
    if as_json:
        found = [problem.as_dict() for problem in problems]
        summary = {"error": error.sentence, "next_step": error.next_step}
        try:
            emit_json({"ok": False, **summary, "problems": found})
        except OSError:  # stderr has it
            _forget_unprinted()


class LazyGroup(click.Group):
    """A group that shows its commands' one-line help without importing them."""

    def __init__(self, *args: Any, commands_table: dict[str, str], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._table = commands_table

    def main(self, *args: Any, **extra: Any) -> Any:
        _open_closed_streams()
        try:
            return super().main(*args, **extra)
        except OSError as error:
            if error.filename is not None:  # a command's, with --debug
                raise
            _forget_unprinted()  # --help and --version, on a full disk
            click.echo(f"error: {error.strerror}", err=True)
            sys.exit(1)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self._table)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self._table:
            return None
        return importlib.import_module(f"ktbridge.cli.{cmd_name}").command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0] if args else ""
        if name and not name.startswith("-") and name not in self._table:
            import difflib

            near = difflib.get_close_matches(name, self._table, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else " See `ktbridge --help`."
            ctx.fail(f"there is no command {name!r}.{hint}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(self._table.items()))
