"""Raw, split and merged directories of one adapter are one and the same once served."""

from __future__ import annotations

import json

import pytest
from safetensors.torch import load_file, save_file

from ktbridge.adapter import convert_adapter
from ktbridge.errors import KtbridgeError, ProblemsError, UsageError
from ktbridge.serve.local.plan import plan_local
from ktbridge.serve.local.sampling import prompt_logprobs
from ktbridge.serve.request import ServeRequest
from ktbridge.serve.sglang.adapters import read_sources

PROMPT = list(range(30, 70))


@pytest.fixture(scope="module")
def layouts(base, adapter, tmp_path_factory):
    root = tmp_path_factory.mktemp("layouts")
    names = ("expert", "nonexpert", "merged")
    convert_adapter(adapter, **{f"{n}_output_dir": root / n for n in names}, base_model=str(base))
    return {name: str(root / name) for name in names} | {"raw": str(adapter)}


def logprobs(base, **adapters) -> dict[str, list]:
    """Prompt logprobs by arm name."""
    from ktbridge.serve.local.loading import load_engine

    plan = plan_local(ServeRequest(str(base), served_name="s", threads=1, **adapters))
    engine = load_engine(plan)
    return {
        arm.name: [
            entry.logprob for entry in prompt_logprobs(engine.prefill(arm, PROMPT, True)[0], PROMPT, 0)
        ]
        for arm in plan.arms
    }


def test_every_layout_serves_the_same(base, layouts):
    raw = logprobs(base, adapters={"neko": layouts["raw"]})
    assert list(raw) == ["s", "s:neko", "s:base"]
    assert len({tuple(values) for values in raw.values()}) == 3
    merged = logprobs(base, merged_adapters={"neko": layouts["merged"]})
    split = logprobs(
        base, expert_adapter=layouts["expert"], nonexpert_adapters={"neko": layouts["nonexpert"]}
    )
    assert raw == merged == split


@pytest.mark.parametrize("to", ["gguf", "sglang-3d", "peft-fused"])
def test_an_adapter_in_another_tools_format_serves_the_same(base, adapter, to, tmp_path, monkeypatch):
    """It is converted once, into the cache; a changed one is another adapter."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    convert_adapter(adapter, to=to, output_dir=tmp_path / "other", base_model=str(base))
    given = tmp_path / "other" / "adapter_model.gguf" if to == "gguf" else tmp_path / "other"
    request = ServeRequest(str(base), adapters={"neko": str(given)}, served_name="s")
    assert logprobs(base, adapters=request.adapters) == logprobs(base, adapters={"neko": str(adapter)})
    (made,) = (tmp_path / "cache").glob("ktbridge/serving/*")
    (made / "fused_expert_lora.safetensors").write_bytes(b"")  # as a full disk might leave it
    assert plan_local(request).expert == made
    assert (made / "fused_expert_lora.safetensors").stat().st_size
    assert read_sources(request)[0][0].path == made
    given.unlink() if to == "gguf" else (given / "adapter_model.safetensors").unlink()
    with pytest.raises(KtbridgeError, match=r"does not exist|no adapter weights"):
        plan_local(request)


def test_two_nonexpert_adapters_share_one_model(base, layouts, make_adapter):
    """Each name answers with its own LoRA, whichever was asked for before."""
    other = str(make_adapter("other", expert=False, seed=8))
    both = logprobs(base, nonexpert_adapters={"a": layouts["nonexpert"], "b.1": other})
    assert list(both) == ["s:a", "s:b.1", "s:base"]
    assert both["s:b.1"] == logprobs(base, nonexpert_adapters={"x": other})["s:x"]
    assert both["s:a"] == logprobs(base, nonexpert_adapters={"x": layouts["nonexpert"]})["s:x"]
    assert both["s:base"] == logprobs(base)["s:base"]


@pytest.fixture
def renamed(make_adapter, tmp_path):
    """renamed(old, new): a non-expert adapter as PEFT alone would leave it, with its keys renamed."""

    def make(old: str, new: str, **config: object) -> str:
        source = make_adapter("half", expert=False)
        tensors = load_file(source / "adapter_model.safetensors")
        save_file(
            {key.replace(old, new): tensor for key, tensor in tensors.items()},
            tmp_path / "adapter_model.safetensors",
        )
        settings = json.loads((source / "adapter_config.json").read_text()) | config
        (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
        return str(tmp_path)

    return make


def test_a_text_models_adapter_is_placed_by_layer(base, make_adapter, renamed):
    """What precedes ``layers.N`` differs between a multimodal model and its text model alone."""
    half = str(make_adapter("half", expert=False))
    nested = renamed("model.model.layers", "model.model.language_model.layers")
    expected, found = (logprobs(base, adapters={"a": path}) for path in (half, nested))
    assert found == expected
    assert found["s:a"] != found["s:base"]


def test_a_module_that_the_model_lacks_is_named(base, renamed):
    names = ["k_norm", "v_proj", "o_proj"]  # no linear module
    with pytest.raises(ProblemsError) as caught:
        logprobs(base, adapters={"a": renamed("q_proj", "k_norm", target_modules=names)})
    assert {found.code for found in caught.value.problems} == {"KTL007"}
    assert len(caught.value.problems) == 2  # one a layer


def test_a_layout_under_the_wrong_option_is_named(base, layouts):
    with pytest.raises(UsageError, match="has the merged layout, not the expert one") as caught:
        plan_local(ServeRequest(str(base), expert_adapter=layouts["merged"]))
    assert "--merged-adapter" in caught.value.next_step
