"""`ktbridge verify --adapter NAME=DIR …` against vLLM's LoRA server on a CPU, right and faulty.

With LoRA enabled vLLM's CPU build has no kernel for experts, so that the model is a Qwen2-MoE all of whose
layers are dense. Faults are vLLM's own, or made through its API. Its CPU kernels take slot -1, which is to
mean no LoRA, for the last slot (its pull requests 48421 and 49656), so that the base is right among other
requests only while that slot has never been used: the tests run in this order.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from ggufmodel import save_base, save_lora

from ktbridge.adapter import open_adapter
from ktbridge.errors import KtbridgeError
from ktbridge.server_api.client import OpenAIClient
from ktbridge.verify.logprobs import LogprobClient
from ktbridge.verify.several import SeveralVerification, verify_several

pytestmark = pytest.mark.timeout(900)  # the first test starts vLLM
ATTENTION = tuple(f"self_attn.{name}_proj" for name in "qkvo")
DENSE = tuple(f"mlp.{name}_proj" for name in ("gate", "up", "down"))
SIZES = {"head_dim": 32, "hidden_size": 128}
SLOTS = 3  # of adapters in a batch: one more than are loaded at first
BLOCK = 32  # tokens of a cached prefix; our longest prompts have 64


@dataclass
class Served:
    """A server of ``base`` whose names are those of ``adapters``, a directory each."""

    url: str
    base: Path
    adapters: dict[str, Path]

    def verify(self, adapters: Mapping[str, Path] = {}, **options: bool) -> SeveralVerification:
        named = adapters or self.adapters
        opened = {n: open_adapter(path, base_model=self.base) for n, path in named.items()}
        return verify_several(LogprobClient(self.url), opened, str(self.base), **options)

    def send(self, path: str, **body: object) -> None:
        OpenAIClient(self.url).send(f"/{path}_lora_adapter", body)


@pytest.fixture(scope="module")
def served(vllm, tmp_path_factory):
    root = tmp_path_factory.mktemp("several")
    base = save_base("qwen2_moe", root / "base", mlp_only_layers=[0, 1], **SIZES)
    made = {
        name: save_lora(base, root / name, expert=False, modules=(*ATTENTION, *DENSE), seed=seed)
        for seed, name in enumerate("abc")
    }
    pair = {name: made[name] for name in "ab"}
    options = ["--enable-lora", "--max-loras", str(SLOTS), "--block-size", str(BLOCK)]
    options += ["--lora-modules", *(f"{name}={path}" for name, path in pair.items())]
    with vllm(base, *options) as url:
        yield Served(url, base, pair)


def wrong(result: SeveralVerification) -> set[tuple[str, str, bool]]:
    """Stage and name of the rows that are not as expected, and whether tokens were generated."""
    return {(r.stage, r.model, r.generated) for r in result.rows if not r.as_expected}


def test_each_name_is_its_own_adapter(served):
    result = served.verify()
    assert result.ok, (wrong(result), result.problems)
    assert (result.base, result.logprobs_from) == ("tiny", "prompt_logprobs")
    assert {name.model: name.verdict for name in result.names} == {"a": "applied", "b": "applied"}
    assert {row.stage for row in result.rows if row.generated} == {"generating together"}
    for row in result.rows:
        others = [away for column, away in row.distances.items() if column != row.expected]
        assert row.distances[row.expected] < 0.01 * min(others)


def test_answers_follow_a_reload(served):
    result = served.verify(reload=True)
    assert {model for _, model, _ in wrong(result)} <= {"tiny"}
    again = {(r.stage, r.model, r.generated): r.answers_as for r in result.rows}
    assert again["adapters unloaded", "tiny", False] == "base"
    for generated in (True, False):
        assert again["names exchanged", "a", generated] == "b"
        assert again["names exchanged", "b", generated] == "a"
        assert again["put back", "a", generated] == "a"


def test_names_are_exchanged(served):
    """By its API, as a deployment mixes directories up."""
    a, b = served.adapters.values()
    for name, path in (("a", b), ("b", a)):
        served.send("load", lora_name=name, lora_path=str(path), load_inplace=True)
    result = served.verify()
    assert {name.verdict for name in result.names} == {"another adapter"}
    assert " ".join(n.reason for n in result.names).count("the two are exchanged") == 2
    assert [p.where for p in result.problems if p.code == "KTV020"] == ["a", "b"]
    for name, path in (("a", a), ("b", b)):
        served.send("load", lora_name=name, lora_path=str(path), load_inplace=True)
    assert all(name.ok for name in served.verify().names)


def test_an_adapter_that_was_written_over(served):
    """Its cache knows an adapter's prefixes by name and path, and so takes the former one's (issue 42125)."""
    a, b = (path / "adapter_model.safetensors" for path in served.adapters.values())
    former = a.read_bytes()
    shutil.copyfile(b, a)
    try:
        served.send("load", lora_name="a", lora_path=str(a.parent), load_inplace=True)
        result = served.verify({"a": a.parent})
    finally:
        a.write_bytes(former)
        served.send("load", lora_name="a", lora_path=str(a.parent), load_inplace=True)
    assert [name.verdict for name in result.names] == ["applied"]  # by its prompts
    assert ("generating together", "a", True) in wrong(result)
    (stale,) = [item for item in result.problems if item.code == "KTV022"]
    assert stale.where == "a, all names at once, tokens that they generate"
    assert "prefixes" in (stale.next_step or "")


def test_the_base_among_adapters_in_all_slots(served):
    c = served.base.parent / "c"
    served.send("load", lora_name="c", lora_path=str(c))
    result = served.verify(served.adapters | {"c": c})
    assert {item.code for item in result.problems} == {"KTV021"}
    assert ("together", "tiny", False) in wrong(result)
    assert {(stage, model) for stage, model, _ in wrong(result)} <= {
        ("together", "tiny"),
        ("generating together", "tiny"),
    }
    assert all(name.ok for name in result.names)


def test_experts_with_lora_enabled(vllm, tmp_path):
    """The server starts, and ends at the first request: there is no kernel."""
    base = save_base("qwen3_moe", tmp_path / "base", **SIZES)
    adapter = save_lora(base, tmp_path / "a", expert=False, modules=ATTENTION)
    options = ("--enable-lora", "--lora-modules", f"a={adapter}")
    with (
        vllm(base, *options) as url,
        pytest.raises(KtbridgeError, match="prompt_logprobs: 500, EngineCore encountered an issue"),
    ):
        Served(url, base, {"a": adapter}).verify()
    assert "module 'triton.language' has no attribute 'float32'" in (tmp_path / "log").read_text()
