"""`ktbridge train` as a user runs it: a real model, real rows, a real adapter."""

import json
import os
import re
from importlib.util import find_spec

import pytest
import torch
import trainrun
from click.testing import CliRunner
from hubserver import running_hub
from tinymoe import tiny_model, tiny_tokenizer
from trainrun import ROWS, conversation, log_of, quiet, run_command, text, write_lines, write_run

from ktbridge.adapter import read_adapter, validate_adapter
from ktbridge.cli import main
from ktbridge.errors import UsageError
from ktbridge.sft.config import load_config

GOOD = [conversation(*turns) for turns in ROWS * 8]
BAD = conversation("say yes")
"""A row without an answer."""


@pytest.fixture
def run_dir(tmp_path, base_dir):
    settings = {"learning_rate": 1e-2, "per_device_train_batch_size": 8, "max_steps": 12}
    return write_run(tmp_path, base_dir, GOOD, **settings)


def command(run_dir, *overrides):
    return ["train", str(run_dir / "run.yaml"), "--json", *overrides]


def train(run_dir, *overrides):
    """The command in this process, which has torch loaded already."""
    return CliRunner().invoke(main, command(run_dir, *overrides))


def test_training_learns_and_leaves_a_valid_raw_adapter(warm, run_dir):
    done = warm.run("-m", "ktbridge", *command(run_dir, "plot_loss=true"), KTBRIDGE_THREADS="2")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["last_loss"] < 0.85 * result["first_loss"]
    adapter = read_adapter(run_dir / "raw")
    assert (adapter.layout, adapter.rank, adapter.alpha) == ("raw", 4, 8.0)
    assert (adapter.manifest["status"], adapter.expert_layers()) == ("ready", (0, 1))
    assert validate_adapter([run_dir / "raw"]).ok
    log = log_of(run_dir / "raw")
    assert [record["step"] for record in log] == list(range(1, 13))
    assert all(record["tokens_per_second"] > 0 for record in log)
    assert all(0 < record["expert_share"] < 1 for record in (*log, result))
    assert result["peak_rss_bytes"] > 100 * 2**20
    assert (result["peak_gpu_bytes"] > 0) == torch.cuda.is_available()
    assert (run_dir / "raw/training_loss.png").read_bytes().startswith(b"\x89PNG")
    counts = [result[key] for key in ("steps", "rows", "used", "cut", "refused")]
    assert counts == [12, 24, 24, 0, 0]
    assert "used 24 of 24 rows" in done.stderr
    assert not (run_dir / "raw/refused_rows.jsonl").exists()
    again = train(run_dir)
    assert (again.exit_code, "raw exists" in again.stderr) == (2, True)


@quiet
def test_rows_cut_and_refused_are_told(run_dir, monkeypatch, capfd):
    from transformers import TrainerCallback

    from ktbridge.sft import train as recipe

    class Talks(TrainerCallback):
        """As wandb's does, and wandb's own process."""

        def on_train_begin(self, *args, **kwargs):
            print("from Python")
            os.write(1, b"from a process\n")

    monkeypatch.setattr(recipe, "reporters", lambda config: [Talks()])
    write_lines(run_dir / "rows.jsonl", [*GOOD, BAD])
    strict = train(run_dir, "--strict-data")
    assert strict.exit_code == 1
    assert "1 of 25 rows can't be used" in strict.stderr

    options = [
        "cutoff_len=13",
        "max_steps=-1",
        "num_train_epochs=1",
        "gradient_accumulation_steps=2",
    ]
    planned = train(run_dir, "--dry-run", *options)
    assert planned.exit_code == 0, planned.stderr
    plan = json.loads(planned.stdout)
    assert not (run_dir / "raw").exists()

    done = train(run_dir, *options)
    assert done.exit_code == 0, done.stderr
    result = json.loads(done.stdout)  # and nothing else
    assert "from Python\n" in done.stderr
    assert capfd.readouterr() == ("", "from a process\n")
    keys = ("rows", "used", "refused", "cut", "steps")
    assert [result[key] for key in keys] == [25, 24, 1, 16, 2]
    told = ("rows", "rows_used", "rows_refused", "rows_cut", "steps")
    assert [plan[key] for key in told] == [25, 24, 1, 16, 2]
    assert "16 cut at 13 tokens" in done.stderr
    refused = (run_dir / "raw/refused_rows.jsonl").read_text().splitlines()
    assert [json.loads(line)["row"] for line in refused] == [BAD]
    again = train(run_dir, *options, "overwrite_output_dir=true", "lora_rank=2")
    assert again.exit_code == 0, again.stderr  # the list is a run's own, and is replaced with it


