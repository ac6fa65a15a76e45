"""What check_plan reads and concludes, without training: its cases, its comparison, its table, its runs."""

from __future__ import annotations

import json
from io import StringIO

import pytest
from click.testing import CliRunner
from planshapes import plan_run
from rich.console import Console

from ktbridge.errors import UsageError
from ktbridge.sft.config import load_config
from ktbridge.sft.plan.inputs import this_machine

TINY = (
    "num_hidden_layers=2 hidden_size=64 num_attention_heads=4 num_key_value_heads=2 head_dim=16 "
    "num_experts=8 num_experts_per_tok=2 moe_intermediate_size=32 vocab_size=200"
)


@pytest.fixture
def plan() -> dict:
    """What compare reads of `ktbridge plan --json`."""
    return {
        "device": "GPU",
        "bytes": {"ram_anonymous": 2_200, "page_cache": 3_000, "gpu": 5_000},
        "parts": [
            {"what": "weights", "where": "GPU", "size": 1_500},
            {"what": "logits", "where": "GPU", "size": 500},
            {"what": "CUDA context", "where": "GPU", "size": 2_400},
            {"what": "allocator", "where": "GPU", "size": 600},
            {"what": "optimizer", "where": "RAM", "size": 2_200},
        ],
        "pace": {"tokens_per_second": 110.0},
    }


def test_a_case_is_read():
    from check_plan import CASES, parse_case

    assert len({parse_case(text).text for text in CASES}) == 3
    case = parse_case(
        "qwen3_moe num_hidden_layers=12 tie_word_embeddings=true / bf16=false cutoff_len=4096"
    )
    assert case.shape == "qwen3_moe"
    assert case.changes == {"num_hidden_layers": 12, "tie_word_embeddings": True}
    assert case.options == {"bf16": False, "cutoff_len": 4096}
    assert parse_case("deepseek-v2-lite").options == {}


@pytest.mark.parametrize(
    "text", ["", "llama x=1", "/ bf16=true", "qwen3_moe layers", "qwen3_moe / =3"]
)
def test_a_bad_case_is_refused(text):
    from check_plan import main, parse_case

    with pytest.raises(UsageError):
        parse_case(text)
    assert CliRunner().invoke(main, ["--case", text]).exit_code == 2


def test_predictions_stand_beside_what_was_measured(plan):
    from check_plan import Measured, compare, parse_case, table, within

    measured = Measured(
        2_000,
        3_000,
        5_100,
        4_000,
        {"peak_gpu_bytes": 2_500},
        paces=[10.0, 20.0, 90.0, 100.0, 110.0],
    )
    record = compare(parse_case("qwen3_moe"), plan, measured)
    assert record["error"] == pytest.approx(
        {"RAM": 0.1, "page cache": 0.0, "GPU": 0.25, "GPU, tensors": -0.2}
    )
    assert within([record], 0.25)
    assert not within([record], 0.24)
    console = Console(file=StringIO(), width=80)
    console.print(table([record]))
    text = console.file.getvalue()
    for word in ("predicted", "measured", "error", "GPU, tensors", "+25.0%", "-20.0%", "+10%"):
        assert word in text

    unseen = compare(parse_case("qwen3_moe"), plan, Measured(2_000, 0, 5_100, None, {}))
    assert unseen["error"] == {"RAM": pytest.approx(0.1), "page cache": None}
    assert not within([unseen], 9.0)
    json.dumps([record, unseen], allow_nan=False)


def test_a_case_becomes_a_run_that_can_be_planned(tmp_path):
    from check_plan import parse_case, prepare

    options = (
        "cutoff_len=40 per_device_train_batch_size=2 gradient_accumulation_steps=3 lora_rank=4"
    )
    run = prepare(parse_case(f"qwen3_moe {TINY} / {options} use_cpu=true"), tmp_path, steps=2)
    made = plan_run(load_config(run), this_machine(tmp_path), measure=False)
    assert (made.rows, made.longest, made.mean_tokens, made.steps) == (12, 40, 40, 2)
    assert made.total("RAM") > 0
