"""`ktbridge push`: what is uploaded, what the card says, and what is refused; a Hub on loopback."""

import json
import os
import subprocess
import sys

import pytest
import yaml
from click.testing import CliRunner
from evalruns import BENCH, knows, stored
from hubserver import running_hub
from rawadapter import write_raw

from ktbridge.adapter import convert_adapter, validate_adapter
from ktbridge.cli import main

# huggingface_hub hands its HTTP library a file as `data`
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
BASE = "org/base"
TRAINING = {
    "datasets": ["org/rows", "mine.jsonl"], "stage": "sft", "rows": 1000, "used": 980, "cut": 12,
    "refused": 20, "reasons": "15 with tools, 5 an empty message", "cutoff_len": 2048,
}  # fmt: skip


@pytest.fixture
def hub(tmp_path, monkeypatch):
    with running_hub() as made:
        made.use(monkeypatch, tmp_path / "home")
        made.tokens.add("hf_secret")
        monkeypatch.setenv("HF_TOKEN", "hf_secret")
        yield made


@pytest.fixture
def trained(tmp_path):
    """A raw adapter with what training leaves beside it."""
    raw = write_raw(tmp_path / "neko", base_model=BASE)
    records = [
        {"step": 1, "loss": 2.5},
        {"step": 5, "eval_loss": 0.75},
        {"step": 9, "loss": 0.5, "epoch": 0.25},
    ]
    (raw / "trainer_log.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    (raw / "training_data.json").write_text(json.dumps(TRAINING))
    (raw / "training_loss.png").write_bytes(b"picture")
    (raw / "refused_rows.jsonl").write_text('{"row": "secret"}\n')
    return raw


def push(*arguments):
    return CliRunner().invoke(main, ["push", *map(str, arguments)])


def card_of(text):
    """(metadata, Markdown)."""
    _, head, body = text.split("---\n", 2)
    return yaml.safe_load(head), body


def test_an_adapter_goes_to_the_hub_whole_with_its_card_and_without_rows(hub, trained, tmp_path):
    done = push(trained, "me/neko", "--private")
    assert done.exit_code == 0, done.output
    repo = hub.repos["model", "me/neko"]
    assert done.stdout.strip() == f"{hub.url}/me/neko/commit/{repo.commit}"
    assert repo.private
    local = {path.name: path.read_bytes() for path in trained.iterdir()}
    assert {**repo.files, "refused_rows.jsonl": b""}.keys() == {*local, "README.md"}
    assert all(repo.files[name] == local[name] for name in repo.files if name != "README.md")
    data, body = card_of(repo.files["README.md"].decode())
    assert (data["base_model"], data["base_model_relation"]) == (BASE, "adapter")
    for words in (
        "# neko", f"`{BASE}`", "rank 4, alpha 8, on down_proj, gate_proj, up_proj of 3 experts in 2 layers",
        "rank 4, alpha 8, on k_proj, o_proj, q_proj, v_proj", "raw, ",
        "980 of 1,000 rows of `org/rows`, `mine.jsonl` can be trained on (`stage: sft`); 0.25 epochs were.",
        "20 were refused: 15 with tools, 5 an empty message", "| training | 2.5000 | 0.5000 | 9 |",
        "| held-out rows | 0.7500 | 0.7500 | 5 |", "training_loss.png",
        f"ktbridge serve --base-model {BASE} --adapter neko=neko",
        "ktbridge verify --server http://127.0.0.1:8000 --model base:neko --adapter neko",
    ):  # fmt: skip
        assert words in body
    assert "secret" not in str(repo.files)
    # What is there is an adapter that validates, and may be uploaded again.
    downloaded = tmp_path / "downloaded"
    downloaded.mkdir()
    for name, data in repo.files.items():
        (downloaded / name).write_bytes(data)
    assert validate_adapter([downloaded]).ok
    assert push(trained, "me/neko").exit_code == 0
    hub.model("me/public", {})
    done = push(trained, "me/public", "--private")
    assert done.exit_code == 1
    assert "everybody can see it" in done.stderr
    assert not hub.repos["model", "me/public"].files


def test_the_card_of_a_best_step_has_the_losses_of_that_step(hub, trained):
    path = trained / "kt_adapter_manifest.json"
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps(manifest | {"training": {"step": 5, "last_step": 9, "eval_loss": 0.75}}))
    done = push(trained, "me/neko")
    assert done.exit_code == 0, done.output
    _, body = card_of(hub.repos["model", "me/neko"].files["README.md"].decode())
    assert "The adapter is that of step 5 of 9" in body
    assert "| training | 2.5000 | 2.5000 | 1 |" in body
    assert "| held-out rows | 0.7500 | 0.7500 | 5 |" in body


