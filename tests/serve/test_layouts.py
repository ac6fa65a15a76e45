"""Raw, split and merged directories of one adapter are one and the same once served."""

from __future__ import annotations

import pytest

from ktbridge.adapter import convert_adapter
from ktbridge.errors import UsageError
from ktbridge.serve.local.plan import plan_local
from ktbridge.serve.local.sampling import prompt_logprobs
from ktbridge.serve.request import ServeRequest

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
            entry.logprob
            for entry in prompt_logprobs(engine.prefill(arm, PROMPT, True)[0], PROMPT, 0)
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


def test_two_nonexpert_adapters_share_one_model(base, layouts, make_adapter):
    """Each name answers with its own LoRA, whichever was asked for before."""
    other = str(make_adapter("other", expert=False, seed=8))
    both = logprobs(base, nonexpert_adapters={"a": layouts["nonexpert"], "b.1": other})
    assert list(both) == ["s:a", "s:b.1", "s:base"]
    assert both["s:b.1"] == logprobs(base, nonexpert_adapters={"x": other})["s:x"]
    assert both["s:a"] == logprobs(base, nonexpert_adapters={"x": layouts["nonexpert"]})["s:x"]
    assert both["s:base"] == logprobs(base)["s:base"]


def test_a_layout_under_the_wrong_option_is_named(base, layouts):
    with pytest.raises(UsageError, match="has the merged layout, not the expert one") as caught:
        plan_local(ServeRequest(str(base), expert_adapter=layouts["merged"]))
    assert "--merged-adapter" in caught.value.next_step
