"""`ktbridge verify` against real servers: right, zero, half, wrong."""

from __future__ import annotations

import json
import signal
import socket

import bare
import pytest
from tinyserver import run_verify

from ktbridge.adapter import convert_adapter
from ktbridge.errors import KtbridgeError, ProblemsError
from ktbridge.kernel_choice import has_bf16_instructions
from ktbridge.verify.run import arms_to_ask, verify

KEY = "a key of its own"


@pytest.fixture(scope="module")
def servers(launch, base, make_adapter):
    """Servers with a key, started side by side: each was given only part of the adapter of ``server``."""
    given = {
        "expert": make_adapter("expert-half", nonexpert=False),
        "nonexpert": make_adapter("nonexpert-half", expert=False),
        "zero": make_adapter("zero", strength=0.0),
    }
    args = ("--model", base, "--served-model-name", "tiny")
    starting = {
        name: launch.begin(*args, "--adapter", f"neko={path}", KTBRIDGE_API_KEY=KEY)
        for name, path in given.items()
    }
    return {name: launch.finish(process) for name, process in starting.items()}


def verdicts(result) -> dict[str, str]:
    return {half.half: half.verdict for half in result.halves}


def test_right_adapter_is_applied(server, base, adapter):
    args = ("--model", "tiny:neko", "--adapter", str(adapter), "--base-model", str(base))
    done = run_verify("--base-url", server.url, *args, "--repeat", "2", "--json")
    assert done.exit_code == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["verdict"], result["ok"], result["problems"]) == ("applied", True, [])
    assert [half["verdict"] for half in result["halves"]] == ["applied", "applied"]
    assert result["spread"] < 1e-3  # asked twice, alone: the engine answers the same
    nearest = {arm["model"]: arm["nearest"] for arm in result["arms"]}
    assert nearest == {"tiny:base": "base", "tiny": "expert", "tiny:neko": "full"}
    for arm in result["arms"]:
        assert arm["distances"][arm["nearest"]] < 2 * max(result["noise"].values())
    for half in result["halves"]:
        assert half["share"] == pytest.approx(1, abs=0.05)


@pytest.mark.slow
def test_references_need_no_kernels(server, base, adapter):
    args = ("--model", "tiny:neko", "--adapter", adapter, "--base-model", base)
    done = bare.run("verify", "--server", server.url, *args, without={bare.KERNELS}, calls=bare.NOT_ON_MACOS)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("tiny:neko: applied")


@pytest.mark.quick("peft-fused")
@pytest.mark.parametrize("to", ["peft-fused", "sglang-3d"])
def test_an_adapter_in_another_tools_format_is_read(server, base, adapter, tmp_path, to):
    convert_adapter(adapter, to=to, output_dir=tmp_path / "other", base_model=str(base))
    args = ("--model", "tiny:neko", "--adapter", str(tmp_path / "other"), "--base-model", str(base))
    done = run_verify("--server", server.url, *args)
    assert done.exit_code == 0, done.stderr
    assert done.stdout.startswith("tiny:neko: applied")
    assert done.stderr.count(f"read as {to} (found: ") == 1


def test_zero_adapter_is_never_applied(servers, base, make_adapter):
    """The control: served and verified with B = 0, nothing may be called applied."""
    zero = make_adapter("zero", strength=0.0)
    args = ("--model", "tiny:neko", "--adapter", str(zero), "--base-model", str(base))
    url = servers["zero"].url
    done = run_verify("--base-url", url, *args, KTBRIDGE_API_KEY=KEY)
    assert done.exit_code == 1
    assert done.stdout.count("can't tell") == 3  # the whole, and each half
    verdict = "tiny:neko: can't tell - the adapter changes nothing: its B is zero"
    assert done.stdout.startswith(verdict)


@pytest.mark.parametrize(
    ("served", "expert", "nonexpert", "verdict"),
    [
        ("zero", "not applied", "not applied", "not applied"),
        ("expert", "applied", "not applied", "only experts"),
        ("nonexpert", "not applied", "applied", "only attention"),
    ],
)
def test_a_part_is_told_from_the_whole(servers, base, adapter, served, expert, nonexpert, verdict):
    result = verify(servers[served].url, "tiny:neko", str(adapter), str(base), api_key=KEY)
    assert verdicts(result) == {"expert": expert, "nonexpert": nonexpert}
    assert (result.verdict, result.ok) == (verdict, False)
    if served == "nonexpert":  # which has no arm with experts alone
        assert [arm.model for arm in result.arms] == ["tiny:base", "tiny:neko"]


def test_expert_only_adapter(servers, base, make_adapter):
    half = make_adapter("expert-half", nonexpert=False)
    result = verify(servers["expert"].url, "tiny", str(half), str(base), api_key=KEY)
    assert verdicts(result) == {"expert": "applied"}
    assert (result.verdict, result.ok) == ("applied", True)


@pytest.mark.slow
def test_an_adapter_of_attention_alone_has_no_expert_lora_to_miss(servers, base, make_adapter):
    half = make_adapter("nonexpert-half", expert=False)
    args = ("--model", "tiny:neko", "--adapter", str(half), "--base-model", str(base))
    done = run_verify("--server", servers["nonexpert"].url, *args, KTBRIDGE_API_KEY=KEY)
    assert done.exit_code == 0, done.stderr
    assert done.stdout.startswith("tiny:neko: applied")
    rows = [line.split() for line in done.stdout.splitlines()]
    assert ["expert", "LoRA", "none"] in [row[:3] for row in rows]
    assert ["non-expert", "LoRA", "applied"] in [row[:3] for row in rows]


