"""Training configurations: LLaMA-Factory's field names, read strictly, all problems at once."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ktbridge.errors import KtbridgeError, ProblemsError, UsageError
from ktbridge.sft.config import load_config, parse_config
from ktbridge.sft.data import load_conversations

GOOD = {"model_name_or_path": "base", "dataset": "rows.jsonl", "output_dir": "out"}


def test_every_mistake_is_named_at_once():
    values = {
        "model_name_or_path": "base",
        "lora_rnk": 8,
        "learning_rate": "fast",
        "stage": "ppo",
        "bf16": "yes",
        "use_kt": False,
        "kt_config": {"kt_threads": 4},
    }
    with pytest.raises(ProblemsError) as caught:
        parse_config(values)
    found = {problem.where.rpartition(" ")[2]: problem for problem in caught.value.problems}
    assert set(found) == {
        "lora_rnk", "learning_rate", "stage", "bf16", "use_kt", "kt_threads", "dataset", "output_dir"
    }  # fmt: skip
    assert "Did you mean lora_rank?" in found["lora_rnk"].next_step
    assert "kt_num_threads" in found["kt_threads"].next_step
    assert found["stage"].expected == "sft"


def test_defaults_follow_one_another():
    config = parse_config({**GOOD, "lora_rank": 4})
    assert (config.alpha, config.expert_rank, config.expert_alpha) == (8.0, 4, 8.0)
    config = parse_config({**GOOD, "kt_config": {"kt_lora_rank": 2, "kt_lora_alpha": 32}})
    assert (config.expert_rank, config.expert_alpha, config.lora_rank) == (2, 32.0, 8)


def test_the_experts_rank_and_activation_policy_are_checked():
    config = parse_config({**GOOD, "lora_rank": 256, "kt_config": {"kt_lora_rank": 128}})
    assert (config.expert_rank, config.kt_config.expert_activation) == (128, "retain")
    config = parse_config({**GOOD, "kt_config": {"expert_activation": "recompute"}})
    assert config.kt_config.expert_activation == "recompute"
    for values, words in (
        ({"lora_rank": 129}, "129, which is the experts' rank too"),
        ({"lora_rank": 129, "kt_config": {"kt_lora_rank": None}}, "at most 128 for the experts"),
        ({"kt_config": {"kt_lora_rank": 129}}, "a whole number from 1 to 128"),
        ({"kt_config": {"expert_activation": "offload"}}, "retain or recompute"),
    ):
        with pytest.raises(ProblemsError) as caught:
            parse_config({**GOOD, **values})
        assert len(caught.value.problems) == 1
        assert words in str(caught.value.problems[0])


def test_overrides_and_paths_relative_to_the_file(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"messages": []}\n')
    (tmp_path / "run.yaml").write_text("\n".join(f"{k}: {v}" for k, v in GOOD.items()))
    config = load_config(
        tmp_path / "run.yaml",
        ["learning_rate=1e-3", "kt_config.kt_num_threads=3", "lora_target=q_proj,o_proj"],
    )
    assert config.learning_rate == 1e-3
    assert config.kt_config.kt_num_threads == 3
    assert config.lora_target == ("q_proj", "o_proj")
    assert config.output_dir == str(tmp_path / "out")
    assert config.dataset == (str(tmp_path / "rows.jsonl"),)
    home = load_config(tmp_path / "run.yaml", ["output_dir=~/somewhere"])
    assert home.output_dir == str(Path("~/somewhere").expanduser())
    with pytest.raises(UsageError, match="is not an override"):
        load_config(tmp_path / "run.yaml", ["learning_rate"])
    with pytest.raises(UsageError, match="not valid YAML"):
        load_config(tmp_path / "run.yaml", ["lora_rank=["])
    with pytest.raises(KtbridgeError, match="no dataset file"):
        load_config(tmp_path / "run.yaml", ["dataset=other.jsonl"])


@given(
    st.dictionaries(
        st.text(max_size=12), st.none() | st.booleans() | st.integers() | st.text(max_size=5)
    )
)
def test_no_values_whatever_end_in_anything_but_a_config_or_problems(values):
    try:
        config = parse_config({**GOOD, **values})
    except ProblemsError as error:
        outcome = error.problems
    else:
        outcome = config.output_dir
    assert outcome


def test_rows_that_cant_be_used_are_named_and_none_is_dropped(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n'
        '{"instruction": "say", "input": "this", "output": "that"}\n'
        '{"messages": [{"role": "user", "content": "a"}]}\n'
        '{"text": "x"}\n'
        '{"messages": [{"role": "robot", "content": "a"}, {"role": "assistant", "content": "b"}]}\n'
        '{"instruction": "say", "input": 5, "output": "that"}\n'
        '{"instruction": "say", "output": "that", "images": ["a.png"]}\n'
        '{"instruction": "say", "output": "\\ud800"}\n'
    )
    with pytest.raises(ProblemsError, match="6 of 8 rows") as caught:
        load_conversations([rows])
    assert [problem.where for problem in caught.value.problems] == [
        f"{rows}: line {number}" for number in (3, 4, 5, 6, 7, 8)
    ]
    rows.write_text("\n".join(rows.read_text().splitlines()[:2]))
    assert load_conversations([rows])[1] == [
        {"role": "user", "content": "say\nthis"},
        {"role": "assistant", "content": "that"},
    ]
    rows.write_text(
        '{"instruction": "a\u2028b", "output": "c", "system": "s", "history": [["q", "r"]]}\n'
    )
    assert [(m["role"], m["content"]) for m in load_conversations([rows])[0]] == [
        ("system", "s"), ("user", "q"), ("assistant", "r"), ("user", "a\u2028b"), ("assistant", "c")
    ]  # fmt: skip
    rows.write_text('{"messages": \n')
    with pytest.raises(KtbridgeError, match="line 1 is not valid JSON"):
        load_conversations([rows])
    rows.write_text("\n")
    with pytest.raises(KtbridgeError, match="holds no row"):
        load_conversations([rows])
