"""A plan's placement: the one that training takes, and its memory against recorded runs."""

import json
import re
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import trainrun
from planshapes import QWEN3, QWEN3_5, V2_LITE, plan_run
from trainrun import conversation, write_lines

from ktbridge.errors import UsageError
from ktbridge.experts.gpu.placement import Line, Placement, predict_seconds, spread_evenly
from ktbridge.sft import expert_device
from ktbridge.sft.config import load_config
from ktbridge.sft.placement import (
    assumed_costs,
    beyond,
    choose_placement,
    compare_placements,
    describe_placement,
    kept_free,
    limit_of,
    limits_for,
    rank_placements,
    step_splits,
    with_placement,
)
from ktbridge.sft.plan.inputs import CpuTimes, ExpertTimes, ProductRates, TargetMachine
from ktbridge.sft.plan.lengths import Lengths
from ktbridge.sft.plan.memory import CUDA_CONTEXT, predict_parts, total
from ktbridge.sft.plan.setting import RunSetting
from ktbridge.sft.plan.shape import in_storage, read_shape, stub_from_config
from ktbridge.sft.plan.time import pace_on_cpu, pace_on_gpu

GB = 10**9
BENCH = Path(__file__).parents[2] / "docs" / "bench"


@pytest.fixture
def run_yaml(tmp_path, base_dir):
    write_lines(tmp_path / "rows.jsonl", [conversation("a", "b")] * 4)
    return trainrun.write_run(tmp_path, base_dir, kt_config={"kt_experts": "auto"}) / "run.yaml"


@pytest.fixture(scope="module")
def shapes(tmp_path_factory):
    found = {}
    models = {"deepseek_v2": V2_LITE, "qwen3_moe": QWEN3, "qwen3_5_moe": QWEN3_5}
    for name, fields in models.items():
        base = tmp_path_factory.mktemp(name)
        (base / "config.json").write_text(json.dumps(fields))
        found[name] = read_shape(base, None, stub_from_config(base))
    return found


@pytest.fixture
def made(shapes, run_yaml):
    """Make a ``RunSetting`` of a published shape: so many rows of a length in a step."""

    def setting(name, rows, length, *more):
        overrides = ["lora_rank=8", "lora_target=all", "per_device_train_batch_size=1", "bf16=true"]
        overrides += [f"gradient_accumulation_steps={rows}", f"cutoff_len={length}", *more]
        shape = in_storage(shapes[name], "int4") if "int4" in more else shapes[name]
        config = load_config(run_yaml, [each for each in overrides if each != "int4"])
        return RunSetting(shape, config, Lengths(999, 999, length, float(length), True), True, 16)

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
        resident=spread_evenly(kept, sizes.layers) if kept else (),
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
        planned = total(predict_parts(as_run(made, told, run)), "GPU")
        errors[name, number] = planned / run["gpu"]["used"] - 1
    assert len(errors) > 12
    assert min(errors.values()) > -0.02  # a run that takes more than planned fails
    # One of 32,768 tokens in a micro-batch is the last: it isn't recorded where its outputs were.
    assert sorted(errors.values())[-2] < 0.09
    assert max(errors.values()) < 0.11


def test_dropout_of_the_experts_lora_takes_memory(made):
    """Its inputs are apart then: one more tensor as wide as hidden states for each row."""
    plain, dropped = (
        made("qwen3_moe", 16, 512, *more).expert_sizes for more in ((), ("kt_config.kt_lora_dropout=0.1",))
    )
    for groups in (1, 3):
        more = dropped.work(8192, groups) - plain.work(8192, groups)
        assert more == 2 * plain.hidden * plain.rows_at_once(8192, groups)


# V2-Lite by `ktbridge train` of 0.6.1 on an H100, LoRA on all modules: rows, budget, nvidia-smi's peak.
H100 = [(1, 11, 10093), (4, 11, 9827), (16, None, 36931)]


@pytest.mark.parametrize(("rows", "budget", "peak"), H100)
def test_memory_is_that_of_training(made, rows, budget, peak):
    setting = made("deepseek_v2", rows, 512, *([f"kt_gpu_memory={budget}GB"] if budget else []))
    limits = limits_for(setting, limit_of(setting, 85 * GB))
    ranked = rank_placements(setting, limits, assumed_costs(setting))
    # That version kept no gate and up.
    first = next(each.placement for each in ranked if not each.placement.keep_gate_up)
    placed = with_placement(setting, first.tokens, first)
    assert first.tokens == rows * 512
    assert total(predict_parts(placed), "GPU") == pytest.approx(peak << 20, rel=0.1)


