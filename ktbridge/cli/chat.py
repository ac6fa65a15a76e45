"""`ktbridge chat`: interactive chat with a model, switching between its arms."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, nullcontext
from io import TextIOWrapper
from typing import TYPE_CHECKING, Any

import click
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ktbridge.cli._app import ENGINES, Command, Terminated, from_option, render, terminable
from ktbridge.cli._hub import ensure_model
from ktbridge.cli._inference import for_chat, from_file, inference_argument, inference_of
from ktbridge.cli._ui import console, printable, shown
from ktbridge.errors import KtbridgeError, UsageError
from ktbridge.model import find_model
from ktbridge.model.jsonfile import read_json_file
from ktbridge.serve.chat import ADAPTER, Conversation, arms_of, default_model, engine
from ktbridge.server_api.client import OpenAIClient
from ktbridge.server_api.served_names import adapter_name, engine_of, read_models, split_name

if TYPE_CHECKING:
    from ktbridge.predict.inference import Inference
    from ktbridge.serve.chat import Child, Conversation

_EMPTY_THOUGHT = re.compile(r"\A\s*<think>\s*</think>\s*")
HELP = """\
/base /expert /full   let that arm answer from now on
/compare [QUESTION]   ask every arm, side by side (default: the last question); leaves no trace
/system [TEXT]        set the system message, or show it; /system - for none
/clear                forget the conversation
/help                 this
/quit                 leave (or Ctrl-D); Ctrl-C ends an answer, or a line"""


@click.command(cls=Command)
@inference_argument(for_chat, chat=True)
@click.option(
    "--server",
    "--base-url",
    "server",
    metavar="URL",
    help="A running server to ask, such as http://127.0.0.1:8000.",
)
@click.option(
    "--model", metavar="NAME", help="With --server: the served name. Without: the same as --base-model."
)
@click.option(
    "--base-model",
    metavar="DIR",
    help="Start an engine with this base model: a directory, or org/name on the Hub.",
)
@click.option("--adapter", metavar="DIR", help="With --base-model: its adapter, of any format.")
@from_option
@click.option("--system", metavar="TEXT", help="The system message.")
@click.option(
    "--temperature",
    type=click.FloatRange(0, 2),
    help="Default: the server's, or 0 for a base that asks for no sampling.",
)
@click.option(
    "--max-tokens", type=click.IntRange(1), help="Of an answer.  [default: 1024, or what the context leaves]"
)
@click.option("--seed", type=int, help="Repeatable answers.")
@click.option("--threads", type=click.IntRange(1), help="With --base-model: CPU threads.")
@click.option("--engine", type=ENGINES, help="With --base-model: as `ktbridge serve` has it.")
@click.option("--api-key", envvar="KTBRIDGE_API_KEY", metavar="KEY", help="Better in the environment.")
@click.pass_context
def command(context: click.Context, **options: Any) -> None:
    """Chat with a served model, or with a base model's directory and its adapter.

    With --base-model the embedded engine is started for the chat and ends with it. The adapter may have
    any format that `ktbridge convert` reads. CONFIG is LLaMA-Factory's inference YAML; options win over
    it. /help shows what
    can be typed; on a pipe every line is a question (or a command), and answers go to stdout. The exit
    code is 1 if a line from a pipe failed.

    \b
    ktbridge chat --base-model MODEL --adapter OUTPUT/adapter
    ktbridge chat --server http://127.0.0.1:8000 --model tiny:neko
    ktbridge chat inference.yaml --temperature 0
    """
    _prefer_options(context, options)
    found = inference_of(context)
    options["top_p"] = found.top_p if found else None
    _check_options(options)
    for stream, errors in ((sys.stdin, "surrogateescape"), (sys.stdout, "replace")):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors=errors)
    with terminable(), ExitStack() as stack:
        child = None
        if options["server"] is None:
            base_model = options["base_model"] or options["model"]
            ensure_model(base_model)
            flags = _engine_flags(options, inference_of(context))
            child = stack.enter_context(engine(base_model, options["adapter"], options["threads"], flags))
        failed = _converse(_conversation(options, child), child)
    sys.exit(1 if failed and not sys.stdin.isatty() else 0)


def _prefer_options(context: click.Context, options: dict[str, Any]) -> None:
    """Drop a file's settings of an engine where the command line names a server or another model."""
    names: tuple[str, ...] = ("base_model", "adapter", "threads", "engine")
    if options["server"] is None:
        names = () if options["model"] is None else ("base_model",)
    for name in names:
        if from_file(context, name):
            options[name] = None


