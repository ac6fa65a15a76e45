"""Contract of bad input: code, severity and place of what is found in some eighty wrong inputs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import yaml
from adapterfaults import (
    add,
    copies,
    drop,
    edit,
    edit_config,
    edit_manifest,
    fill,
    rename,
    retype,
    swap_gate_and_up,
    widen,
)  # fmt: skip
from configurations import GOOD
from evalruns import SMALL
from golden.rows import ASK, ROWS, TELL
from golden.store import contract
from rawadapter import write_base, write_raw
from trainrun import write_lines

from ktbridge.adapter import convert_adapter, validate_adapter
from ktbridge.cli.run import command_options, training_keys
from ktbridge.errors import KtbridgeError, Problem, ProblemsError
from ktbridge.eval import load_bench
from ktbridge.recipe import read_recipe
from ktbridge.sft.config import TrainConfig, parse_config
from ktbridge.sft.data import load_rows

CONFIGS: dict[str, dict[str, Any]] = {
    "unknown key": {"lora_rnk": 8},
    "a word for a number": {"learning_rate": "fast"},
    "unknown stage": {"stage": "ppo"},
    "full fine-tuning": {"finetuning_type": "full"},
    "a word for yes or no": {"bf16": "yes"},
    "without KTransformers": {"use_kt": False},
    "DoRA": {"use_dora": True},
    "number in quotes": {"lora_rank": "8"},
    "rank of none": {"lora_rank": "None"},
    "rank zero": {"lora_rank": 0},
    "negative rate": {"learning_rate": -1},
    "dropout above one": {"lora_dropout": 1.5},
    "missing adapter": {"adapter_name_or_path": "nothing-here"},
    "block as a list": {"kt_config": [{"kt_num_threads": 4}]},
    "unknown key of the block": {"kt_config": {"kt_threads": 4}},
    "key that belongs outside the block": {"kt_config": {"seed": 3}},
    "unknown activation policy": {"activation_policy": {"cpu": "drop"}},
    "activation told twice": {
        "kt_cpu_activation": "retain", "kt_config": {"kt_activation_policy": {"cpu": "recompute"}},
    },
    "several": {"lora_rnk": 8, "stage": "ppo", "kt_config": {"seed": 3}, "bf16": "yes"},
}  # fmt: skip
P = "base_model.model.model."
Q = P + "layers.0.self_attn.q_proj."
DAMAGED: dict[str, tuple[str, Callable[[Path], object]]] = {
    "missing expert": ("expert", lambda at: edit(at, drop("layers.1.mlp.experts.1."))),
    "missing projection": ("expert", lambda at: edit(at, drop("layers.0.mlp.experts.2.up_proj"))),
    "missing layer": ("expert", lambda at: edit(at, drop("layers.1."))),
    "extra layer": ("expert", lambda at: edit(at, copies("layers.1.", "layers.2."))),
    "extra expert": ("expert", lambda at: edit(at, copies("experts.2.", "experts.3."))),
    "A without B": ("expert", lambda at: edit(at, drop("up_proj.lora_B"))),
    "no experts in names": ("expert", lambda at: edit(at, rename(".mlp.experts", ".block"))),
    "rsLoRA": ("expert", lambda at: edit_config(at, use_rslora=True)),
    "wrong rank": ("expert", lambda at: edit_config(at, r=8)),
    "no alpha": ("expert", lambda at: edit_config(at, lora_alpha="absent")),
    "float32": ("expert", lambda at: edit(at, widen("lora_A"))),
    "NaN": ("expert", lambda at: edit(at, fill("layers.1", b"\xc0\xff"))),
    "B of zeros": ("expert", lambda at: edit(at, fill("lora_B", b"\x00"))),
    "language_model": ("expert", lambda at: edit(at, rename("model.layers", "model.language_model.layers"))),
    "gate and up swapped": ("expert", lambda at: edit(at, swap_gate_and_up)),
    "missing module": ("nonexpert", lambda at: edit(at, drop("layers.1.self_attn.o_proj"))),
    "B without A": ("nonexpert", lambda at: edit(at, drop("layers.1.self_attn.o_proj.lora_A"))),
    "q without v": ("nonexpert", lambda at: edit(at, drop("v_proj"))),
    "integers": ("nonexpert", lambda at: edit(at, retype("lora_A", "I16"))),
    "whole weight": ("nonexpert", lambda at: edit(at, add("base_model.model.lm_head.weight"))),
    "DoRA": ("nonexpert", lambda at: edit_config(at, use_dora=True)),
    "another kind of PEFT": ("nonexpert", lambda at: edit_config(at, peft_type="LOHA")),
    "missing last expert": ("expert", lambda at: edit(at, drop("layers.1.mlp.experts.2."))),
    "experts under another name": (
        "expert",
        lambda at: edit(at, rename(".mlp.experts", ".block_sparse_moe.experts")),
    ),
    "A of zeros": ("expert", lambda at: edit(at, fill(".lora_A", b"\x00"))),
    "B of zeros in one projection": (
        "expert", lambda at: edit(at, fill("gate_proj.lora_B", b"\x00")),
    ),
    "B of zeros in one module": ("nonexpert", lambda at: edit(at, fill("o_proj.lora_B", b"\x00"))),
    "LoRA of embeddings": ("nonexpert", lambda at: edit(at, add(P + "embed_tokens.lora_embedding_A"))),
    "a third matrix": ("nonexpert", lambda at: edit(at, add(Q + "lora_C.weight"))),
    "an adapter's name in keys": ("nonexpert", lambda at: edit(at, add(Q + "lora_A.default.weight"))),
    "no up": ("merged", lambda at: edit(at, drop(".up_proj."))),
    "all linear modules": ("nonexpert", lambda at: edit_config(at, target_modules="all-linear")),
    "no target modules": ("nonexpert", lambda at: edit_config(at, target_modules="absent")),
    "a module that isn't named": (
        "nonexpert", lambda at: edit_config(at, target_modules=["q_proj", "k_proj", "v_proj"]),
    ),
    "patterns for nothing": (
        "nonexpert",
        lambda at: edit_config(at, alpha_pattern={"nothing": 3}, rank_pattern={"zzz": 2}),
    ),
    "a pattern for the other half": (
        "expert", lambda at: edit_config(at, alpha_pattern={"q_proj": 32}),
    ),
    "alpha by module": ("merged", lambda at: edit_config(at, alpha_pattern={"q_proj": 1})),
    "another base in the manifest": (
        "merged", lambda at: edit_manifest(at, base={"model_name_or_path": "models/other"}),
    ),
    "weight without its file": ("merged", lambda at: (at / "adapter_model.safetensors").unlink()),
    "cut file": ("merged", lambda at: cut(at / "adapter_model.safetensors")),
    "config that is no JSON": ("merged", lambda at: (at / "adapter_config.json").write_text("{")),
}  # fmt: skip
BAD_ROWS: tuple[object, ...] = (
    {"messages": [ASK]},
    {"messages": []},
    {"messages": [ASK, {**TELL, "content": " "}]},
    {"messages": [{"role": "robot", "content": "a"}, TELL]},
    {"messages": [ASK, {**TELL, "tool_calls": [{"id": 1}]}]},
    {"messages": [ASK, {**TELL, "weight": 0.5}]},
    {"messages": [ASK, {**TELL, "thinking": 3}]},
    {**ROWS["tools"][0], "tools": "f()"},
    {"instruction": "say", "input": 5, "output": "that"},
    {"instruction": "say", "chosen": "a", "rejected": "b"},
    {"text": "x"},
    [1, 2],
)
BENCHES: dict[str, dict[str, Any]] = {
    "no name": {"name": ""},
    "a word for a length": {"max_tokens": "x"},
    "a margin of all": {"margin": 1},
    "sampling as a list": {"sampling": []},
    "slices as a number": {"slices": 3},
    "unknown key": {"colour": "red"},
    "notes that are no texts": {"notes": [3]},
    "private as a number": {"private": 1},
    "a checklist as a number": {"checklists": {"ERM": 3}},
    "override as a number": {"override": 5},
    "override of no length": {"override": {"max_tokens": 0}},
    "partner without a model": {"partner": {"system": "x"}},
}
CHECK = {"scorer": "max_len", "unit": "chars", "n": 3}
ITEMS: tuple[dict[str, Any] | str, ...] = (  # changes of a good item, or a line
    {"id": "pes-01"},
    {"checks": [{"scorer": "vibes"}]},
    {"messages": None},
    {"checks": [{**CHECK, "unit": "pages"}]},
    {"checks": [{"scorer": "max_len", "unit": "chars"}]},
    {"checks": [{"scorer": "numeric"}], "gold": "eight"},
    {"slice": "NOPE"},
    {"colour": 1},
    {"checks": [{"scorer": "regex", "pattern": "("}]},
    {"judge": "NOLIST"},
    {"judge": ["@NOLIST", ""]},
    {"gold": float("nan")},
    {"gold": "\ud83d"},
    "{not json",
    "[]",
)
SAME_FAULT = [{"messages": [{"role": "user", "content": f"{n}?"}], "gold": "x"} for n in range(14)]
DATA_FILES: dict[str, tuple[str, list[Any]]] = {
    "a scorer that isn't": ("generic", [{"prompt": "a", "checks": [{"scorer": "vibes"}]}]),
    "a slice that isn't": ("generic", [{"prompt": "a", "answer": "b", "slice": "NOPE"}]),
    "a message without content": (
        "generic",
        [{"messages": [{"role": "user"}], "references": ["a"]}],
    ),
    "messages as texts": ("generic", [{"messages": ["hi"], "references": ["a"]}]),
    "a reference as a number": ("generic", [{"prompt": "a", "references": [1]}]),
    "an id twice": ("generic", [{"prompt": p, "answer": "b", "id": "x"} for p in "ac"]),
    "nothing to compare with": ("generic", [{"prompt": "a"}]),
    "no rows": ("generic", []),
    "lists": ("generic", [["a"]] * 2),
    "half a character": ("generic", [{"prompt": "\ud83d", "answer": "b"}]),
    "no AfriMed-QA": ("afrimed-qa", [{"question": "a"}]),
    "no LLEMR": ("llemr", [{"question": "a", "answer": "b"}]),
    "no Beyond Dialogue": ("beyond-dialogue", [{"text": "a"}]),
}

RECIPE = """\
trian: x
train: {config: nope.yaml, lora_rnk: 3, seed: }
convert: {merged-output-dri: x, overwrite: maybe}
serve: {port: [1, 2], json: true}
verify: [a]
eval: {limit: 3}
name: base
sweep: {lora_rank: 8, output_dir: [a, b], learnig_rate: [1, 2], seed: [1, 1]}
"""


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def lines(problems: Iterable[Problem]) -> list[str]:
    """Code, severity and place of each, sorted."""
    return sorted(f"{one.code} {one.severity}: {one.where}" for one in problems)


def refused(call: Callable[[], object]) -> list[str]:
    """What ``call`` is refused with; a contract that nothing is refused holds an empty list."""
    try:
        call()
    except ProblemsError as error:
        return lines(error.problems)
    except KtbridgeError as error:
        return [f"{type(error).__name__}: {error}"]
    return []


@contract
def mistakes(directory: Path) -> dict[str, Any]:
    """Wrong inputs of all kinds. Sentences are free; codes and places aren't."""
    (directory / GOOD["dataset"]).write_text('{"messages": []}\n')
    return {
        "configurations": {
            name: refused(lambda wrong=wrong: parse_config({**GOOD, **wrong}, root=directory))
            for name, wrong in CONFIGS.items()
        },
        "adapters": dict(damaged(directory)),
        "rows": wrong_rows(directory),
        "benches": dict(wrong_benches(directory)),
        "recipe": wrong_recipe(directory),
    }