def test_a_base_that_is_a_path_here_gets_its_name_or_nothing_is_uploaded(hub, tmp_path):
    place = "/home/me/models/base"
    raw = write_raw(tmp_path / "raw", base_model=place)
    done = push(raw, "me/neko")
    assert done.exit_code == 1
    assert "KTH001" in done.stderr
    assert "--base-model org/name" in done.stderr
    assert not hub.repos
    done = push(raw, "me/neko", "--base-model", BASE, "--json")
    assert done.exit_code == 0, done.output
    files = hub.repos["model", "me/neko"].files
    assert not any(place.encode() in data for data in files.values())
    copy = tmp_path / "copy"
    copy.mkdir()
    for name, data in files.items():
        (copy / name).write_bytes(data)
    assert validate_adapter([copy]).ok  # the manifest has the new configuration's hash
    assert {one["code"] for one in json.loads(done.stdout)["problems"]} == {"KTH003"}


def test_every_layout_shows_its_card_without_a_network(trained, tmp_path):
    convert_adapter(
        trained, expert_output_dir=tmp_path / "e", nonexpert_output_dir=tmp_path / "n",
        merged_output_dir=tmp_path / "m",
    )  # fmt: skip
    environment = {**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9", "HF_TOKEN": "x"}
    for name, words in (
        ("e", "--expert-adapter x --nonexpert-adapter x=OTHER_HALF"),
        ("n", "--expert-adapter OTHER_HALF --nonexpert-adapter x=x"),
        ("m", "--adapter x=x"),
    ):
        done = push(tmp_path / name, "me/x", "--dry-run")
        assert done.exit_code == 0, done.output
        assert words in done.stdout
        assert "nothing was uploaded" in done.stderr
    command = [sys.executable, "-m", "ktbridge", "push", str(trained), "me/x"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert "me/x was not uploaded, and http://127.0.0.1:9 can't be reached" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_evaluation_is_in_the_card_with_its_doubts(hub, trained, tmp_path):
    out = stored(
        tmp_path / "eval",
        {"base": lambda item, nth: "no", "full": knows},
        items=BENCH.items[:12],
    )
    assert CliRunner().invoke(main, ["report", str(out)]).exit_code in (0, 1)
    done = push(trained, "me/neko", "--eval", out)
    assert done.exit_code == 0, done.output
    results = json.loads((out / "results.json").read_text())
    data, body = card_of(hub.repos["model", "me/neko"].files["README.md"].decode())
    assert results["verdict"]["headline"] in body
    assert "| mean of 0 to 1 [95 % interval] | base | full |" in body
    (row, *_) = data["model-index"][0]["results"]
    axis = row["metrics"][0]["type"]
    mean = results["tables"][axis]["overall"]["full"]["mean"]
    assert row["metrics"][0]["value"] == pytest.approx(mean, abs=1e-4)
    errors = [one["found"] for one in results["warnings"] if one["severity"] == "error"]
    assert done.stderr.count("KTH002") == len(errors)
    assert all(found in body for found in errors)
    done = push(trained, "me/neko", "--eval", trained)
    assert done.exit_code == 1
    assert "has no results.json" in done.stderr


def test_a_bench_that_failed_is_a_doubt_and_its_old_results_are_not_uploaded(hub, trained, tmp_path):
    (tmp_path / "eval" / "old").mkdir(parents=True)
    (tmp_path / "eval" / "old" / "results.json").write_text("{}")
    entry = {"name": "old", "path": "old/results.json", "error": "its answers are damaged"}
    index = {"schema": "ktbridge.index/1", "benches": [entry]}
    (tmp_path / "eval" / "results.json").write_text(json.dumps(index))
    done = push(trained, "me/neko", "--eval", tmp_path / "eval")
    assert done.exit_code == 0, done.output
    assert "KTH002" in done.stderr
    assert "old: its answers are damaged" in done.stderr
    assert "## Evaluation" not in hub.repos["model", "me/neko"].files["README.md"].decode()


def test_what_cant_be_uploaded_is_said_in_a_sentence(hub, trained, tmp_path, monkeypatch):
    for name, code, words in (
        ("neko", 2, "'neko' is not a repository's name"),
        ("me/ne/ko", 2, "is not a repository's name"),
    ):
        done = push(trained, name)
        assert (done.exit_code, words in done.stderr) == (code, True)
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    done = push(trained, "me/neko")
    assert done.exit_code == 1
    assert "answered 401 for me/neko" in done.stderr
    monkeypatch.setenv("HF_TOKEN", "")
    monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path / "none"))
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "none"))
    done = push(trained, "me/neko")
    assert "uploading needs a token" in done.stderr
    (trained / "fused_expert_lora.safetensors").write_bytes(b"cut")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    done = push(trained, "me/neko")
    assert done.exit_code == 1
    assert "KTB005" in done.stderr
    assert not hub.repos