def _engine_flags(options: Mapping[str, Any], file: Inference | None) -> list[str]:
    """Options of `ktbridge serve` for the engine that is asked for."""
    engine = options["engine"]
    trusting = engine == "sglang" and file is not None and file.trust_remote_code
    flags = ["--from", options["from_format"]] if options["adapter"] is not None else []
    flags += [] if engine is None else ["--engine", engine]
    return [*flags, *(["--trust-remote-code"] if trusting else [])]


def _check_options(options: Mapping[str, Any]) -> None:
    """Raises UsageError unless they name either a server or a model to start an engine with."""
    if options["server"] is not None:
        own = ("base_model", "adapter", "threads", "engine")
        if any(options[name] is not None for name in own):
            raise UsageError(
                "--base-model, --adapter, --threads and --engine are for an engine that chat starts; a "
                "server has its own.",
                "leave them out, or leave --server out",
            )
    elif options["base_model"] is not None and options["model"] is not None:
        raise UsageError(
            "--model is a name on a running server, and --base-model starts an engine.",
            "give --base-model alone, or --server URL --model NAME",
        )
    elif options["base_model"] is None and options["model"] is None:
        raise UsageError(
            "there is nothing to chat with.", "give --server URL, or --base-model DIR [--adapter DIR]"
        )


def _conversation(options: Mapping[str, Any], child: Child | None) -> Conversation:
    """With the engine ``child`` that was started for this chat, or with the server in the options."""
    asked = {name: options[name] for name in ("temperature", "top_p", "max_tokens", "seed")}
    if child is None:
        client = OpenAIClient(options["server"], options["api_key"])
        entries = client.entries()
        applied = client.applied_adapter(engine_of(entries)) or ""
        models = read_models(entries, applied)
        wanted = options["model"] or default_model(entries, applied)
        arms = arms_of(wanted, entries, applied)
    else:
        client = OpenAIClient(child.url, child.key)
        first = next(iter(child.models))
        described = {name: {"description": said} for name, said in child.models.items()}
        models = read_models(described)
        if asked["temperature"] is None:
            path = find_model(options["base_model"] or options["model"]) / "generation_config.json"
            if path.is_file() and read_json_file(path).get("do_sample") is False:
                asked["temperature"] = 0.0
        if options["adapter"] is None:
            wanted = first
            arms = {"model": wanted}
        else:
            wanted = adapter_name(split_name(first)[0], ADAPTER)
            arms = arms_of(wanted, described)
    arm = next(name for name, served in arms.items() if served == wanted)
    variants = [models[arms[name]].variant for name in ("expert", "full") if arms.get(name) in models]
    if arm == "expert" and variants == ["expert", "full"]:
        click.echo(f"{wanted} is half of the adapter; {arms['full']} is all of it (/full)", err=True)
    return Conversation(client, arms, arm, options["system"], **asked)


def _converse(talk: Conversation, child: Child | None) -> bool:
    """Run until the input ends or /quit; return whether a line failed.

    Raises KtbridgeError if the chat's own engine ``child`` ends.
    """
    last = ""
    failed = False
    for line in _lines(talk):
        try:
            _check_text(line)
            if line.startswith("/"):
                if line == "/quit":
                    break
                _obey(talk, line, last)
                if line.startswith("/compare"):
                    last = line.partition(" ")[2].strip() or last
            else:
                last = line
                _write(talk.ask(line))
                if talk.cut:
                    click.echo("(cut at the limit of tokens; --max-tokens sets it)", err=True)
        except KtbridgeError as error:
            failed = True
            render(error)
            if child is not None:
                child.check()
        except KeyboardInterrupt as stop:
            if isinstance(stop, Terminated) or not sys.stdin.isatty():
                raise
            click.echo()  # the end of the answer, not of the chat
    return failed