def damaged(directory: Path) -> Iterable[tuple[str, dict[str, list[str]]]]:
    """What validation finds, without and with the base model."""
    base = write_base(directory / "base")
    raw = write_raw(directory / "raw", layers=(0, 1), base_model="models/base")
    halves = {
        "expert_output_dir": "expert",
        "nonexpert_output_dir": "nonexpert",
        "merged_output_dir": "merged",
    }
    convert_adapter(raw, **{key: directory / "whole" / name for key, name in halves.items()})
    for name, (part, damage) in DAMAGED.items():
        at = directory / part
        shutil.copytree(directory / "whole" / part, at)
        damage(at)
        dirs = [raw, at] if name == "gate and up swapped" else [at]
        yield (
            name,
            {
                "alone": lines(validate_adapter(dirs).problems),
                "with its base": lines(validate_adapter(dirs, base_model=base).problems),
            },
        )
        shutil.rmtree(at)


def wrong_rows(directory: Path) -> list[str]:
    """Places and reasons of rows that are refused beside a good one, and the codes with strict_data."""
    path = write_lines(directory / "rows.jsonl", [*BAD_ROWS, {"messages": [ASK, TELL]}])
    with path.open("ab") as file:
        file.write(b'{"messages": [\n')
    config = TrainConfig("base", (str(path),), "out")
    rows = load_rows(config)
    strict = TrainConfig("base", (str(path),), "out", strict_data=True)
    return [f"{one.where}: {one.why}" for one in rows.refused] + refused(lambda: load_rows(strict))


