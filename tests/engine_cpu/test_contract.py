"""The table of contracts against the text of the wheels themselves.

They are read wherever they are at hand; `make test-engine` fetches them. Text only: nothing of them is
run here, that is what the other tests do.
"""

from __future__ import annotations

import re
import zipfile
from pathlib import Path

import pytest
from launchfacts import facts_for
from realengine import wheel_path

from ktbridge.adapter.engines import ENGINE, contract_for, contracts_of
from ktbridge.cli._serve_local import OPTIONS
from ktbridge.install import version_order
from ktbridge.model import FAMILIES, Family
from ktbridge.serve.request import SglangRequest
from ktbridge.serve.sglang.adapters import AdapterSource
from ktbridge.serve.sglang.facts import ENGINE_CACHE, parser_flags
from ktbridge.serve.sglang.launch import Conditions
from ktbridge.serve.sglang.preflight import GUARDED, OWNED, plan_launch
from ktbridge.serve.sglang.supervise import StartProgress

# The ends of every row, and what lies between them: versions that were published.
VERSIONS = (
    "0.5.3", "0.6.2", "0.6.2.post3", "0.6.3", "0.6.3.post1", "0.6.4", "0.7.0", "0.7.0.post1",
    "0.7.0.post2", "0.7.0.post3", "0.7.0.post4", "0.7.2",
)  # fmt: skip
WRAPPER = "sglang/srt/layers/moe/kt_ep_wrapper.py"
LAYOUTS = {
    "expert": [("", True, False)],
    "nonexpert": [("n", False, True)],
    "merged": [("n", True, True)],
    "split": [("", True, False), ("n", False, True)],
}

UNSIZED = {
    "qwen3_moe": ("mlp.gate",),
    "deepseek_v2": ("mlp.gate", "self_attn.q_a_proj", "self_attn.q_b_proj"),
}


def row_of(model_type: str) -> Family:
    return next(family for family in FAMILIES if model_type in family.model_types)


class Wheel:
    def __init__(self, path: Path, version: str) -> None:
        self._archive = zipfile.ZipFile(path)
        self.contract, self.known = contract_for(f"sglang-kt=={version}")
        self.version = version
        self.parser = parser_flags(self.text("sglang/srt/server_args.py"))

    def text(self, name: str) -> str:
        try:
            return self._archive.read(name).decode()
        except KeyError:
            return ""

    def files(self, folder: str) -> list[str]:
        return [name for name in self._archive.namelist() if name.startswith(folder)]

    def close(self) -> None:
        self._archive.close()


@pytest.fixture(scope="module", params=VERSIONS)
def wheel(request: pytest.FixtureRequest):
    wheel = Wheel(wheel_path(request.param), request.param)
    yield wheel
    wheel.close()


def plans(version: str, model: Path):
    """A plan for every layout that the version accepts, with every flag that we ever write."""
    contract, _ = contract_for(f"sglang-kt=={version}")
    for layout, given in LAYOUTS.items():
        if not getattr(contract, layout):
            continue
        sources = tuple(
            AdapterSource(name or None, Path("/a"), "merged" if layout == "merged" else layout,  # type: ignore[arg-type]
                   (0, 1) if expert else (), nonexpert, None, name)
            for name, expert, nonexpert in given
        )  # fmt: skip
        facts = facts_for(model, version, sources=sources, gpus=())
        request = SglangRequest(model="m", tp_size=4, trust_remote_code=True)
        yield layout, plan_launch(request, facts)


def test_the_parser_knows_every_flag_that_we_write(wheel: Wheel, model: Path) -> None:
    made = dict(plans(wheel.version, model))
    assert {"nonexpert"} <= made.keys()
    assert ("split" in made, "merged" in made) == (wheel.contract.split, wheel.contract.merged)
    for layout, done in made.items():
        assert done.layout == layout or layout == "merged"
        flags = {word for word in done.argv if word.startswith("--")}
        assert flags - wheel.parser == set()
    # The API key's way in, and the flags that ours stand for or that are refused.
    assert "--config" in wheel.parser
    known = wheel.parser | (
        {"--kt-lora-path", "--kt-expert-lora-path"} if not wheel.contract.expert else set()
    )
    assert {*OWNED, *GUARDED} - known == set()
    # And those that we name where somebody gives it an option of the embedded engine.
    named = {word for option in OPTIONS for word in re.findall(r"--[a-z][a-z-]*", option.sglang)}
    assert len(named) == 4
    assert named <= wheel.parser