def _lines(talk: Conversation) -> Iterator[str]:
    """Typed or piped lines, except empty ones. Raises Terminated."""
    if not sys.stdin.isatty():
        click.echo(f"{talk.arm} ({talk.arms[talk.arm]}) answers", err=True)
        for piped in sys.stdin:
            if line := piped.strip():
                yield line
        return
    import readline  # noqa: F401  # line editing and history for input()

    click.echo(f"{', '.join(f'{arm}: {name}' for arm, name in talk.arms.items())}  (/help)", err=True)
    while True:
        try:
            line = input(f"{talk.arm}> ").strip()
        except KeyboardInterrupt as stop:
            if isinstance(stop, Terminated):
                raise
            click.echo("\n(Ctrl-D leaves)", err=True)  # the end of the line, not of the chat
            continue
        except EOFError:
            click.echo(err=True)
            return
        if line:
            yield line


def _check_text(line: str) -> None:
    """Raises KtbridgeError for invalid UTF-8, which Python passes on as lone surrogates."""
    try:
        line.encode()
    except UnicodeEncodeError:
        raise KtbridgeError("this line is not UTF-8.", "convert it, with iconv for example") from None


def _write(pieces: Generator[str, None, None]) -> None:
    """Stream an answer. Ctrl-C also stops it at the server."""
    shown = _plain if sys.stdout.isatty() else str
    try:
        for piece in _without_empty_thought(pieces):
            sys.stdout.write(shown(piece))
            sys.stdout.flush()
    finally:
        pieces.close()
        click.echo()


def _without_empty_thought(pieces: Iterable[str]) -> Iterator[str]:
    """The answer's pieces without the empty thought that some templates begin it with."""
    begun, held = False, ""
    for piece in pieces:
        if begun:
            yield piece
            continue
        held += piece
        rest = held.lstrip()
        thought = rest.removeprefix("<think>").lstrip() if rest.startswith("<think>") else None
        if "<think>".startswith(rest) or (thought is not None and "</think>".startswith(thought)):
            continue
        text = _EMPTY_THOUGHT.sub("", held)
        if text:
            begun = True
            yield text
    if not begun:
        yield _EMPTY_THOUGHT.sub("", held)


def _plain(text: str) -> str:
    """A model's text without terminal control characters."""
    return "".join(c if c in "\n\t" else printable(c) for c in text)


def _obey(talk: Conversation, line: str, last: str) -> None:
    """Execute a slash command. Raises KtbridgeError."""
    word, _, rest = line.partition(" ")
    rest = rest.strip()

    def system() -> None:
        if rest:
            talk.system = None if rest == "-" else rest
        click.echo(f"system: {talk.system or '(none)'}", err=True)

    def compare() -> None:
        if not (rest or last):
            raise KtbridgeError("there is no question to compare answers to.", "/compare QUESTION")
        _compare(talk, rest or last)

    commands: dict[str, Callable[[], None]] = {
        "/base": lambda: talk.switch("base"),
        "/expert": lambda: talk.switch("expert"),
        "/full": lambda: talk.switch("full"),
        "/compare": compare,
        "/system": system,
        "/clear": talk.clear,
        "/help": lambda: click.echo(HELP, err=True),
    }
    if word not in commands:
        raise KtbridgeError(f"there is no command {word!r}.", "/help shows those there are")
    commands[word]()


def _compare(talk: Conversation, question: str) -> None:
    """Ask all arms concurrently; show columns on a terminal, one after the other on a pipe.

    Raises KtbridgeError after all have ended, if one failed.
    """
    answers = dict.fromkeys(talk.arms, "")
    failed: list[tuple[str, KtbridgeError]] = []

    def table() -> Table:
        columns = Table(*(shown(f"{arm}: {talk.arms[arm]}") for arm in answers), expand=True)
        columns.add_row(
            *(Text(_plain(_EMPTY_THOUGHT.sub("", answer)), overflow="fold") for answer in answers.values())
        )
        return columns

    # While streaming, as much as fits the screen; then everything.
    live = Live(get_renderable=table, console=console, transient=True, refresh_per_second=8)
    with live if console.is_terminal else nullcontext(), closing(talk.compare(question)) as pieces:
        for arm, piece in pieces:
            if isinstance(piece, str):
                answers[arm] += piece
            elif piece is not None:
                failed.append((arm, piece))
    if console.is_terminal:
        console.print(table())
    else:
        for arm, answer in answers.items():
            if arm not in dict(failed):
                click.echo(f"[{arm}] {_EMPTY_THOUGHT.sub('', answer)}")
    for arm, error in failed[:1]:
        raise KtbridgeError(f"{arm}: {error.sentence}", error.next_step)