@quiet
def test_a_dry_run_shows_what_would_be_trained(run_dir, monkeypatch):
    """Of a LLaMA-Factory file, whose keys are noted, and a template that isn't the tokenizer's."""
    monkeypatch.chdir(run_dir)
    write_lines(run_dir / "rows.jsonl", [*GOOD, BAD])
    given = ["template=qwen3", "preprocessing_num_workers=16", "lora_target=q_proj,v_proj"]
    shown = train(run_dir, "--dry-run", *given)
    assert shown.exit_code == 0, shown.stderr
    plan = json.loads(shown.stdout)
    noted = {note["where"].rpartition(": ")[2] for note in plan["notes"]}
    assert noted >= {"template", "preprocessing_num_workers"}
    assert (plan["lora_alpha"], plan["kt_config"]["kt_lora_alpha"]) == (8.0, 8.0)
    assert [refused["where"] for refused in plan["refused"]] == [f"{run_dir}/rows.jsonl: line 25"]
    pieces = plan["first"]["sequence"]
    assert [piece["text"] for piece in pieces if piece["trained"]] == ["i am a cat meow </s>"]
    assert "who are you" in pieces[0]["text"]

    words = [word for word in command(run_dir, "--dry-run", *given) if word != "--json"]
    plain = run_command(*words)
    trained = plan["trainable"]
    for said in (
        "⟦i am a cat meow", "line 25: the last message is not the assistant's",
        "self_attn.q_proj (2), self_attn.v_proj (2)", f"{trained['parameters']:,} LoRA weights",
    ):  # fmt: skip
        assert said in plain.stdout
    result = json.loads(train(run_dir, "max_steps=1", *given).stdout)
    for half in ("expert_parameters", "nonexpert_parameters"):
        assert trained[half] == result[half]


@quiet
def test_rows_left_out_are_a_loud_warning_and_half_of_them_an_error(run_dir, monkeypatch):
    monkeypatch.chdir(run_dir)
    for count, warned, *given in (
        (2, False), (3, True), (24, True), (25, True, "allow_refused_rows=true"),  # beside 24 good ones
    ):  # fmt: skip
        write_lines(run_dir / "rows.jsonl", [*GOOD, *[BAD] * count])
        shown = train(run_dir, "--dry-run", *given)
        assert shown.exit_code == 0, shown.stderr
        assert (" KTD008" in shown.stderr) == warned
    refused = train(run_dir, "--dry-run")
    assert refused.exit_code == 1
    for words in ("25 of 49 rows can't be used", "allow_refused_rows", "KTD001"):
        assert words in refused.stderr


def test_progress_fits_80_columns_with_step_loss_pace_and_eta(monkeypatch):
    import io

    from rich.console import Console

    from ktbridge.cli import _ui

    screen, now = io.StringIO(), [0.0]
    terminal = Console(file=screen, force_terminal=True, width=80, highlight=False, get_time=lambda: now[0])
    monkeypatch.setattr(_ui, "stderr", terminal)
    with _ui.training_bar(0, 65) as bar:
        for step, seconds in enumerate((600, 60, 60, 60, 60), 1):  # the first compiles
            now[0] += seconds
            bar(step, 65)
    assert "eta 1:00:00" in screen.getvalue().replace("\x1b[36m", "").replace("\x1b[0m", "")
    with _ui.training_bar(0, 100_000) as bar:
        bar(99_999, 100_000)
        bar.describe("loss 12.3456  123,456 tok/s")
    drawn = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", screen.getvalue()).replace("\r", "\n")
    assert "None" not in drawn
    line = next(line for line in reversed(drawn.splitlines()) if "eta" in line and "loss" in line)
    assert len(line.rstrip()) <= 80
    assert "step 99999/100000" in line
    assert "loss 12.3456  123,456 tok/s" in line
    assert "…" not in line


@quiet
def test_a_run_that_changes_nothing_says_so(run_dir):
    for warmup, said in (("0.5", "learning rate was 0 in every step"), ("0", "")):
        done = train(run_dir, "max_steps=1", f"warmup_ratio={warmup}", "overwrite_output_dir=true")
        assert done.exit_code == 0, done.stderr
        told = json.loads(done.stdout)["warning"]
        assert said in told
        assert bool(told) == bool(said)


