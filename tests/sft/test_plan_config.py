"""`ktbridge plan` of a model of which only config.json is here: the same numbers as with its weights."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from expertmoe import quantize, stored_as
from moefamilies import parametrize_families, reference
from planshapes import plan_run
from safetensors.torch import load_file, save_file
from tinymoe import tiny_model, tiny_tokenizer
from trainrun import conversation, write_run

from ktbridge.cli import main
from ktbridge.errors import KtbridgeError
from ktbridge.model import open_checkpoint
from ktbridge.sft.config import load_config
from ktbridge.sft.plan.inputs import TargetMachine
from ktbridge.sft.plan.memory import CHECKPOINT

GB = 10**9
ROOMY = TargetMachine(gpu_memory=24 * GB, memory=64 * GB, disk=100 * GB, cores=2)


@pytest.fixture
def run(tmp_path):
    block = {"kt_num_threads": 2, "kt_experts": "cpu"}
    run_dir = write_run(tmp_path, "base", [conversation("a", "b")] * 4, output_dir="out", kt_config=block)
    return run_dir / "run.yaml"


def planned(run, base, target=ROOMY):
    return plan_run(load_config(run, [f"model_name_or_path={base}"]), target, measure=False)


def config_alone(base, directory, *files):
    directory.mkdir()
    for name in ("config.json", *files):
        shutil.copy(base / name, directory)
    return directory


def tensor_bytes(base):
    checkpoint = open_checkpoint(base)
    return sum(checkpoint.entry(name).nbytes for name in checkpoint)


def same_plan(run, whole, alone):
    """Every part of memory and disk, byte by byte; what is to be downloaded comes on top."""
    expected, found = planned(run, whole), planned(run, alone)
    assert not expected.from_config
    assert found.from_config
    download = [part for part in found.parts if part.what == CHECKPOINT]
    assert [part.size for part in download] == [found.to_download]
    assert [part for part in found.parts if part not in download] == list(expected.parts)
    return found


@pytest.mark.filterwarnings("ignore")  # transformers' advice
@pytest.mark.parametrize(
    "family", [each for each in parametrize_families() if each.values != ("qwen3_vl_moe",)]
)
def test_every_familys_sizes_follow_from_its_configuration(family, run, tmp_path):
    reference(family, tmp_path / "whole")
    found = same_plan(run, tmp_path / "whole", config_alone(tmp_path / "whole", tmp_path / "alone"))
    assert found.to_download == tensor_bytes(tmp_path / "whole")


@pytest.mark.filterwarnings("ignore")
def test_a_family_whose_published_experts_are_transposed(run, tmp_path):
    """Qwen3-VL: transformers saves them as the kernels read them, the published files are otherwise."""
    reference("qwen3_vl_moe", tmp_path / "whole")
    whole = planned(run, tmp_path / "whole")
    alone = planned(run, config_alone(tmp_path / "whole", tmp_path / "alone"))
    assert alone.to_download == tensor_bytes(tmp_path / "whole")
    mapped, loaded = (
        [part.size for part in plan.parts if part.what == f"experts, {how}"]
        for plan, how in ((whole, "mapped"), (alone, "loaded"))
    )
    assert mapped == loaded != []


STORED = {
    "fp8": {"quant_method": "fp8", "weight_block_size": [128, 128],
            "modules_to_not_convert": ["lm_head", "mlp.gate"]},
    "int8-bf16": {"quant_method": "compressed-tensors", "format": "int-quantized",
             "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 8}}},
             "ignore": ["re:.*self_attn.*", "lm_head"]},
    "int4-32": {"quant_method": "compressed-tensors", "format": "pack-quantized",
             "config_groups": {"group_0": {"targets": ["re:.*mlp.experts.*"],
                                           "weights": {"num_bits": 4, "group_size": 32}}}},
}  # fmt: skip


@pytest.mark.parametrize("storage", STORED)
def test_quantized_checkpoints_are_known_by_their_configuration(storage, run, tmp_path):
    """FP8 of all linear weights, as DeepSeek-V3; INT8 and INT4 of the experts alone, as Kimi-K2."""
    whole = tmp_path / "whole"
    tiny_model(hidden_size=160, moe_intermediate_size=136).save_pretrained(whole)
    tensors = load_file(whole / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        if storage == "fp8" or ".experts." in name:
            (stored, scale), _ = quantize(storage, tensors.pop(name).float()[None])
            tensors |= stored_as(storage, name, stored[0], scale[0])
    save_file(tensors, whole / "model.safetensors", {"format": "pt"})
    config = json.loads((whole / "config.json").read_text())
    (whole / "config.json").write_text(json.dumps(config | {"quantization_config": STORED[storage]}))
    found = same_plan(run, whole, config_alone(whole, tmp_path / "alone"))
    assert found.to_download == tensor_bytes(whole)
    (experts,) = (part for part in found.parts if part.what == "experts, mapped")
    assert storage.partition("-")[0] in experts.how


@pytest.fixture
def whole(tmp_path):
    base = tmp_path / "whole"
    tiny_model().save_pretrained(base, max_shard_size="100KB")
    tiny_tokenizer().save_pretrained(base)
    return base


def command(*words):
    return CliRunner().invoke(main, ["plan", "--no-measure", *map(str, words)])


def test_the_plan_says_that_it_was_made_from_config_json(run, whole, tmp_path):
    alone = config_alone(whole, tmp_path / "base", "tokenizer.json")
    done = command(run)
    assert done.exit_code == 0, done.output
    note, counted = (line for line in done.stdout.splitlines() if line.startswith("note"))
    assert "has no chat template: the rows' text is counted alone, by its tokenizer.json" in counted
    for words in ("config.json alone", str(alone), "kB to be downloaded"):
        assert words in note
    plan = json.loads(command(run, "--json").stdout)
    assert (plan["from_config_alone"], plan["bytes_to_download"]) == (True, tensor_bytes(whole))
    assert plan["bytes"]["page_cache"] > 0
    # Without a tokenizer the rows' lengths are an assumption, and said to be.
    (alone / "tokenizer.json").unlink()
    assert "3 bytes" in command(run).stdout
    # A dataset that isn't there stays an error.
    lost = command(run, "dataset=nowhere.jsonl")
    assert (lost.exit_code, "nowhere.jsonl" in lost.stderr) == (1, True)


def test_a_download_under_way_is_planned_and_damage_is_not(run, whole, tmp_path):
    complete = planned(run, whole)
    shards = sorted(whole.glob("*.safetensors"))
    shards[0].unlink()
    found = planned(run, whole)
    assert found.from_config
    assert f"1 of {len(shards)} shards" in found.notes[0]
    assert found.total("page cache") == complete.total("page cache")
    shards[1].write_bytes(shards[1].read_bytes()[:-1])
    shutil.copy(shards[2], shards[0])
    with pytest.raises(KtbridgeError, match="model-0000"):
        planned(run, whole)


def test_a_model_in_the_hub_cache_needs_no_weights_either(run, whole, tmp_path, monkeypatch):
    repository = tmp_path / "hub/models--org--tiny"
    for name in ("refs", "snapshots"):
        (repository / name).mkdir(parents=True)
    (repository / "refs/main").write_text("abc")
    config_alone(whole, repository / "snapshots/abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    assert planned(run, "org/tiny").from_config
    # A name that isn't there: where was looked.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    lost = "Qwen/Qwen3-30B-A3B-Instruct-2507"
    done = command(run, f"model_name_or_path={lost}")
    assert done.exit_code == 1
    for words in (str(Path(lost).absolute()), str(tmp_path / "hub"), "HF_HUB_OFFLINE"):
        assert words in done.stderr


def test_the_model_needs_room_on_the_disk_it_goes_to(run, whole, tmp_path):
    alone = config_alone(whole, tmp_path / "base")
    need = tensor_bytes(whole)
    roomy = planned(run, alone)
    (disk,) = (verdict for verdict in roomy.verdicts if "disk" in verdict.what)
    assert disk.need == roomy.total("disk") > need
    small = planned(run, alone, replace(ROOMY, disk=need))
    assert not small.fits


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"quant_method": "awq", "bits": 4}, "awq"),
        ({"quant_method": "fp8"}, "fp8"),
        ({"quant_method": "fp8", "weight_block_size": [0, "x"]}, "fp8"),
        ({"quant_method": "compressed-tensors", "config_groups": {}}, "don't follow"),
        (STORED["int8-bf16"] | {"ignore": ["re:("]}, "pattern"),
        (None, "new_moe"),
    ],
)
def test_what_a_configuration_does_not_tell_is_refused(changes, words, run, whole, tmp_path):
    alone = config_alone(whole, tmp_path / "base")
    config = json.loads((alone / "config.json").read_text())
    config |= {"quantization_config": changes} if changes else {"model_type": "new_moe"}
    (alone / "config.json").write_text(json.dumps(config))
    with pytest.raises(KtbridgeError, match=words) as caught:
        planned(run, alone)
    assert caught.value.next_step
