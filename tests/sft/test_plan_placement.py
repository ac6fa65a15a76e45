"""A plan's placement: the one that training takes, and its memory against recorded runs."""

import json
import re
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
import trainrun
from planshapes import QWEN3, V2_LITE
from trainrun import conversation, write_lines

from ktbridge.errors import UsageError
from ktbridge.experts.gpu.placement import Line, Placement, evenly, predict_seconds
from ktbridge.sft.config import load_config
from ktbridge.sft.placement import cuts_for, limit_of, limits_for, rank_placements
from ktbridge.sft.plan import Target, make_plan
from ktbridge.sft.plan.assumed import assumed_costs
from ktbridge.sft.plan.choices import choose
from ktbridge.sft.plan.declared import declare
from ktbridge.sft.plan.lengths import Lengths
from ktbridge.sft.plan.memory import Setting, predict
from ktbridge.sft.plan.parts import total
from ktbridge.sft.plan.shape import in_storage, read_shape

GB = 10**9
BENCH = Path(__file__).parents[2] / "docs" / "bench"


@pytest.fixture
def run_yaml(tmp_path, base_dir):
    write_lines(tmp_path / "rows.jsonl", [conversation("a", "b")] * 4)
    return trainrun.write_run(tmp_path, base_dir, kt_config={"kt_experts": "auto"}) / "run.yaml"


@pytest.fixture(scope="module")
def shapes(tmp_path_factory):
    found = {}
    for name, fields in (("deepseek_v2", V2_LITE), ("qwen3_moe", QWEN3)):
        base = tmp_path_factory.mktemp(name)
        (base / "config.json").write_text(json.dumps(fields))
        found[name] = read_shape(base, None, declare(base))
    return found


@pytest.fixture
def made(shapes, run_yaml):
    """Make a ``Setting`` of a published shape: so many rows of a length in a step."""

    def setting(name, rows, length, *more):
        overrides = ["lora_rank=8", "lora_target=all", "per_device_train_batch_size=1", "bf16=true"]
        overrides += [f"gradient_accumulation_steps={rows}", f"cutoff_len={length}", *more]
        shape = in_storage(shapes[name], "int4") if "int4" in more else shapes[name]
        config = load_config(run_yaml, [each for each in overrides if each != "int4"])
        return Setting(shape, config, Lengths(999, 999, length, float(length), True), True, 16)

    return setting


def recorded():
    """Every recorded run of one GPU with the executor as it was in 0.6: 300 MB a group."""
    for path in sorted(BENCH.glob("train-gpu-*.json")):
        told = json.loads(path.read_text())
        for run in told["contestants"]:
            if run["who"] in ("stream", "resident") and told["settings"].get("gpus", 1) == 1:
                yield path.stem, told, run