def wrong_benches(directory: Path) -> Iterable[tuple[str, list[str]]]:
    place = directory / "bench"
    shutil.copytree(SMALL, place)
    head = yaml.safe_load((place / "bench.yaml").read_text("utf-8"))

    def write(head: Any, items: list[str] | None = None) -> list[str]:
        (place / "bench.yaml").write_text(yaml.safe_dump(head), "utf-8")
        if items is not None:
            (place / "items.jsonl").write_text("\n".join(items), "utf-8")
        return refused(lambda: load_bench(place))

    for name, wrong in BENCHES.items():
        yield name, write({**head, **wrong})
    first = (place / "items.jsonl").read_text("utf-8").splitlines()[0]
    good = json.loads(first)
    lines = [
        line if isinstance(line, str) else json.dumps({**good, "id": f"i{n}", **line})
        for n, line in enumerate(ITEMS)
    ]
    yield "items, and all lines at once", write(head, [first, *lines])
    yield "items that are none", write(head, ['{"messages": 3}', "{"])
    rows = [*SAME_FAULT, {"slice": "A", "messages": SAME_FAULT[0]["messages"]}]
    mine = {"name": "mine", "slices": ["A", "B"], "colour": "red", "size": 1}
    yield "one fault on many lines", write(mine, [json.dumps(row) for row in rows])
    slices = {"A": {"primary": "vibes"}, "B": {"label": 3}, "C": 5, "D": "what it asks"}
    yield "slices of several kinds", write({"name": "mine", "slices": slices})
    yield "neither name nor slices", write({"sampling": {"max_tokens": 5}})
    for name, (bench, rows) in DATA_FILES.items():
        path = write_lines(directory / "data.jsonl", rows)
        yield f"data: {name}", refused(lambda bench=bench, path=path: load_bench(bench, path))


def wrong_recipe(directory: Path) -> list[str]:
    (directory / "recipe.yaml").write_text(RECIPE)
    return refused(lambda: read_recipe(directory, command_options(), training_keys()))
