"""``verify --merged`` of checkpoints that other tools' own code merged, each in a process of its own.

`make test-peft` installs them below build/peft and runs this; without them it skips. What a tool gets wrong
here is what its release gets wrong: nothing is planted but where a test says so.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from releases import run_with

from ktbridge.adapter import open_adapter
from ktbridge.verify.merge_check import check_merge
from ktbridge.verify.merge_verdict import MergeVerdict, judge_merge

pytest.importorskip("torch")
pytest.importorskip("peft")
pytestmark = pytest.mark.timeout(900)  # a process a test, each importing torch

# base, adapter: written by the installed transformers and PEFT, or by the release that is named.
MAKE = """
import json, os, sys
from pathlib import Path
out, family = Path(sys.argv[1]), sys.argv[2]
import torch, peft, transformers
from realmerges import load, tune, write_base
sizes = json.loads(sys.argv[3])
settings = json.loads(sys.argv[4])
tuned = tune(write_base(family, out / "base", **sizes), out / "adapter", **settings)
"""
PEFT = MAKE + 'tuned.merge_and_unload().save_pretrained(out / "merged")\n'
# The whole of save_pretrained_merged's work; only what finds a GPU is left out.
UNSLOTH = """
os.environ["UNSLOTH_ZOO_DISABLE_GPU_INIT"] = os.environ["UNSLOTH_IS_PRESENT"] = "1"
from unsloth_zoo import saving_utils
saving_utils.merge_and_overwrite_lora(
    lambda name, **_: name, tuned, None, save_directory=str(out / "merged"), output_dtype=torch.bfloat16)
"""
# That release asks for "cuda" by name and looks for it when it is imported: there it is told of one.
OLD_UNSLOTH = """
os.environ["UNSLOTH_IS_PRESENT"] = "1"
import importlib.abc, importlib.util, types
import bitsandbytes
from importlib.machinery import ModuleSpec, SourceFileLoader
class Loader(SourceFileLoader):
    def get_code(self, name):
        text = self.get_data(self.path)
        assert text.count(b'"cuda"') >= 5
        return compile(text.replace(b'"cuda"', b'"cpu"'), self.path, "exec")
class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "unsloth":  # only looked for
            return ModuleSpec(name, None)
        if name != "unsloth_zoo.saving_utils":
            return None
        file = f"{path[0]}/saving_utils.py"
        return importlib.util.spec_from_file_location(name, file, loader=Loader(name, file))
sys.meta_path.insert(0, Finder())
there = {"is_available": lambda: True, "device_count": lambda: 1, "get_device_name": lambda *_: "none",
         "get_device_capability": lambda *_: (8, 0), "mem_get_info": lambda *_: (1 << 34, 1 << 34)}
before = {name: getattr(torch.cuda, name) for name in there}
for name, answer in there.items():
    setattr(torch.cuda, name, answer)
torch.cuda.memory.mem_get_info = there["mem_get_info"]
from unsloth_zoo import saving_utils
for name in there.keys() - {"get_device_name"}:
    setattr(torch.cuda, name, before[name])
saving_utils.merge_and_overwrite_lora(
    lambda name, **_: name, tuned, None, save_directory=str(out / "merged"), output_dtype=torch.bfloat16)
"""
MERGEKIT = """
from mergekit.common import ModelReference
found = ModelReference.parse(f"{out / 'base'}+{out / 'adapter'}").merged(str(out / "cache"))
os.rename(found.model.path, out / "merged")
"""
AXOLOTL = """
from axolotl.cli.utils.lora_merge import merge_lora_sharded_efficient
merge_lora_sharded_efficient(out / "base", out / "adapter", out / "merged")
"""
NF4 = """
import bitsandbytes
from transformers import BitsAndBytesConfig
quantized = load(out / "base", device_map="cpu", quantization_config=BitsAndBytesConfig(
    load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16))