def test_the_row_says_what_the_wheel_says(wheel: Wheel) -> None:
    arguments, wrapper = wheel.text("sglang/srt/server_args.py"), wheel.text(WRAPPER)
    manager = wheel.text("sglang/srt/managers/tokenizer_manager.py")
    contract = wheel.contract
    assert wheel.known
    assert contract.expert == ("--kt-expert-lora-path" in wheel.parser)
    assert contract.merged == ("_prepare_kt_composite_lora_adapter" in arguments)
    refused = "Explicit --kt-expert-lora-path cannot be combined" in arguments
    assert contract.split == (contract.expert and not refused)
    assert contract.base_requests == ("get_static_kt_lora_ref" not in manager)
    methods = re.findall(r'^    "(\w+)": "\w+_SFT",$', wrapper, re.MULTILINE)
    assert set(contract.methods) == set(methods)
    # The one line that proves the loading, as the supervisor reads it.
    found = re.search(r'"(Loaded KT expert LoRA for layer %d) from', wrapper)
    assert bool(found) == contract.expert
    if found:
        progress = StartProgress(Conditions((7,), ()))
        progress.read(b"[2026-11-21 10:00:00 TP0] " + (found[1] % 7).encode() + b" from x\n")
        assert progress.missing_layers == ()
    assert (ENGINE_CACHE in arguments) == contract.merged


def test_the_modules_of_qwen35_that_are_missed(wheel: Wheel) -> None:
    source = wheel.text("sglang/srt/models/qwen3_5.py")
    found = re.search(r"_QWEN3_5_LORA_PATTERN = re\.compile\(\n((?:\s+r\".*\"\n)+)\)", source)
    if found is None:
        assert not wheel.contract.expert
        return
    pattern = re.compile("".join(re.findall(r'r"(.*)"', found[1])))
    # The engine calls a layer's attention by another path than the checkpoint does.
    served = {
        "self_attn.q_proj": "qkv_proj",
        "self_attn.o_proj": "o_proj",
        "mlp.gate": "mlp.gate",
        "mlp.shared_expert_gate": "mlp.shared_expert_gate",
        "mlp.shared_expert.down_proj": "mlp.shared_expert.down_proj",
        "linear_attn.out_proj": "linear_attn.out_proj",
    }
    missed = {name for name, path in served.items() if not pattern.match(f"model.layers.0.{path}")}
    unapplied = wheel.contract.unapplied(row_of("qwen3_5_moe"))
    assert missed == {name for name in served if name in unapplied}


def test_the_models_that_the_registry_has(wheel: Wheel) -> None:
    """Those of ours, in every version; a published name that the engine has and we don't is for a person."""
    found = {
        name
        for file in wheel.files("sglang/srt/models/")
        for entries in re.findall(r"^EntryClass = (\[[^\]]*\]|\w+)", wheel.text(file), re.MULTILINE)
        for name in re.findall(r"\w+", entries)
    }
    assert found >= {name for family in FAMILIES for name in family.kt_classes}


@pytest.mark.parametrize("name", UNSIZED)
def test_the_modules_whose_sizes_the_engine_lacks(wheel: Wheel, name: str) -> None:
    """With LoRA on one of them it ends at start-up; tests/engine_cpu has seen it for the router."""
    sizes = wheel.text(f"sglang/srt/models/{name}.py").partition("def get_hidden_dim(")[2]
    sizes = sizes.partition("\n    def ")[0]
    lacking = {path for path in UNSIZED[name] if f'"{path.rpartition(".")[2]}"' not in sizes}
    assert lacking == wheel.contract.unapplied(row_of(name))


def test_the_words_that_causes_are_found_by(wheel: Wheel) -> None:
    if not wheel.contract.expert:
        return
    text = wheel.text("sglang/srt/server_args.py") + wheel.text(WRAPPER)
    text = re.sub(r'"\s*\n\s*f?"', "", text)  # messages are written in pieces
    for words in (
        "Missing KT expert LoRA tensor",
        "KT expert LoRA rank mismatch",
        "SFT-compatible KT methods",
        "--max-running-requests >= 2",
        "only compatible with NGRAM",
        "Only SiLU activation",
        "Set --kt-num-gpu-experts 0",
    ):
        assert words in text, words


def test_the_known_holes_are_still_there(wheel: Wheel) -> None:
    """When a version has none of them any more, the warning about them is due for another look."""
    server = wheel.text("sglang/srt/disaggregation/encode_receiver.py")
    images = wheel.text("sglang/multimodal_gen/runtime/managers/scheduler.py")
    if wheel.contract.expert:
        assert "pickle.loads(" in server
        assert "pickle.loads(" in images


def test_every_row_has_its_ends_among_the_versions() -> None:
    published = {version_order(version) for version in VERSIONS}
    for row in contracts_of(ENGINE):
        assert version_order(row.last) in published
        assert row.first == "0" or version_order(row.first) in published