@pytest.mark.quick("case[01]|case2-more0")
@pytest.mark.parametrize("more", [[], ["pure_bf16=true"], ["tokens_per_pass=1024"]])
@pytest.mark.parametrize("case", [("deepseek_v2", 16, 6), ("qwen3_moe", 1, 11), ("qwen3_5_moe", 64, 24)])
def test_a_plans_parts_are_what_a_placement_and_its_limits_take(made, case, more):
    name, rows, budget = case
    setting = made(name, rows, 512, f"kt_gpu_memory={budget}GB", *more)
    limit = limit_of(setting, 85 * GB)
    limits, free = limits_for(setting, limit), kept_free(limit)
    assert free >= max(256_000_000, 0.03 * limit - 1)
    ranked = rank_placements(setting, limits, assumed_costs(setting))
    for scored in ranked[:: 1 + len(ranked) // 12]:
        parts = predict_parts(with_placement(setting, scored.placement.tokens, scored.placement))
        taken = CUDA_CONTEXT + limit - free - limits.free + scored.bytes
        assert total(parts, "GPU") == taken <= budget * GB - free
        assert all(part.size >= 0 for part in parts)


def test_kernels_of_linear_attention_take_larger_micro_batches(made):
    """Qwen3.5 in 11 GB: as transformers computes it in two micro-batches, by its kernels in one."""
    setting, tokens = made("qwen3_5_moe", 16, 512), {}
    for kernels in (False, True):
        setting = replace(setting, kernels=kernels)
        limits = limits_for(setting, limit_of(setting, 11 * GB))
        first = rank_placements(setting, limits, assumed_costs(setting))[0]
        tokens[kernels] = first.placement.tokens
    assert tokens == {False: 4096, True: 8192}


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
        (cut,) = step_splits(made(name, settings["rows"], settings["length"], pinned))
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
    listed, reason = choose_placement(setting, limits, costs, None)
    trained = replace(costs, cpu=None) if wanted == "auto" and rows == 16 else costs
    taken = rank_placements(setting, limits, trained)[0]
    (chosen,) = [each for each in listed if each.chosen]
    assert chosen.scored == taken
    assert chosen.setting.placement == taken.placement
    assert f"{taken.seconds.step:.2f} s a step predicted" in reason
    # stream keeps all layers where they fit.
    usual = {"cpu": "cpu", "auto": "cpu" if rows == 1 else "resident"}
    assert chosen.name == usual.get(wanted, "resident")


def executed(setting, memory, monkeypatch, resumed=None, given=None):
    """Place a run's experts as `train` does on a GPU of ``memory`` bytes; ``given`` gets the placement."""
    limits = limits_for(setting, limit_of(setting, memory))

    def give(model, device, placement):
        (given if given is not None else []).append(placement)
        return type("PlacedExperts", (), {"how": "read in place"})

    for name, value in (
        ("choose_device", lambda config: torch.device("cpu")),
        ("_obstacle", lambda *_: ""),
        ("read_sizes", lambda *_: setting.expert_sizes),
        ("_limits", lambda *_: limits),
        ("_measure", lambda *_: (assumed_costs(setting), 0)),
        ("give_to_gpu", give),
    ):
        monkeypatch.setattr(expert_device, name, value)
    return expert_device.place_experts(setting, None, resumed)


@pytest.mark.parametrize("wanted", ["auto", "stream", "resident"])
def test_training_executes_what_a_plan_prints(made, wanted, monkeypatch):
    setting, given = made("deepseek_v2", 16, 512, f"kt_experts={wanted}"), []
    planned = compare_placements(setting, 80 * GB, 64 * GB)
    trained = executed(setting, 80 * GB, monkeypatch, given=given)
    chosen = planned.chosen
    assert given == [chosen.setting.placement]
    assert (trained.mode, trained.predicted) == (chosen.name, chosen.scored.seconds.step)
    assert trained.predicted_gpu == total(predict_parts(chosen.setting), "GPU")
    assert planned.reason.removesuffix("; by assumed costs") in trained.why


@pytest.mark.parametrize("storage", ["bf16", "int4"])
def test_six_gigabytes_take_one_micro_batch_where_mlps_are_in_pieces(made, storage):
    """And two where they are whole: the dense first layer's inner states are what is too much."""
    more = ["kt_gpu_memory=6GB", *(["int4"] if storage == "int4" else [])]
    setting = made("deepseek_v2", 16, 512, *more)
    limits = limits_for(setting, limit_of(setting, 85 * GB))
    ranked = rank_placements(setting, limits, assumed_costs(setting))
    assert {each.placement.mode(setting.expert_sizes) for each in ranked} == {"stream"}
    best = {each.placement.pieces_from: each for each in reversed(ranked)}
    assert [best[width].placement.tokens for width in (10944, 2816, 0)] == [8192, 8192, 4096]
    assert ranked[0] is best[10944]  # the shared experts' pieces would cost more than they save
    said = describe_placement(ranked[0], setting.expert_sizes, 8192)
    assert "MLPs of 10,944 inner states and more in pieces" in said
    placed = with_placement(setting, 8192, ranked[0].placement)
    whole = replace(placed, placement=replace(placed.placement, pieces_from=0))
    taken, needed = (total(predict_parts(each), "GPU") for each in (placed, whole))
    assert taken < 6 * GB < needed
    off = made("deepseek_v2", 16, 512, *more, "disable_gradient_checkpointing=true")
    assert limits_for(off, limit_of(off, 85 * GB)).in_pieces == ()


@pytest.mark.parametrize("name", ["deepseek_v2", "qwen3_moe", "qwen3_5_moe"])
@pytest.mark.parametrize("rows", [1, 16])
def test_where_memory_is_not_short_mlps_are_whole(made, name, rows):
    setting = made(name, rows, 512)
    limits = limits_for(setting, limit_of(setting, 80 * GB))
    ranked = rank_placements(setting, limits, assumed_costs(setting))
    assert not ranked[0].placement.pieces_from
    assert (limits.in_pieces == ()) == (name == "qwen3_moe")


@pytest.mark.parametrize(("before", "taken"), [({}, 0), ({"pieces_from": 2816}, 2816)])
def test_a_resumed_run_splits_mlps_as_before(made, monkeypatch, before, taken):
    """A checkpoint of a version that didn't split them says nothing."""
    setting = made("deepseek_v2", 16, 512, "kt_gpu_memory=8GB")
    resumed = {"on_gpu": True, "tokens": 4096, **before}
    placed = executed(setting, 8 * GB, monkeypatch, resumed)
    assert placed.ranking.taken.placement.pieces_from == taken
    assert placed.state()["pieces_from"] == taken
    assert executed(setting, 6 * GB, monkeypatch, None).state()["pieces_from"] == 10944


def test_too_little_and_too_much_memory_are_told(run_yaml, made, tmp_path):
    setting = made("deepseek_v2", 16, 512, "kt_experts=stream")
    limits = limits_for(setting, limit_of(setting, 3 * GB))
    with pytest.raises(UsageError, match=r"groups of experts of .* are left for them") as caught:
        rank_placements(setting, limits, assumed_costs(setting))
    assert "kt_gpu_memory" in caught.value.next_step
    short = made("deepseek_v2", 16, 512, "kt_experts=resident")
    with pytest.raises(UsageError, match=r"all experts resident .* GPU memory"):
        rank_placements(short, limits_for(short, limit_of(short, 24 * GB)), assumed_costs(short))
    config = load_config(run_yaml, ["kt_config.kt_gpu_memory=80GB"])
    plan = plan_run(config, TargetMachine(24 * GB, memory=64 * GB, disk=100 * GB, cores=2), measure=False)
    assert beyond(made("deepseek_v2", 16, 512, "kt_gpu_memory=80GB"), 24 * GB) in plan.notes
    assert not beyond(setting, 24 * GB)
    assert any("assumed costs" in note for note in plan.notes)
    assert plan.as_dict()["placement"]["on_gpu"] is True


def test_a_pace_on_the_gpu_is_its_placements_seconds(made):
    """As in the reason; the CPU's has the times of its experts, and all else."""
    setting = made("deepseek_v2", 16, 512, "kt_gpu_memory=11GB")
    costs = assumed_costs(setting)
    found = compare_placements(setting, 80 * GB, 64 * GB, costs)
    by = {each.name: each for each in found.choices}
    assert not by["cpu"].setting.placement.on_gpu
    times = ExpertTimes(1.0, 1.0, 0.0, 0.0, "timed")
    timed = CpuTimes(times, ProductRates(1e15, 1e15, "GPU"))
    slow = pace_on_cpu(by["cpu"].setting, timed, costs)
    assert slow.step_seconds > 26  # a second a layer, and all else
    assert (by["stream"].chosen, by["resident"].setting) == (True, None)
    seconds = by["stream"].scored.seconds
    pace = pace_on_gpu(by["stream"].setting, by["stream"].scored, costs)
    assert pace.step_seconds == seconds.step
    assert pace.tokens_per_second == pytest.approx(16 * 512 / seconds.step)
    assert 0.5 < pace.expert_share < 1  # the link's
    assert f"{seconds.step:.2f} s a step predicted" in found.reason
    assert not found.notes