def as_run(made, told, run):
    settings, text = told["settings"], run["placed"]
    setting = made(told["model"]["model_type"], settings["rows"], settings["length"])
    sizes, masters = setting.expert_sizes, "masters on the GPU" in text
    every = "resident on the GPU" in text
    found = re.search(r"(\d+) layers resident", text)
    kept = sizes.layers if every else int(found[1]) if found else 0
    taken = re.search(r"([\d.]+) ([GM])B of GPU memory", text)
    groups = 1 if every else -(-sizes.stored // 300_000_000)
    tokens = run["rows_a_pass"] * settings["length"]
    start = Placement(
        tokens, slot_bytes=sizes.slot(groups), groups=groups, masters=masters,
        resident=evenly(kept, sizes.layers) if kept else (),
        rows_at_once=sizes.rows_at_once(tokens, groups),
    )  # fmt: skip
    # The ring is what else was taken for experts.
    ring = float(taken[1]) * {"G": 1e9, "M": 1e6}[taken[2]] - start.lora_bytes(sizes)
    ring -= start.resident_bytes(sizes) + start.streamed_bytes(sizes)
    slots = 0 if every else max(2, round(ring / start.slot_bytes))
    return replace(setting, rows=run["rows_a_pass"], placement=replace(start, slots=slots))


def test_memory_is_that_of_recorded_runs(made):
    errors = {}
    for number, (name, told, run) in enumerate(recorded()):
        planned = total(predict(as_run(made, told, run)), "GPU")
        errors[name, number] = planned / run["gpu"]["used"] - 1
    assert len(errors) > 12
    assert min(errors.values()) > -0.02  # a run that takes more than planned fails
    # One of 32,768 tokens in a micro-batch is the last: it isn't recorded where its outputs were.
    assert sorted(errors.values())[-2] < 0.07
    assert max(errors.values()) < 0.11


def test_streamed_steps_take_what_was_recorded(made):
    """By assumed costs, which know the link best: up to 16,384 tokens, none of them fitted run by run."""
    errors = []
    for _, told, run in recorded():
        setting = as_run(made, told, run)
        placement, settings = setting.placement, told["settings"]
        if run["who"] != "stream" or placement.tokens > 16384:
            continue
        if len(placement.resident) == setting.expert_sizes.layers:
            continue
        pinned = f"tokens_per_pass={placement.tokens}"
        name = told["model"]["model_type"]
        (cut,) = cuts_for(made(name, settings["rows"], settings["length"], pinned))
        found = predict_seconds(placement, setting.expert_sizes, cut, assumed_costs(setting))
        errors.append(found.step / statistics.median(run["seconds"][1:]) - 1)
    assert len(errors) >= 11
    assert max(map(abs, errors)) <= 0.15


@pytest.mark.parametrize("wanted", ["auto", "cpu", "stream", "resident"])
@pytest.mark.parametrize("rows", [1, 16])
def test_a_plan_takes_what_training_takes(made, wanted, rows):
    setting = made("deepseek_v2", rows, 512, f"kt_experts={wanted}")
    limits = limits_for(setting, limit_of(setting, 48 * GB))
    costs = replace(assumed_costs(setting), cpu=Line(0.0, 1e-9))  # so that each device may be it
    choices, reason = choose(setting, limits, costs, None)
    trained = replace(costs, cpu=None) if wanted == "auto" and rows == 16 else costs
    taken = rank_placements(setting, limits, trained)[0]
    (chosen,) = [each for each in choices if each.chosen]
    assert chosen.scored == taken
    assert chosen.setting.placement == taken.placement
    assert f"{taken.seconds.step:.2f} s a step predicted" in reason
    # stream keeps all layers where they fit.
    usual = {"cpu": "cpu", "auto": "cpu" if rows == 1 else "resident"}
    assert chosen.name == usual.get(wanted, "resident")


@pytest.mark.parametrize("rows", [1, 16, 64])
@pytest.mark.parametrize("storage", ["bf16", "int4"])
def test_more_memory_is_never_slower(made, rows, storage):
    setting = made("deepseek_v2", rows, 512, *(["int4"] if storage == "int4" else []))
    costs, found = assumed_costs(setting), []
    for memory in range(8, 60, 4):
        limits = limits_for(setting, limit_of(setting, memory * GB))
        first = rank_placements(setting, limits, costs)[0]
        assert first.bytes <= limits.free
        found.append(first.seconds.step)
    assert found == pytest.approx(sorted(found, reverse=True), rel=0.002)


def test_int4_at_six_gigabytes_takes_no_more_micro_batches_than_it_must(made):
    """0.6 took four for the sake of few groups; and nothing is ever shared with the CPU within a layer."""
    setting = made("deepseek_v2", 16, 512, "int4")
    limits = limits_for(setting, limit_of(setting, 6 * GB))
    ranked = rank_placements(setting, limits, assumed_costs(setting))
    assert 16 * 512 / ranked[0].placement.tokens < 3
    assert {each.placement.mode(setting.expert_sizes) for each in ranked} == {"stream"}


def test_too_little_and_too_much_memory_are_told(run_yaml, made, tmp_path):
    setting = made("deepseek_v2", 16, 512, "kt_experts=stream")
    limits = limits_for(setting, limit_of(setting, 3 * GB))
    with pytest.raises(UsageError, match=r"groups of experts of .* are left for them") as caught:
        rank_placements(setting, limits, assumed_costs(setting))
    assert "kt_gpu_memory" in caught.value.next_step
    config = load_config(run_yaml, ["kt_config.kt_gpu_memory=80GB"])
    plan = make_plan(config, Target(24 * GB, memory=64 * GB, disk=100 * GB, cores=2), measure=False)
    assert any("more than the GPU has" in note for note in plan.notes)
    assert any("assumed costs" in note for note in plan.notes)
    assert plan.as_dict()["placement"]["on_gpu"] is True
