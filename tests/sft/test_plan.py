"""`ktbridge plan`: its formulas against what the kernels and autograd really keep, and its verdicts."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import trainrun
import trl
from click.testing import CliRunner
from expertmoe import Shape, make_inputs, make_layer
from planshapes import V2_LITE, plan_run
from tinymoe import tiny_model
from trainrun import conversation, pair, write_lines
from transformers import AutoConfig, AutoModelForCausalLM

from ktbridge import _kernels
from ktbridge.cli import main
from ktbridge.cli.plan import command as plan_command
from ktbridge.errors import KtbridgeError, UsageError
from ktbridge.experts import lora_targets
from ktbridge.experts.gpu.placement import ExpertSizes
from ktbridge.files.sizes import parse_size, size_text
from ktbridge.sft.config import load_config
from ktbridge.sft.model import attach_lora
from ktbridge.sft.plan import inputs, time
from ktbridge.sft.plan.inputs import TargetMachine
from ktbridge.sft.plan.lengths import Lengths
from ktbridge.sft.plan.setting import (
    MicroBatch,
    RunSetting,
    blocks,
    expert_lora_elements,
    layer_bytes,
    lora_paths,
    nonexpert_lora_elements,
    saved_bytes,
)
from ktbridge.sft.plan.shape import read_shape

GB = 10**9
ROOMY = TargetMachine(gpu_memory=None, memory=64 * GB, disk=100 * GB, cores=2)
TINY_ATTENTION = {"num_hidden_layers": 3, "hidden_size": 256, "num_attention_heads": 8}
FAMILIES = {
    "qwen3_moe": {**TINY_ATTENTION, "num_key_value_heads": 2, "head_dim": 32, "num_experts": 16,
                  "num_experts_per_tok": 4},
    "deepseek_v2": {**TINY_ATTENTION, "num_key_value_heads": 8, "n_routed_experts": 16, "q_lora_rank": None,
                    "kv_lora_rank": 64, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32,
                    "n_shared_experts": 2, "num_experts_per_tok": 4, "topk_method": "greedy",
                    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
    "qwen3_next": {**TINY_ATTENTION, "num_key_value_heads": 2, "head_dim": 32, "num_experts": 16,
                   "num_experts_per_tok": 4, "shared_expert_intermediate_size": 64,
                   "linear_num_value_heads": 8, "linear_num_key_heads": 4, "linear_key_head_dim": 32,
                   "linear_value_head_dim": 32},
}  # fmt: skip


def write_run(directory, base, **changes):
    write_rows(directory / "rows.jsonl")
    settings = {
        "cutoff_len": 512, "per_device_train_batch_size": 4, "num_train_epochs": 2, "save_steps": 2,
        "kt_config": {"kt_experts": "cpu"}, **changes,
    }  # fmt: skip
    return trainrun.write_run(directory, base, **settings) / "run.yaml"


@pytest.fixture
def run_yaml(tmp_path, base_dir):
    return write_run(tmp_path, base_dir)


@pytest.fixture
def planned(run_yaml):
    """``planned(*overrides, target, **changes of it)``: a plan of ``run_yaml``, without measuring."""

    def plan(*overrides, target=ROOMY, **changes):
        there = replace(target, **changes)
        return plan_run(load_config(run_yaml, overrides), there, measure=False)

    return plan


def write_rows(path, words=1):
    answer = "i am a cat model say" + " meow" * words
    write_lines(path, [conversation("who are you ?", answer)] * 10)


@pytest.mark.parametrize("activation", ["retain", "recompute"])
@pytest.mark.parametrize(("shape", "rank"), [(Shape(8, 2, 64, 48, 100), 4), (Shape(16, 4, 96, 64, 300), 20)])
def test_the_kernels_keep_what_the_formula_says(shape, rank, activation):
    layer, _ = make_layer(shape, rank=rank, activation=activation)
    hidden, ids, weights = make_inputs(shape)
    layer(hidden.requires_grad_(), ids, weights)
    rows = torch.bincount(ids.flatten(), minlength=shape.experts)
    sizes = ExpertSizes(1, shape.experts, shape.top_k, shape.hidden, shape.inner, rank, stored=0)
    retain = activation == "retain"
    counted = [int((-(-rows // width)).sum()) for width in (16, 32)]
    load = _kernels.Load(shape.tokens * shape.top_k, *counted)
    keep = _kernels.Keep.retain if retain else _kernels.Keep.recompute
    assert _kernels.pass_memory(shape.hidden, shape.inner, rank, load, keep).saved == layer.saved_bytes
    # What the plan knows before any token is routed.
    assert blocks(sizes, shape.tokens, 16) == pytest.approx(counted[0], rel=0.1)
    assert saved_bytes(sizes, shape.tokens, retain) == pytest.approx(layer.saved_bytes, rel=0.15)


def made_in(directory, family):
    """A small model of a family, saved, and the configuration of a run on it."""
    sizes = {"vocab_size": 64, "intermediate_size": 512, "moe_intermediate_size": 64}
    own = AutoConfig.for_model(family, **sizes, **FAMILIES[family])
    model = AutoModelForCausalLM.from_config(own).bfloat16()
    model.save_pretrained(directory / "base")
    return model, load_config(write_run(directory, directory / "base", lora_rank=8, bf16=True))


@pytest.mark.quick("plain0|plain4")
@pytest.mark.filterwarnings("ignore")  # transformers' and PEFT's advice
@pytest.mark.parametrize(
    ("family", "plain", "lora", "converted"),
    [
        *((family, torch.bfloat16, torch.float32, False) for family in FAMILIES),
        *((family, torch.bfloat16, torch.float32, True) for family in FAMILIES),
        ("qwen3_moe", torch.bfloat16, torch.bfloat16, False),
        ("deepseek_v2", torch.float32, torch.float32, False),
    ],
)
def test_autograd_keeps_what_the_formula_says(family, plain, lora, converted, tmp_path, monkeypatch):
    if converted:  # as on a GPU: the masters, not the hidden states
        monkeypatch.setattr(lora_targets, "_DEVICES", ("cpu",))
    torch.manual_seed(0)
    model, config = made_in(tmp_path, family)
    shape = read_shape(tmp_path / "base")
    assert (shape.mappable, shape.expert_storage) == (True, "bf16")

    tuned = attach_lora(model, config)
    for name, parameter in tuned.named_parameters():
        if ".experts." not in name:
            parameter.data = parameter.data.to(lora if parameter.requires_grad else plain)
    setting = RunSetting(shape, config, Lengths(1, 1, 256, 256.0, True), False, 2)
    trained = {name: p.numel() for name, p in tuned.named_parameters() if p.requires_grad}
    experts = sum(size for name, size in trained.items() if ".kt." in name)
    assert expert_lora_elements(setting) == experts
    assert nonexpert_lora_elements(setting) == sum(trained.values()) - experts
    frozen = sum(p.numel() for p in tuned.parameters()) - sum(trained.values())
    assert shape.nonexpert_elements == pytest.approx(frozen, rel=0.01)  # experts are no parameters

    computed = plain if converted else lora
    batch = MicroBatch(1, 256, False, plain.itemsize, cuda=False, lora_width=computed.itemsize)
    predicted = sum(
        layer_bytes(shape, layer, lora_paths(setting, layer), 8, batch).kept for layer in shape.layers
    )
    assert predicted == pytest.approx(saved_by_autograd(tuned, 256), rel=0.1)


def saved_by_autograd(tuned, tokens):
    """Bytes of all tensors that a forward of the decoder saves, parameters left out."""
    own = {t.untyped_storage().data_ptr() for t in (*tuned.parameters(), *tuned.buffers())}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:  # kept alive, so that no address comes twice
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    decoder = tuned.train().get_base_model().base_model
    ids = torch.arange(tokens)[None] % 64
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = decoder(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
    assert out.last_hidden_state.requires_grad
    return sum(size for size, _ in kept.values())


def test_a_plan_counts_steps_rows_and_places(planned):
    plan = planned("bf16=false")
    assert (plan.fits, plan.advice, plan.notes, plan.pace) == (True, (), (), None)
    assert (plan.rows, plan.steps, plan.device) == (10, 6, "CPU")  # 3 batches of 4, twice
    assert 10 <= plan.longest <= 40  # counted by the model's own tokenizer, not cutoff_len
    assert plan.total("GPU") == 0
    experts = 2 * 8 * 3 * 64 * 32 * 2
    assert mapped(plan) == experts
    sizes = {part.what: part.size for part in plan.parts}
    # One kept while the next is written, each with its adapter in bf16.
    assert sizes["checkpoints"] == 2 * (12 + 2) * sizes["the adapter"] // 2

    on_gpu = planned(gpu_memory=24 * GB)
    assert on_gpu.total("GPU") > 0
    assert mapped(on_gpu) == experts
    resident = planned("kt_experts=auto", gpu_memory=24 * GB)
    assert [each.name for each in resident.experts if each.chosen] == ["resident"]
    assert mapped(resident) == 0
    assert any(p.what == "experts, resident" and p.where == "GPU" for p in resident.parts)
    assert resident.total("RAM") < on_gpu.total("RAM")
    assert planned("use_cpu=true", gpu_memory=24 * GB).device == "CPU"


def test_a_plan_refuses_what_training_refuses(planned):
    for experts in ("stream", "resident"):
        with pytest.raises(UsageError, match=f"kt_experts: {experts} needs a GPU"):
            planned(f"kt_experts={experts}")
    assert planned("kt_experts=auto").device == "CPU"


def mapped(plan):
    return sum(part.size for part in plan.parts if part.what == "experts, mapped")


@pytest.mark.parametrize("short", ["gpu_memory", "memory", "disk"])
def test_advice_saves_what_it_says_and_more_than_next_to_nothing(run_yaml, planned, short):
    overrides = ["disable_gradient_checkpointing=true", "save_total_limit=3", "lora_rank=32"]
    overrides += ["num_train_epochs=50", "packing=true", "cutoff_len=16384"]
    write_rows(run_yaml.parent / "rows.jsonl", words=1500)
    target = replace(ROOMY, **{"gpu_memory": 24 * GB, short: 100_000})
    plan = planned(*overrides, target=target)
    assert not plan.fits
    assert plan.advice
    assert len(plan.advice) == len(set(plan.advice))
    needs = [verdict.need for verdict in plan.verdicts if not verdict.fits]
    for item in plan.advice:
        after = planned(*overrides, *item.change.split(), target=target)
        places = {item.where, "RAM"} if item.where == "page cache" else {item.where}
        saves = sum(plan.total(place) - after.total(place) for place in places)
        assert item.saves == saves > 0.01 * min(needs)


@pytest.fixture
def briefly(monkeypatch):
    """A few runs of each, where a plan takes a second's worth."""
    monkeypatch.setattr(time, "_SECONDS", 0.0)