@pytest.mark.slow
def test_wrong_base_proves_nothing(server, adapter, other_base):
    """Of the right shape: said first, without the tables that only mean something with the right base."""
    args = ("--model", "tiny:neko", "--adapter", str(adapter), "--base-model", str(other_base))
    done = run_verify("--server", server.root, *args)
    assert done.exit_code == 1
    verdict, _, evidence = done.stdout.partition("\n")
    assert verdict.startswith("tiny:neko: can't tell - tiny:base is ")
    assert "another base model" in verdict
    assert done.stderr.count("KTV003") == done.stderr.count("KTV003  tiny:base\n") == 1
    assert "mean |Δlogprob| to each reference" in evidence
    assert "explanations" not in evidence
    assert "each half" not in evidence


def test_a_wrong_alpha_is_named(server, base, adapter, tmp_path):
    """The server's effect is half of what this adapter asks for."""
    doubled = tmp_path / "doubled"
    doubled.mkdir()
    for file in adapter.iterdir():
        (doubled / file.name).write_bytes(file.read_bytes())
    for name, change in (
        ("adapter_config.json", {"lora_alpha": 16}),
        ("kt_adapter_manifest.json", {"lora": {"rank": 4, "alpha": 16}}),
    ):
        content = json.loads((doubled / name).read_text()) | change
        (doubled / name).write_text(json.dumps(content))
    args = ("--model", "tiny:neko", "--adapter", str(doubled), "--base-model", str(base))
    done = run_verify("--base-url", server.url, *args)
    assert done.exit_code == 1
    assert "tiny:neko: wrong scale - ≈ ×0.5 (" in done.stdout
    assert "KTV003  tiny\n" in done.stderr  # the arm with experts alone isn't right either


def test_adapter_that_goes_nowhere_is_an_error(server, base, make_adapter):
    """One problem for each kind of misfit, with a count, however many modules there are."""
    with pytest.raises(ProblemsError, match="does not fit the base") as caught:
        verify(server.url, "tiny:neko", str(make_adapter("narrow", hidden=32)), str(base))
    experts, others = caught.value.problems
    assert {experts.code, others.code} == {"KTV001"}
    assert experts.where.endswith("narrow: layer 0 gate")
    assert "6 like it: also layer 0 up, layer 0 down and 3 more" in experts.found
    assert "6 like it" in others.found
    assert "A [8, 4, 32] and B [8, 32, 4]" in experts.found
    assert "A [8, r, 64] and B [8, 32, r]" in experts.expected


def test_unavailable_is_never_a_pass(server, servers, base, adapter):
    rest = ("--adapter", str(adapter), "--base-model", str(base))
    cases = {
        "does not answer (connection refused)": ("http://127.0.0.1:9", "tiny:neko"),
        "does not list 'tiny:nya'": (server.url, "tiny:nya"),
        "API key is missing": (servers["zero"].url, "tiny"),
    }
    for words, (url, model) in cases.items():
        done = run_verify("--base-url", url, "--model", model, *rest)
        assert (done.exit_code, done.stdout) == (1, "")
        assert words in done.stderr


@pytest.mark.skipif(
    not has_bf16_instructions(), reason="in float32 this tiny model says too few whole characters"
)
def test_sampled_tokens_say_less(servers, server, base, adapter, make_adapter):
    """Here through the chat template; ok only because they were asked for, and never of a few tokens."""
    half = make_adapter("expert-half", nonexpert=False)
    args = ("--model", "tiny", "--adapter", str(half), "--base-model", str(base))
    way = ("--logprobs-from", "sampled", "--repeat", "2")
    url = servers["expert"].root
    done = run_verify("--server", url, *args, *way, KTBRIDGE_API_KEY=KEY)
    assert done.exit_code == 0, done.stderr
    assert done.stdout.startswith("tiny: applied, as far as sampled tokens tell - ")
    assert "asked: logprobs of the tokens that the server generates itself" in done.stdout
    assert "warning KTV010  tiny\n" in done.stderr
    # This tokenizer's base mostly says parts of characters, whose ids texts don't give away.
    with pytest.raises(KtbridgeError, match="tokens that tiny:base sampled are known, of 32"):
        verify(server.url, "tiny:neko", str(adapter), str(base), logprobs_from="sampled")


def test_which_arms_are_asked():
    listed = ["S", "S:a", "S:base"]
    assert arms_to_ask("S:a", listed) == {"S:base": "base", "S": "expert", "S:a": "full"}
    assert arms_to_ask("S", listed) == {"S": "full"}
    assert arms_to_ask("S:a", ["S:a", "E"], "E") == {"E": "expert", "S:a": "full"}
    # SGLang's way of listing.
    assert arms_to_ask("S:a", ["S", "a"]) == {"S": "expert", "S:a": "full"}
    with pytest.raises(KtbridgeError, match="does not list"):
        arms_to_ask("S:b", listed)


@pytest.mark.slow
def test_signals_end_servers_cleanly(servers, begin_answer):
    """SIGTERM and Ctrl-C with an answer under way: exit code 0, the port free again.

    The last test here, because it ends servers that the others share.
    """
    for name, number in (("zero", signal.SIGTERM), ("expert", signal.SIGINT)):
        server = servers[name]
        with begin_answer(server, stream=True, Authorization=f"Bearer {KEY}") as connection:
            assert connection.recv(64).startswith(b"HTTP/1.1 200")
            assert server.stop(number) == 0
            rest = b""
            while piece := connection.recv(65536):
                rest += piece
            assert b"shutting down" in rest or b"[DONE]" in rest
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", server.port))