merged = peft.PeftModel.from_pretrained(quantized, out / "adapter").merge_and_unload()
merged.dequantize().save_pretrained(out / "merged")
"""


def merged_by(
    code: str,
    out: Path,
    family: str = "qwen3_moe",
    *places: str,
    sizes: str = "{}",
    settings: str = "{}",
    from_format: str = "auto",
    **environment: str,
) -> MergeVerdict:
    """Run ``code`` with packages of ``places`` before the installed ones, and judge what it wrote."""
    words = (out, family, sizes, settings)
    done = run_with(code, *words, places=places, cwd=out, **environment)  # Unsloth writes a cache there
    assert done.returncode == 0, done.stderr[-3000:]
    adapter = open_adapter(out / "adapter", from_format, out / "base")
    return judge_merge(check_merge(out / "base", out / "merged", adapter))


def assert_applied(verdict: MergeVerdict) -> None:
    assert (verdict.ok, verdict.verdict) == (True, "applied"), verdict.sentence


FAMILIES = ("qwen3_moe", "gpt_oss", "deepseek_v3", "mixtral", "glm4_moe")
ZOO, OLD_ZOO, KIT, AXO = "unsloth_zoo-2026.10.9", "unsloth_zoo", "mergekit-0.1.5", "axolotl-0.19.0"
BITS = "bitsandbytes-0.50.2"
IN_BLOCKS = "stored expert by expert, read rank by rank"


@pytest.mark.parametrize("family", FAMILIES)
def test_unsloths_merge_is_applied(tmp_path, family):
    assert_applied(merged_by(MAKE + UNSLOTH, tmp_path, family, ZOO))


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_unsloths_merge_in_its_former_order_is_named(tmp_path, family):
    """unsloth 6930: the merge unpacks B expert by expert, and PEFT stored it rank by rank."""
    setting = {"UNSLOTH_MOE_LORA_B_LAYOUT": "grouped_by_expert"}
    verdict = merged_by(MAKE + UNSLOTH, tmp_path, family, ZOO, **setting)
    assert verdict.verdict == "B packed otherwise"
    assert IN_BLOCKS in verdict.sentence


def test_an_older_unsloth_leaves_the_experts_out(tmp_path):
    """unsloth 5410: 2026.3.1 meets shapes of PEFT 0.19 that it doesn't know, and keeps the base's experts."""
    verdict = merged_by(MAKE + OLD_UNSLOTH, tmp_path, "qwen3_moe", OLD_ZOO, BITS)
    assert verdict.verdict == "in part"
    assert "4 of 28 matrices are applied" in verdict.sentence
    assert "not applied: experts.down, experts.gate, experts.up of" in verdict.sentence


def test_an_older_unsloth_and_gpt_oss(tmp_path):
    verdict = merged_by(MAKE + OLD_UNSLOTH, tmp_path, "gpt_oss", OLD_ZOO, BITS)
    assert verdict.verdict == "several mistakes"
    assert "not applied: experts.down of" in verdict.sentence
    assert "B packed otherwise: experts.gate, experts.up of" in verdict.sentence
    assert IN_BLOCKS in verdict.sentence


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_mergekits_merge_is_applied(tmp_path, family):
    assert_applied(merged_by(MAKE + MERGEKIT, tmp_path, family, KIT))


def test_axolotls_merge_is_applied(tmp_path):
    assert_applied(merged_by(MAKE + AXOLOTL, tmp_path, "gpt_oss", AXO))


def test_axolotl_turns_square_matrices_of_gpt_oss(tmp_path):
    """gpt-oss's down_proj is 2880 x 2880, so that no shape tells which way round it is."""
    sizes = '{"intermediate_size": 32}'
    verdict = merged_by(MAKE + AXOLOTL, tmp_path, "gpt_oss", AXO, sizes=sizes)
    assert verdict.verdict == "transposed"
    assert "8 of 28 matrices with LoRA (experts.down of experts 0-3" in verdict.sentence


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_axolotl_leaves_fused_lora_out_of_experts_stored_one_by_one(tmp_path, family):
    """Without torchao it says so in a line of its log, and writes the checkpoint."""
    verdict = merged_by(MAKE + AXOLOTL, tmp_path, family, AXO)
    assert verdict.verdict == "in part"
    assert "4 of 28 matrices are applied; not applied: experts." in verdict.sentence


@pytest.mark.parametrize(("release", "from_format"), [("0.18.1", "peft-0.18"), ("0.20.0", "peft-fused")])
def test_an_older_pefts_merge_is_applied(tmp_path, release, from_format):
    assert_applied(merged_by(PEFT, tmp_path, "qwen3_moe", release, from_format=from_format))


def test_a_quantized_base_that_was_dequantized_is_told(tmp_path):
    """QLoRA's base, in which PEFT merges, isn't the one that is compared with."""
    sizes = '{"hidden_size": 64}'
    verdict = merged_by(MAKE + NF4, tmp_path, "qwen3_moe", BITS, sizes=sizes)
    assert (verdict.ok, verdict.verdict) == (False, "further changes")
    assert "KTV032" in {item.code for item in verdict.problems}
    assert "quantized to 4 bits" in verdict.sentence