def test_a_failed_run_leaves_nothing_behind(run_dir):
    before = sorted(run_dir.iterdir())
    for overrides, words in (
        (["learning_rate=1e30", "max_grad_norm=0"], "at step 2, and there is no checkpoint"),
        (["lora_target=q_proj,qq_proj"], "qq_proj"),
        (["model_name_or_path=no/such-model"], "no/such-model"),
    ):
        failed = train(run_dir, *overrides)
        assert failed.exit_code in (1, 2)
        assert words in failed.stderr
        assert sorted(run_dir.iterdir()) == before


def test_reporting_needs_its_package_before_anything_is_loaded(run_dir):
    from ktbridge.sft.prepare import prepare

    absent = [n for n in ("tensorboard", "wandb", "mlflow", "swanlab") if not find_spec(n)]
    if not absent:
        pytest.skip("all of them are installed")
    overrides = [f"report_to=[{','.join(absent)}]", "model_name_or_path=nowhere"]
    config = load_config(run_dir / "run.yaml", overrides)
    with pytest.raises(UsageError, match=f"report_to asks for {' and '.join(absent)}") as caught:
        prepare(config)
    assert f"pip install {' '.join(absent)}" in caught.value.next_step


@pytest.mark.slow
@quiet
def test_tensorboard_shows_the_run_while_it_goes(run_dir):
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    trainrun.train(run_dir, "report_to=tensorboard", "max_steps=3", "val_size=2")
    events = reader.EventAccumulator(str(run_dir / "raw.runs"))
    events.Reload()
    assert [event.step for event in events.Scalars("train/loss")] == [1, 2, 3]
    assert [event.step for event in events.Scalars("eval/loss")] == [0, 1, 2, 3]


@quiet
def test_raw_text_is_packed_and_trained(tmp_path, base_dir):
    rows = [{"text": text(0, 40)}, {"text": text(3, 7)}, {"text": text(5, 9)}] * 4
    run = write_run(
        tmp_path, base_dir, rows, stage="pt", cutoff_len=16, val_size=2, max_steps=3, save_steps=0,
        learning_rate=1e-2, per_device_train_batch_size=4, kt_config={"kt_num_threads": 2},
    )  # fmt: skip
    assert load_config(run / "run.yaml").packing
    result = trainrun.train(run)
    for key in ("loss", "eval_loss"):
        found = [record[key] for record in log_of(tmp_path / "raw") if key in record]
        assert found[-1] < found[0]
    assert (result.used, result.cut, result.refused) == (10, 0, 0)


# --- from the Hub -------------------------------------------------------------------------------------------


@pytest.fixture
def hub(tmp_path):
    """A server with a tiny model in several shards."""
    base = tmp_path / "served"
    tiny_model().save_pretrained(base, max_shard_size="60KB")
    tiny_tokenizer().save_pretrained(base)
    with running_hub() as made:
        made.model("org/tiny", {path.name: path.read_bytes() for path in base.iterdir()})
        yield made


@pytest.mark.slow
def test_plan_and_dry_run_fetch_no_weights_and_a_run_names_the_model(hub, tmp_path, warm):
    run = write_run(tmp_path, "org/tiny", GOOD[:3], max_steps=1, use_cpu=True)
    environment = hub.environment(run / "home")

    def command(*arguments):
        return warm.run("-m", "ktbridge", *arguments, cwd=run, **environment)

    plan = command("plan", "run.yaml", "--json", "--no-measure")
    assert plan.stdout, plan.stderr
    found = json.loads(plan.stdout)
    shards = [path.name for path in (tmp_path / "served").glob("*.safetensors")]
    assert len(shards) > 2
    assert not found["from_config_alone"]
    assert "sizes are those of the files on the Hub" in found["notes"][0]
    dry = command("train", "run.yaml", "--dry-run", "--json")
    assert json.loads(dry.stdout)["trainable"]["expert_layers"] == 2, dry.stderr
    assert {given for name in shards for given in hub.downloads(name)} == {"bytes=0-100000"}
    assert not [*(run / "home").rglob("*.safetensors")]

    done = command("train", "run.yaml")
    assert done.returncode == 0, done.stderr
    written, manifest = (
        json.loads((run / "raw" / name).read_text())
        for name in ("adapter_config.json", "kt_adapter_manifest.json")
    )
    commit = hub.repos["model", "org/tiny"].commit
    assert (written["base_model_name_or_path"], written["revision"]) == ("org/tiny", commit)
    assert manifest["base"]["model_name_or_path"] == "org/tiny"
    assert manifest["base_fingerprint"]["values_sha256"]
    # A plan by the files that are here says the same.
    local = json.loads(command("plan", "run.yaml", "--json", "--no-measure").stdout)
    assert local["bytes"]["page_cache"] == found["bytes"]["page_cache"]
