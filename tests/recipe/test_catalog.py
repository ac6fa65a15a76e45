"""The recipes that ktbridge comes with: copied, prepared, trained a step on invented rows in the public sets'
layouts, and their evaluations planned."""

from __future__ import annotations

import csv
import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner
from tinyserver import save_model
from trainrun import quiet

from ktbridge.cli import main
from ktbridge.cli.run import command_options, training_keys
from ktbridge.eval import load_bench
from ktbridge.recipe import list_recipes, plan_recipe, read_recipe
from ktbridge.sft.config import load_config
from ktbridge.sft.data import load_rows

SAMPLES = Path(__file__).parents[2] / "eval"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("models") / "tiny", seed=0)


def copied(name, tmp_path, monkeypatch):
    """The recipe's directory, which the user works in."""
    done = CliRunner().invoke(main, ["init", name, str(tmp_path / name)])
    assert done.exit_code == 0, done.output
    assert "ktbridge run --dry-run" in done.output
    monkeypatch.chdir(tmp_path / name)
    return tmp_path / name


def prepared(place, *arguments):
    done = subprocess.run(
        [sys.executable, "prepare.py", *map(str, arguments)],
        cwd=place,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def questions(config):
    """What is asked in each training row, and the answer, as messages."""
    loaded = load_rows(config)
    assert loaded.rows
    assert not loaded.refused
    return [row.messages for row in loaded.rows]


def trained(place, base, **settings):
    """One step on the recipe's rows; the messages of these."""
    from ktbridge.sft import train

    small = {
        "model_name_or_path": str(base),
        "max_steps": 1,
        "gradient_accumulation_steps": 2,
        **settings,
    }
    config = load_config(place / "train.yaml", [f"{key}={value}" for key, value in small.items()])
    assert all(note.where.endswith(": lora_dropout") for note in config.notes)
    result = train.train(config)
    assert (result.steps, (place / "adapter/fused_expert_lora.safetensors").is_file()) == (1, True)
    return questions(replace(config, val_size=0))


def planned(place):
    """The bench of the recipe's evaluation, and how many items of each slice `ktbridge eval` would ask."""
    recipe = read_recipe(place, command_options(), training_keys())
    asked = [step for step in plan_recipe(recipe, "local") if step.command == "eval"]
    words = asked[0].resolve("http://127.0.0.1:1/v1")
    at = words.index("--server")
    words[at : at + 2] = ["--arm", "full=m@http://127.0.0.1:1"]
    done = CliRunner().invoke(main, [*words, "--dry-run", "--json"])
    assert done.exit_code == 0, done.output
    plan = json.loads(done.stdout)["benches"][0]
    return plan["bench"], plan["arms"][0]["slices"]


@pytest.mark.slow
@quiet
def test_nekoqa(tmp_path, monkeypatch, base):
    place = copied("nekoqa", tmp_path, monkeypatch)
    rows = [{"instruction": f"第{n}个问题？", "output": "主人，喵！"} for n in range(4)]
    (place / "data/NekoQA-10K.json").write_text(json.dumps(rows, ensure_ascii=False))
    messages = trained(place, base)[0]
    assert [one["content"] for one in messages] == ["第0个问题？", "主人，喵！"]
    bench, slices = planned(place)
    assert (bench, sum(slices.values())) == ("nekobench", 300)


@pytest.mark.slow
@quiet
def test_translational_style_holds_questions_out(tmp_path, monkeypatch, base):
    place = copied("translational-style", tmp_path, monkeypatch)
    rows = json.loads((SAMPLES / "translational-style/sample.json").read_text())
    rows += [{**row, "input": f"{row['input']}{n}"} for row in rows for n in range(4)]
    (tmp_path / "TslDial.json").write_text(json.dumps(rows, ensure_ascii=False))
    prepared(place, tmp_path / "TslDial.json")
    asked = {m[0]["content"].strip() for m in trained(place, base)}
    bench = load_bench("translational-style", place / "data/held_out.json")
    held_out = {item.messages[-1]["content"].strip() for item in bench.items}
    assert asked
    assert held_out
    assert not asked & held_out
    assert len(asked | held_out) == len({row["input"].strip() for row in rows})
    assert planned(place) == ("translational-style", {"STYLE": len(bench.items)})


@pytest.mark.slow
@quiet
def test_afrimed_qa_is_trained_as_the_bench_asks(tmp_path, monkeypatch, base):
    place = copied("afrimed-qa", tmp_path, monkeypatch)
    source = SAMPLES / "afrimed-qa/sample.csv"
    prepared(place, source)
    learned = trained(place, base)
    with open(source, newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:  # the same file with the splits the other way round
        row["split"] = {"train": "test", "test": "train"}[row["split"]]
    with open(tmp_path / "other.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)
    held_out = load_bench("afrimed-qa", place / "data/held_out.csv").items
    prepared(place, tmp_path / "other.csv")
    swapped = load_bench("afrimed-qa", place / "data/held_out.csv").items
    asked = [questions(load_config("train.yaml", [f"model_name_or_path={base}"]))]
    for conversations, items in ((learned, swapped), (asked[0], held_out)):
        gold = {
            item.messages[0]["content"]: item.gold if isinstance(item.gold, str) else item.gold[0]
            for item in items
        }
        assert {m[0]["content"]: m[1]["content"] for m in conversations}.items() <= gold.items()
        assert conversations
    assert planned(place)[0] == "afrimed-qa"


@pytest.mark.slow
@quiet
def test_beyond_dialogue_keeps_its_turns(tmp_path, monkeypatch, base):
    place = copied("beyond-dialogue", tmp_path, monkeypatch)
    rows = [
        {
            "instruction": f"And on day {n}?", "input": "", "output": "The sea decides.",
            "system": f"You are a sailor. Scene {n}.", "history": [["Ahoy!", "Quiet, boy."]],
        }
        for n in range(40)
    ]  # fmt: skip
    (tmp_path / "RPA_EN_SFT.json").write_text(json.dumps(rows))
    prepared(place, tmp_path / "RPA_EN_SFT.json")
    messages = trained(place, base, num_train_epochs=1)[0]
    assert [one["role"] for one in messages] == ["system", *("user", "assistant") * 2]
    held_out = json.loads((place / "data/held_out.json").read_text())
    assert planned(place) == ("beyond-dialogue", {"DIALOGUE": len(held_out)})


@pytest.mark.slow
@quiet
def test_llemr_is_asked_with_its_record(tmp_path, monkeypatch, base):
    place = copied("llemr", tmp_path, monkeypatch)
    events = tmp_path / "event_selected"
    events.mkdir()
    rows = []
    for stay in range(900000, 900040):
        text = "timestamp,event_type,event_value\n0.5,labevents,Potassium: 3.2\n1.25,transfers,to the ward\n"
        (events / f"event_{stay}.csv").write_text(text)
        rows.append(
            {
                "hadm_id": stay,
                "q": f"Where did stay {stay} go?",
                "a": "The ward.",
                "event_type": "transfers",
            }
        )
    qa = tmp_path / "qa_event.jsonl"
    qa.write_text("".join(json.dumps(row) + "\n" for row in rows))
    prepared(place, "--events", events, qa)
    learned = trained(place, base)
    held_out = load_bench("llemr", place / "data/held_out.jsonl").items
    prompts = {m[0]["content"] for m in learned} | {item.messages[0]["content"] for item in held_out}
    record = "0.5 h, labevents: Potassium: 3.2\n1.2 h, transfers: to the ward\n\n"
    assert prompts == {f"{record}{row['q']}" for row in rows}
    assert planned(place) == ("llemr", {"EHR": len(held_out)})


def test_each_recipe_says_what_it_needs_and_whence_its_data_come():
    found = {one.name: one for one in list_recipes()}
    assert set(found) == {"nekoqa", "translational-style", "afrimed-qa", "beyond-dialogue", "llemr"}
    listed = CliRunner().invoke(main, ["init", "--json"])
    assert [one["name"] for one in json.loads(listed.stdout)] == sorted(found)
    for one in found.values():
        assert min(map(len, (one.teaches, one.model, one.hardware, one.before))) > 0
        readme = (one.path / "README.md").read_text()
        for heading in ("## Data and their terms", "## What to expect", "## What was run"):
            assert heading in readme, one.name
        info = json.loads((one.path / "data/dataset_info.json").read_text())
        config = yaml.safe_load((one.path / "train.yaml").read_text())
        assert config["dataset"] in info


def test_init_writes_over_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("nekoqa").mkdir()  # empty: may be used
    assert CliRunner().invoke(main, ["init", "nekoqa"]).exit_code == 0
    config = Path("nekoqa/train.yaml")
    config.write_text("mine")
    again = CliRunner().invoke(main, ["init", "nekoqa"])
    assert (again.exit_code, config.read_text()) == (1, "mine")
    assert "is there already" in again.stderr
    wrong = CliRunner().invoke(main, ["init", "nekoqaa"])
    assert (wrong.exit_code, "Did you mean nekoqa?" in wrong.stderr) == (2, True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["nekoqa"]
    shutil.rmtree("nekoqa")
