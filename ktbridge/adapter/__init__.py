"""An adapter on disk: read it, check it, convert it, merge it. Needs only numpy, never torch.

KT has four layouts of an adapter: *raw* (what training writes), *expert* and *nonexpert* (the
split serving layout), *merged* (one serving directory with both). ``convert_adapter`` also reads and
writes the formats of PEFT, vLLM, SGLang and llama.cpp (``ktbridge.adapter.formats``), and
``open_adapter`` opens an adapter of any of them as if it were in one of KT's layouts::

    from ktbridge.adapter import convert_adapter, read_adapter, validate_adapter

    adapter = read_adapter("runs/neko/adapter")
    print(adapter.layout, adapter.rank, adapter.alpha, adapter.expert_layers())
    convert_adapter("runs/neko/adapter", expert_output_dir="expert", nonexpert_output_dir="rest")
    assert validate_adapter(["runs/neko/adapter", "expert", "rest"]).ok
"""

from ktbridge.adapter.adapter import Adapter
from ktbridge.adapter.checks import RULES, Rule
from ktbridge.adapter.convert import ConvertPlan, ConvertReport, convert_adapter, execute_plan, plan_convert
from ktbridge.adapter.merge import MergeReport, merge_adapter
from ktbridge.adapter.opening import open_adapter
from ktbridge.adapter.raw import write_raw_adapter
from ktbridge.adapter.scan import read_adapter
from ktbridge.adapter.validate import ValidationReport, validate_adapter
from ktbridge.model import Tensor

__all__ = [
    "RULES",
    "Adapter",
    "ConvertPlan",
    "ConvertReport",
    "MergeReport",
    "Rule",
    "Tensor",
    "ValidationReport",
    "convert_adapter",
    "execute_plan",
    "merge_adapter",
    "open_adapter",
    "plan_convert",
    "read_adapter",
    "validate_adapter",
    "write_raw_adapter",
]
