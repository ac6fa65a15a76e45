"""Runs whose model and rows are on the Hub: planned by headers, downloaded once, named in the adapter."""

import json

import pytest
from hubserver import running_hub
from tinymoe import tiny_model, tiny_tokenizer
from trainrun import ROWS, conversation, write_run


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Of a tiny model in several shards."""
    directory = tmp_path_factory.mktemp("base")
    tiny_model().save_pretrained(directory, max_shard_size="60KB")
    tiny_tokenizer().save_pretrained(directory)
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.fixture
def hub(files):
    with running_hub() as made:
        made.model("org/tiny", files)
        yield made


@pytest.fixture
def run(tmp_path):
    rows = [conversation(*texts) for texts in ROWS]
    return write_run(tmp_path, "org/tiny", rows, max_steps=1, use_cpu=True)


@pytest.mark.slow
def test_plan_and_dry_run_fetch_no_weights_and_a_run_names_the_model(hub, run, warm, files):
    environment = hub.environment(run / "home")

    def command(*arguments):
        return warm.run("-m", "ktbridge", *arguments, cwd=run, **environment)

    plan = command("plan", "run.yaml", "--json", "--no-measure")
    assert plan.stdout, plan.stderr
    found = json.loads(plan.stdout)
    weights = [name for name in files if name.endswith(".safetensors")]
    assert len(weights) > 2
    assert not found["from_config_alone"]
    assert "sizes are those of the files on the Hub" in found["notes"][0]
    dry = command("train", "run.yaml", "--dry-run", "--json")
    assert json.loads(dry.stdout)["trainable"]["expert_layers"] == 2, dry.stderr
    assert {given for name in weights for given in hub.downloads(name)} == {"bytes=0-100000"}
    assert not [*(run / "home").rglob("*.safetensors")]

    done = command("train", "run.yaml")
    assert done.returncode == 0, done.stderr
    written = json.loads((run / "raw/adapter_config.json").read_text())
    commit = hub.repos["model", "org/tiny"].commit
    assert (written["base_model_name_or_path"], written["revision"]) == ("org/tiny", commit)
    manifest = json.loads((run / "raw/kt_adapter_manifest.json").read_text())
    assert manifest["base"]["model_name_or_path"] == "org/tiny"
    assert manifest["base_fingerprint"]["values_sha256"]
    # A plan by the files that are here says the same.
    local = json.loads(command("plan", "run.yaml", "--json", "--no-measure").stdout)
    assert local["bytes"]["page_cache"] == found["bytes"]["page_cache"]