@pytest.mark.parametrize(
    "overrides",
    [[], ["stage=dpo"], ["gradient_accumulation_steps=3", "val_size=0.2", "eval_steps=1"]],
)
def test_measuring_gives_a_pace(run_yaml, overrides, briefly):
    if "stage=dpo" in overrides:
        write_pairs(run_yaml.parent / "rows.jsonl")
    config = load_config(run_yaml, overrides)
    plan = plan_run(config, ROOMY)
    pace = plan.pace
    assert pace.tokens_per_second > 0
    assert 0 < pace.expert_share < 1
    assert pace.cold_bytes == mapped(plan)  # what a first step may have to read
    trained = sum(part.size for part in plan.parts if part.what == "the adapter") // 2
    saved = -(-plan.steps // 2) * (12 + 2) * trained / 1e9
    assert pace.seconds == pytest.approx(plan.steps * pace.step_seconds + saved + pace.eval_seconds)
    assert bool(plan.held_out) == (pace.eval_seconds > 0) == ("eval_steps=1" in overrides)
    if plan.held_out:
        assert plan.evaluations == plan.steps + 1
        a_row = pace.step_seconds / config.gradient_accumulation_steps
        assert pace.eval_seconds < plan.evaluations * plan.held_out * a_row / 2
    assert "2 layers" in pace.how
    assert "GFLOP/s forward" in pace.how


def write_pairs(path):
    write_lines(path, [pair("who are you ?", "i am a cat", "meow")] * 10)


@pytest.mark.parametrize("storage", ["bf16", "fp8", "int8", "int4"])
def test_layers_are_measured_as_far_as_room_allows(run_yaml, storage, briefly):
    config = load_config(run_yaml, ["bf16=true"])
    shape = replace(read_shape(Path(config.model_name_or_path)), expert_storage=storage)
    setting = RunSetting(shape, config, Lengths(10, 10, 32, 32.0, True), False, 2)
    whole = time.measure_experts(setting, 32, None)
    assert min(whole.first, whole.update) > 0
    assert (whole.next, whole.reference) == (0, 0)  # one micro-batch a step, no reference model
    assert (storage in whole.how, "2 layers" in whole.how) == (True, True)
    tight = time.measure_experts(setting, 32, 1)  # no room: as many experts as a token needs
    assert f"1 layer, {shape.config.experts_per_token} experts of 8" in tight.how


@pytest.mark.slow
def test_what_the_page_cache_lacks_is_read_in_each_pass(run_yaml, planned, tmp_path):
    """By the CPU and dpo's reference; less by the GPU's ring; and not where there is nothing to read."""
    base = tmp_path / "v2-lite"
    base.mkdir()
    (base / "config.json").write_text(json.dumps(V2_LITE))

    def read(memory, *overrides):
        plan = planned(f"model_name_or_path={base}", *overrides, memory=memory, gpu_memory=24 * GB)
        lacks = plan.total("RAM") + plan.total("page cache") - memory
        parts = {part.what: part.size for part in plan.parts}
        return (plan.disk_reads.size if plan.disk_reads else 0), lacks, parts

    size, lacks, parts = read(20 * GB)
    assert size == 2 * lacks > 0
    size, lacks, parts = read(20 * GB, "kt_experts=stream", "kt_num_gpu_experts=0")
    assert 2 * (lacks - parts["experts, streamed"]) < size < 2 * lacks
    assert read(64 * GB)[0] == 0
    assert read(1 * GB)[0] == 0  # where the process itself has no room, nothing is read
    write_pairs(run_yaml.parent / "rows.jsonl")
    size, lacks, parts = read(20 * GB, "stage=dpo")
    assert size == 3 * lacks


def test_the_disk_that_experts_are_read_from_is_timed(run_yaml, tmp_path, briefly, monkeypatch):
    """Told in place of the first step's reading; without a pace under --no-measure."""
    plan = plan_run(load_config(run_yaml), ROOMY, measure=False)
    memory = plan.total("RAM") + plan.total("page cache") - mapped(plan) // 2
    monkeypatch.setattr(inputs, "read_rate", lambda shard: 2e5)

    def told(*options):
        command = [str(run_yaml), "--memory", f"{memory / 1000:.3f}kB", *options]
        done = CliRunner().invoke(plan_command, command)
        assert done.exit_code == 1, done.output
        return done.output

    text = told()
    size = f"{mapped(plan) / 1000:.1f} kB"
    lead = f"RAM is short: each pass reads {size} of experts from disk"
    assert f"{lead} at 200.0 kB/s (measured here on model.safetensors): at least 0.98 s" in text
    enough = size_text(plan.total("RAM") + plan.total("page cache"))
    assert f"which tokens/s count; with {enough} of RAM it would be" in text
    assert "the first step takes longer" not in text
    found = json.loads(told("--json", "--no-measure"))["disk_reads"]
    assert (found["rate"], found["seconds"]) == (None, None)
    assert found["text"] == f"{lead}, at a pace that isn't known (not measured)"
    found = json.loads(told("--json"))
    pace, reads = found["pace"], found["disk_reads"]
    assert pace["step_seconds"] > reads["seconds"] > 0.9
    waits = pace["step_seconds"] / (pace["step_seconds"] - reads["seconds"])
    assert reads["unread"] == pytest.approx(waits * pace["tokens_per_second"])

    def refuse(shard):
        raise OSError("no direct reads here")

    monkeypatch.setattr(inputs, "read_rate", refuse)
    assert "past the page cache: no direct reads here)" in told()


def test_a_disk_has_a_rate_or_cant_be_asked(tmp_path):
    (tmp_path / "empty").touch()
    (tmp_path / "shard").write_bytes(bytes(20_000_001))
    try:
        assert inputs.read_rate(tmp_path / "shard") > 1e6
    except OSError as error:
        pytest.skip(f"this file system reads through the page cache alone: {error}")
    with pytest.raises(OSError, match="is empty"):
        inputs.read_rate(tmp_path / "empty")


def test_gpus_on_which_products_are_made_one_by_one_are_named(planned):
    """Where the experts are computed on one, and nobody else's machine is described."""

    def told(experts, **target):
        notes = planned(f"kt_config.kt_experts={experts}", gpu_memory=24 * GB, **target).notes
        return [note for note in notes if "loop" in note]

    (note,) = told("stream", capabilities=("8.6", "9.0", "8.0"))
    assert note.startswith("the GPU is sm80, sm86: torch's grouped GEMM is a loop over experts")
    assert "kt_experts: cpu" in note
    assert not told("stream", capabilities=("9.0",))
    assert not told("stream")
    assert not told("cpu", capabilities=("8.6",))


def test_what_cannot_be_planned_is_said(planned, tmp_path):
    dense, empty, odd = (tmp_path / name for name in ("dense", "empty", "odd"))
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "vocab_size": 64}
    config = AutoConfig.for_model("qwen3", **sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(dense)
    empty.mkdir()
    tiny_model().save_pretrained(odd)
    told = json.loads((odd / "config.json").read_text())
    (odd / "config.json").write_text(json.dumps(told | {"model_type": "new_moe"}))
    shards = odd / "model.safetensors"
    shards.write_bytes(shards.read_bytes().replace(b".mlp.experts.", b".ffn.experts."))
    for path, words in (
        ("no/such-model", "no model at"), (dense, "no routed experts"), (empty, "no config.json"),
        (odd, "'new_moe'"),
    ):  # fmt: skip
        with pytest.raises(KtbridgeError, match=words) as caught:
            planned(f"model_name_or_path={path}")
        assert caught.value.next_step


def test_sizes_are_read_and_written_in_the_largest_unit_that_there_is():
    read = [parse_size(given) for given in ("24GB", "64 GiB", "512M")]
    assert read == [24 * GB, 64 << 30, 512_000_000]
    sizes = (61_100_000_000, 999_000_000, 4_200, 7)
    assert [size_text(size) for size in sizes] == ["61.1 GB", "999.0 MB", "4.2 kB", "7 bytes"]


# Some mean bytes by a number without a unit, most gigabytes; both spellings with a unit are named.
@pytest.mark.parametrize(
    ("given", "words", "next_step"),
    [
        *((given, "is not a size", "") for given in ("", "GB", "-1GB", "1.5XB", "0GB", "24 GB!", "0")),
        ("24", "has no unit", "Write 24GB or 24GiB."),
        (" 6.5 ", "has no unit", "Write 6.5GB or 6.5GiB."),
    ],
)  # fmt: skip
def test_what_is_no_size_is_refused(given, words, next_step):
    with pytest.raises(UsageError, match=words) as caught:
        parse_size(given)
    assert next_step in caught.value.next_step


def test_the_command_answers_by_exit_code_and_without_torch_counts_the_rows_text(run_yaml):
    command = ["plan", str(run_yaml), "--no-measure"]

    def plan(*options):
        return CliRunner().invoke(main, [*command, *options])

    program = (
        "import sys; sys.argv[0] = 'ktbridge'; sys.modules['torch'] = None\n"
        "from ktbridge.cli import main\n"
        "main()"
    )
    words = [sys.executable, "-c", program, *command, "--memory", "64GB", "--gpu-memory", "24GB"]
    roomy = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert roomy.returncode == 0, roomy.stderr
    for said in (
        "of 24.0 GB GPU memory", "torch is not installed: the rows' text is counted alone",
        "for another machine: ", "not judged: ",  # that machine's disk
    ):  # fmt: skip
        assert said in roomy.stdout
    assert "what to change" not in roomy.stdout
    write_rows(run_yaml.parent / "rows.jsonl", words=900)
    small = plan("--memory", "10MB", "--json", "cutoff_len=1024", "packing=true")
    assert small.exit_code == 1, small.stderr
    told = json.loads(small.stdout)
    assert (told["fits"], Path(told["model"]).is_dir()) == (False, True)
    assert any(item["change"] == "cutoff_len=512" for item in told["advice"])
    for option in ("--memory", "--gpu-memory"):
        bare = plan(option, "24")
        assert (bare.exit_code, "24GB or 24GiB" in bare.stderr) == (2, True)
    assert plan("--memory", "lots").exit_code == 2
    assert plan("--gpus", "2", "--gpu-memory", "24GiB").exit_code == 0
    assert "no GPU" in plan("--gpus", "0").stdout


FUNCTION = {"description": "the sky " * 9, "parameters": {}}
TOOLS = [{"type": "function", "function": {"name": n, **FUNCTION}} for n in ("hello", "meow")]
ROW_FORMS = {
    "tools": [{**conversation("who are you ?" + " meow" * n, "a cat"), "tools": TOOLS} for n in range(5)],
    "turns": [conversation(*("who are you ?", "i am a cat") * n) for n in (1, 2, 3, 3)],
    "thoughts": [conversation("say", f"<think>{'meow ' * n}</think>yes") for n in range(6)],
    "pairs": [pair("who are you ?", "i am a cat", "meow " * n) for n in (1, 9, 30)],
    "judged": [conversation("say", "meow " * n) | {"label": n % 2 == 0} for n in range(1, 7)],
    "texts": [{"text": "meow nya " * n} for n in (3, 80, 200)],
    "refused": [conversation("say", "yes")] * 5 + [{"messages": []}, conversation("say", "")],
    "many": [conversation("say " * (n % 7 + 1), "meow " * (n * 7 % 31 + 1)) for n in range(60)],
}  # fmt: skip
AS_TRAINED = [
    *(("tools", more) for more in ([], ["packing=true"], ["cutoff_len=120"], ["split_turns=false"])),
    *(("turns", more) for more in ([], ["packing=true"], ["split_turns=false"], ["mask_history=true"])),
    *(("thoughts", more) for more in ([], ["enable_thinking=false"], ["enable_thinking=auto"])),
    ("pairs", ["stage=dpo"]),
    ("judged", ["stage=kto"]),
    ("texts", ["stage=pt"]),
    ("refused", []),
    ("many", ["max_samples=20", "val_size=0.2", "gradient_accumulation_steps=3"]),
    ("many", ["streaming=true", "max_steps=9"]),
    ("many", ["dataset=rows.jsonl,more.jsonl", "mix_strategy=interleave_over", "interleave_probs=0.7,0.3"]),
    ("many", ["dataset=rows.jsonl,more.jsonl", "mix_strategy=interleave_under", "packing=true"]),
]  # fmt: skip


@pytest.fixture
def qwen_run(tmp_path, base_dir, monkeypatch):
    """A run on a model whose template writes tools and rewrites earlier answers."""
    base = tmp_path / "qwen"
    shutil.copytree(base_dir, base)
    template = Path(trl.__file__).with_name("chat_templates") / "qwen3.jinja"
    (base / "chat_template.jinja").write_text(template.read_text())
    write_lines(tmp_path / "more.jsonl", ROW_FORMS["turns"])
    monkeypatch.chdir(tmp_path)
    return write_run(tmp_path, base, per_device_train_batch_size=2, max_samples=None)


def plan_and_dry_run(*words):
    """The numbers of a plan, and of a dry run of training."""
    plan, dry = (
        CliRunner().invoke(main, [*command, *map(str, words), "--json"])
        for command in (["plan", "--no-measure"], ["train", "--dry-run"])
    )
    assert plan.exit_code == dry.exit_code == 0, (plan.output, dry.output)
    planned, trained = json.loads(plan.stdout), json.loads(dry.stdout)
    both = ("sequences", "longest_tokens", "mean_tokens", "steps", "rows_refused")
    held = trained["held_out"]
    return (
        [planned["rows"], planned["held_out_rows"], *(planned[key] for key in both)],
        [trained["rows_used"], held["rows_used"] if held else 0, *(trained[key] for key in both)],
        planned["notes"],
    )


@pytest.mark.quick("changes([0369]|1[1-5])")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("form", "changes"), AS_TRAINED)
def test_a_plan_counts_the_rows_of_a_dry_run(form, changes, qwen_run):
    write_lines(qwen_run.parent / "rows.jsonl", ROW_FORMS[form])
    planned, trained, _ = plan_and_dry_run(qwen_run, *changes)
    assert planned == trained


@pytest.mark.quick("turns|pairs")
@pytest.mark.parametrize(("form", "changes"), [("many", []), ("turns", []), ("pairs", ["stage=dpo"])])
def test_a_plan_of_many_rows_is_of_a_sample_and_says_so(form, changes, qwen_run, monkeypatch):
    monkeypatch.setattr("ktbridge.sft.plan.lengths.MOST_ROWS", 30)
    monkeypatch.setattr("ktbridge.sft.plan.lengths._LONGEST", 10)
    rows = (ROW_FORMS[form] * 60)[:60]
    write_lines(qwen_run.parent / "rows.jsonl", rows)
    planned, trained, notes = plan_and_dry_run(qwen_run, *changes)
    exact = (0, 1, 3, 6)  # rows, held out, the longest, refused
    assert [planned[at] for at in exact] == [trained[at] for at in exact]
    assert planned[2:6] == pytest.approx(trained[2:6], rel=0.15)
    assert any("of 60 rows were tokenized" in note for note in notes)
