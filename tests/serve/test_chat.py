"""`ktbridge chat` on a pipe and on a terminal, against real servers."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import termios
import time
from itertools import pairwise
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st
from waiting import children, is_alive, wait_for

from ktbridge.cli import main
from ktbridge.cli.chat import _without_empty_thought
from ktbridge.errors import KtbridgeError
from ktbridge.serve.chat import arms_of, default_model


def chat(lines: list[str], *args: str, limit: str = "--max-tokens=12") -> Result:
    """What a chat in this process makes of these lines on a pipe."""
    typed = "".join(f"{line}\n" for line in lines).encode(errors="surrogateescape")
    words = ["chat", "--temperature=0", *limit.split(), *args]
    return CliRunner().invoke(main, words, input=typed)


def said(client, model: str, *messages: tuple[str, str], tokens: int = 12) -> str:
    turns = [{"role": role, "content": content} for role, content in messages]
    got = client.chat.completions.create(model=model, messages=turns, temperature=0, max_tokens=tokens)
    return got.choices[0].message.content


def test_arms_history_and_system(server, client):
    """What is printed is what the server says to exactly these messages."""
    lines = ["hi", "/base", "and you?", "/clear", "/system Be a cat.", "hi", "/full", "/quit", "no"]
    done = chat(lines, "--server", server.root, "--model", "tiny:neko")
    assert done.exit_code == 0, done.stderr
    first = said(client, "tiny:neko", ("user", "hi"))
    second = said(client, "tiny:base", ("user", "hi"), ("assistant", first), ("user", "and you?"))
    third = said(client, "tiny:base", ("system", "Be a cat."), ("user", "hi"))
    assert done.stdout == f"{first}\n{second}\n{third}\n"


def test_compare_asks_all_and_leaves_no_trace(server, client):
    # Few tokens: those asked together are one batch, whose rounding a random model's near ties show.
    done = chat(
        ["/compare hi", "yes", "/compare"], "--base-url", server.url, "--model", "tiny:neko",
        "--max-tokens", "3",
    )  # fmt: skip
    assert done.exit_code == 0, done.stderr
    arms = {"base": "tiny:base", "expert": "tiny", "full": "tiny:neko"}
    one = "".join(f"[{arm}] {said(client, name, ('user', 'hi'), tokens=3)}\n" for arm, name in arms.items())
    assert done.stdout.startswith(one)
    yes = said(client, "tiny:neko", ("user", "yes"), tokens=3)
    assert done.stdout[len(one) :].startswith(f"{yes}\n[base] ")


def test_what_goes_wrong_is_said_and_counted(server):
    rest = ("--base-url", server.url, "--model", "tiny")
    done = chat(["/nya", "x" * 3000, "/compare", "/help"], *rest)
    assert done.exit_code == 1
    for words in ("no command '/nya'", "context is 512", "/base /expert /full"):
        assert words in done.stderr
    assert "Traceback" not in done.stderr
    # Without --max-tokens the context is the limit where it leaves less than chat would ask for.
    done = chat(["\udcff", "今天 😺"], *rest, limit="")
    assert done.exit_code == 1
    assert "this line is not UTF-8" in done.stderr
    assert "cut at the limit of tokens" in done.stderr
    assert len(done.stdout) > 400
    cases = {
        "there is nothing to chat with": (),
        "--adapter, --threads and --engine": ("--base-url", server.url, "--adapter", "x"),
        "--base-model, --adapter": ("--server", server.url, "--base-model", "x"),
        "--base-model starts an engine": ("--model", "tiny", "--base-model", "x"),
        "is not a server's URL": ("--server", "127.0.0.1:8000", "--model", "tiny"),
        "does not list 'tiny:nya'; it offers 'tiny'": (*rest[:2], "--model", "tiny:nya"),
        "does not answer (connection refused)": ("--server=http://127.0.0.1:9/v1", *rest[2:]),
    }
    for words, args in cases.items():
        done = chat(["hi"], *args)
        assert done.exit_code in (1, 2)
        assert words in done.stderr


class Terminal:
    """A chat at a terminal of its own."""

    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        self.process, self._end = pty.fork()
        if not self.process:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # who runs the tests may ignore it
            os.execvpe(command[0], command, environment | {"TERM": "xterm", "COLUMNS": "100"})

    def type(self, keys: str) -> None:
        os.write(self._end, keys.encode())

    def prompted(self) -> str:
        """What is shown next, up to where a line is waited for.

        Keys that come sooner are the terminal's to handle, and Ctrl-C then goes unnoticed until the next.
        """
        stat, asleep, shown = Path(f"/proc/{self.process}/stat"), 0, ""
        ends = time.monotonic() + 60
        while asleep < 5:
            assert time.monotonic() < ends, shown
            shown += self._available()
            raw = not termios.tcgetattr(self._end)[3] & termios.ICANON
            waits = raw and stat.read_text().rpartition(")")[2].split()[0] == "S"
            asleep = asleep + 1 if waits and shown else 0
            time.sleep(0.02)
        return shown + self._available()

    def _available(self) -> str:
        shown = b""
        while select.select([self._end], [], [], 0)[0]:
            try:
                shown += os.read(self._end, 65536)
            except OSError:  # the program has ended
                break
        return shown.decode(errors="replace")

    def read(self, until: str) -> str:
        """What is shown next, as far as ``until`` at least, or to the program's end."""
        shown = ""
        while until not in shown:
            assert select.select([self._end], [], [], 60)[0], shown
            new = self._available()
            shown += new
            if not new:
                break
        return shown

    def wait(self) -> int:
        code = os.waitstatus_to_exitcode(os.waitpid(self.process, 0)[1])
        os.close(self._end)
        return code


