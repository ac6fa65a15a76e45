"""What an adapter is on disk: read it, check it, convert it. Needs only numpy, never torch.

One adapter takes four forms: *raw* (what training writes), *expert* and *nonexpert* (the split
serving layout), *merged* (one serving directory with both)::

    from ktbridge.adapter import convert_adapter, read_adapter, validate_adapter

    adapter = read_adapter("runs/neko/adapter")
    print(adapter.layout, adapter.rank, adapter.alpha, adapter.expert_layers())
    convert_adapter("runs/neko/adapter", expert_output_dir="expert", nonexpert_output_dir="rest")
    assert validate_adapter(["runs/neko/adapter", "expert", "rest"]).ok
"""

from ktbridge.adapter.adapter import Adapter
from ktbridge.adapter.convert import ConvertPlan, plan_convert
from ktbridge.adapter.execute import ConvertReport, convert_adapter, execute_plan
from ktbridge.adapter.raw import write_raw_adapter
from ktbridge.adapter.rules import RULES, Rule
from ktbridge.adapter.scan import read_adapter
from ktbridge.adapter.validate import ValidationReport, validate_adapter
from ktbridge.model import Tensor

__all__ = [
    "RULES",
    "Adapter",
    "ConvertPlan",
    "ConvertReport",
    "Rule",
    "Tensor",
    "ValidationReport",
    "convert_adapter",
    "execute_plan",
    "plan_convert",
    "read_adapter",
    "validate_adapter",
    "write_raw_adapter",
]