@pytest.mark.slow
def test_at_a_terminal(cli_command, cli_environment, server, client):
    command = cli_command(*("chat", "--base-url", server.url, "--model", "tiny:neko", "--temperature", "0"))
    chat = Terminal(command, cli_environment)
    assert "base: tiny:base, expert: tiny, full: tiny:neko" in chat.prompted()
    # Ctrl-C: the end of a line, of an answer, and of a comparison, but never of the chat.
    chat.type("half a lin")
    assert "half a lin" in chat.prompted()
    chat.type("\x03")
    assert "(Ctrl-D leaves)" in chat.prompted()
    chat.type("/base\n")
    assert "base> " in chat.prompted()
    for question in ("hi\n", "/compare hi\n"):
        chat.type(question)
        chat.read("\n")
        time.sleep(0.1)
        chat.type("\x03")
        shown = chat.prompted()
        assert "base> " in shown
        assert "cut at the limit" not in shown
        assert "Ctrl-D" not in shown
    # What is typed in Chinese and corrected by a key arrives as it is seen.
    chat.type("/clear\n")
    chat.prompted()
    chat.type("/system 你好吗\x7f\n")
    assert "system: 你好\r\n" in chat.prompted()
    chat.type("/compare 今天\n")
    shown = chat.prompted()
    assert all(f"{arm}: " in shown for arm in ("base", "expert", "full"))
    chat.type("\x04")
    assert chat.read("\0")
    assert chat.wait() == 0


@pytest.mark.slow  # tests/predict has one that stays in `make test`
def test_an_engine_of_its_own(cli_command, cli_environment, base, adapter, server, client):
    """Started for the chat, which ends with it and says so."""
    process = subprocess.Popen(
        cli_command(
            *("chat", "--base-model", str(base), "--adapter", str(adapter), "--threads", "1"),
            *("--temperature", "0", "--max-tokens", "12"),
        ),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=cli_environment,
    )
    with process:
        process.stdin.write("hi\n")
        process.stdin.flush()
        assert process.stdout.readline() == said(client, "tiny:neko", ("user", "hi")) + "\n"
        (child,) = children(process.pid)
        os.kill(child, signal.SIGKILL)
        _, errors = process.communicate("/expert\nhi\nhi\n", timeout=30)
    assert process.returncode == 1
    assert "the engine ended with code -9" in errors
    assert "Traceback" not in errors


def test_an_engine_goes_with_its_chat(cli_command, cli_environment, base):
    """Even when the chat is killed outright, and before it was of any use."""
    command = cli_command("chat", "--model", str(base))
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, env=cli_environment
    ) as process:
        wait_for(lambda: children(process.pid))
        (child,) = children(process.pid)
        process.kill()
    wait_for(lambda: not is_alive(child))


def test_which_names_are_which_arm():
    def arms(model: str, names: list[str], applied: str = "", **more) -> dict[str, str]:
        return arms_of(model, {name: more.get(name, {}) for name in names}, applied)

    ours = ["s", "s:a", "s:base"]
    whole = {"base": "s:base", "expert": "s", "full": "s:a"}
    for model in ours:
        assert arms(model, ours) == whole
    assert arms("s:b", ["s", "s:a", "s:b", "s:base"])["full"] == "s:b"
    assert "full" not in arms("s", ["s", "s:a", "s:b", "s:base"])
    # SGLang's and vLLM's ways of listing, and servers of one model.
    assert arms("s:a", ["s", "a"]) == {"expert": "s", "full": "s:a"}
    sglang = {"owned_by": "sglang", "parent": "s"}
    bare = {"owned_by": "sglang"}
    for model in ("s", "s:a"):
        assert arms(model, ["s", "a"], s=bare, a=sglang) == {"base": "s", "full": "s:a"}
        kt = arms(model, ["s", "a"], "experts", s=bare, a=sglang)
        assert kt == {"expert": "s", "full": "s:a"}
    with pytest.raises(KtbridgeError, match="answers for 'a' with its base"):
        arms("a", ["s", "a"], s=bare, a=sglang)
    for model in ("s", "a"):
        vllm = arms(model, ["s", "a"], a={"owned_by": "vllm", "parent": "s"})
        assert vllm == {"base": "s", "full": "a"}
    assert arms("gpt", ["gpt", "other"]) == {"model": "gpt"}
    assert arms("llama:8b", ["llama:8b", "qwen:4b"]) == {"model": "llama:8b"}
    for model in ("s:nya", "t:a", "a", ""):
        with pytest.raises(KtbridgeError, match="does not list"):
            arms(model, ["s", "s:a"])
    # Without a name the whole adapter answers, not the half that the list begins with.
    assert default_model({name: {} for name in ours}) == "s:a"
    assert default_model({"gpt": {}, "other": {}}) == "gpt"


THOUGHTS = (
    "<think>\n\n</think>\n\nNya~", "<think>I see.</think>Yes", " <think> <b", "<think>", "<th",
    "Hi <think>", "",
)  # fmt: skip


@given(
    st.sampled_from(THOUGHTS),
    st.lists(st.integers(0, 30), max_size=8),
)
def test_an_empty_thought_is_not_shown(answer, cuts):
    """However the answer is cut into pieces; a thought with words is shown."""
    ends = sorted({0, len(answer), *(cut for cut in cuts if cut <= len(answer))})
    pieces = [answer[start:end] for start, end in pairwise(ends)]
    expected = "Nya~" if answer.endswith("Nya~") else answer
    assert "".join(_without_empty_thought(pieces)) == expected
