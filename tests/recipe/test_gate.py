"""`ktbridge gate`: real commands in real processes; what passes, what fails, what is kept."""

from __future__ import annotations

import hashlib
import json
import shutil
import signal
import subprocess
import sys
import time

import pytest
from click.testing import CliRunner
from tinyserver import save_adapter, save_model

from ktbridge.adapter.merge import merge_adapter
from ktbridge.cli import main
from ktbridge.errors import KtbridgeError
from ktbridge.eval.bench import load_bench
from ktbridge.eval.results.compare import parse_gate
from ktbridge.gate import GateRequest, GateVerdict, run_gate
from ktbridge.gate.run import GateEvents
from ktbridge.model import fingerprint
from ktbridge.recipe import RunListener

QUESTIONS = [{"prompt": f"What is {n} times {7 * n}?", "reference": "I don't know."} for n in range(8)]


@pytest.fixture(scope="module")
def adapter(base, tmp_path_factory):
    return save_adapter(tmp_path_factory.mktemp("adapters") / "right", base, strength=0.1)


@pytest.fixture
def items(tmp_path):
    path = tmp_path / "items.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS))
    return path


def judge(directory, python, request, items=None, condition="overall<-2"):
    benches = [load_bench("generic", items)] if items else []
    conditions = [parse_gate(condition)] if items else []
    with open(directory / "said.txt", "w") as output:
        return run_gate(request, benches, conditions, directory / "gate", python=python, output=output)


def outcomes(verdict):
    return {check.name: (check.outcome, check.kept) for check in verdict.checks}


def evaluation(items):
    words = ("--bench", "generic", "--items", str(items), "--fail-on", "overall<-2")
    return (*words, "--max-tokens", "96", "--extra-body", '{"temperature": 1, "seed": 3}')


def test_an_adapter_passes_once_and_is_kept_until_an_input_changes(tmp_path, python, base, adapter, items):
    mine = tmp_path / "mine"
    shutil.copytree(adapter, mine)
    request = GateRequest(mine, base, evaluation=evaluation(items))
    first = judge(tmp_path, python, request, items)
    assert (first.ok, first.verdict, first.sentence) == (
        True,
        "passed",
        "validate, verify, eval passed",
    )
    assert outcomes(first) == dict.fromkeys(("validate", "verify", "eval"), ("passed", False))
    hashes = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in mine.iterdir()}
    assert first.inputs.adapter.sha256 == hashes
    assert first.inputs.benches[0].sha256 == load_bench("generic", items).sha256

    written = (tmp_path / "gate/gate.json").read_text()
    assert GateVerdict.model_validate_json(written) == first
    assert "🟢 passed" in (tmp_path / "gate/gate.md").read_text()

    again = judge(tmp_path, python, request, items)
    assert outcomes(again) == dict.fromkeys(("validate", "verify", "eval"), ("passed", True))
    with (items).open("a") as file:
        file.write(json.dumps({"prompt": "Once more?", "reference": "No."}) + "\n")
    other = judge(tmp_path, python, request, items, "overall<2")  # holds whatever the answers are
    assert outcomes(other)["verify"] == ("passed", True)
    assert outcomes(other)["eval"][0] == "failed"
    assert [problem.code for problem in other.checks[2].problems] == ["KTB840"]
    assert not json.loads((tmp_path / "gate/gate.json").read_text())["ok"]


def test_what_fails_ends_the_gate_and_says_why(tmp_path, python, base, adapter):
    zero = save_adapter(tmp_path / "zero", base, strength=0.0)
    verdict = judge(tmp_path, python, GateRequest(zero, base))
    assert outcomes(verdict) == {
        "validate": ("failed", False),
        "verify": ("not run", False),
        "eval": ("skipped", False),
    }
    assert "KTB402" in {problem.code for problem in verdict.checks[0].problems}
    assert verdict.sentence == "validate failed; verify not run; eval not asked for"


def test_a_merged_checkpoint_is_compared_without_a_server(tmp_path, python, base, adapter):
    merge_adapter(adapter, base_model=base, output=tmp_path / "merged")
    request = GateRequest(adapter, base, merged=tmp_path / "merged")
    verdict = judge(tmp_path, python, request)
    assert verdict.ok, verdict
    assert verdict.checks[1].sentence.startswith("applied: ")
    assert verdict.checks[2].outcome == "skipped"
    assert verdict.sentence == "validate, verify passed; eval not asked for"
    assert verdict.inputs.merged is not None
    assert "model.safetensors" in verdict.inputs.merged.sha256
    assert (tmp_path / "gate/verify.html").is_file()

    for name in ("model.safetensors", "config.json"):
        shutil.copy2(base / name, tmp_path / "merged" / name)  # the base's, under the merge's name
    wrong = judge(tmp_path, python, request)
    assert outcomes(wrong)["validate"] == ("passed", True)
    assert outcomes(wrong)["verify"] == ("failed", False)
    assert wrong.checks[1].sentence.startswith("not applied: ")

    (tmp_path / "merged/model.safetensors").unlink()
    without = judge(tmp_path, python, request)
    assert outcomes(without)["verify"] == ("failed", False)
    assert "model.safetensors" not in without.inputs.merged.sha256


def test_an_adapter_of_another_base_fails(tmp_path, python, base, adapter):
    other = save_model(tmp_path / "other", seed=1)
    mine = tmp_path / "mine"
    shutil.copytree(adapter, mine)
    manifest = json.loads((mine / "kt_adapter_manifest.json").read_text())
    manifest["base_fingerprint"] = fingerprint(base).as_dict()  # as training writes it
    (mine / "kt_adapter_manifest.json").write_text(json.dumps(manifest))
    verdict = judge(tmp_path, python, GateRequest(mine, other))
    assert outcomes(verdict)["validate"] == ("failed", False)
    assert "KTB612" in {problem.code for problem in verdict.checks[0].problems}


def test_an_old_verdict_goes_before_new_inputs_are_read(tmp_path, python, base, adapter):
    (tmp_path / "gate").mkdir()
    (tmp_path / "gate/gate.json").write_text('{"verdict": "passed"}')
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text("{")
    with pytest.raises(KtbridgeError):
        judge(tmp_path, python, GateRequest(adapter, broken))
    assert not (tmp_path / "gate/gate.json").exists()


def test_an_adapter_that_changes_meanwhile_does_not_pass(tmp_path, python, base, adapter):
    mine = tmp_path / "mine"
    shutil.copytree(adapter, mine)

    class Writing(RunListener):
        def step_started(self, step, line):
            with (mine / "kt_adapter_manifest.json").open("a") as file:
                file.write("\n")

    merge_adapter(adapter, base_model=base, output=tmp_path / "merged")
    request = GateRequest(mine, base, merged=tmp_path / "merged")
    verdict = run_gate(request, [], [], tmp_path / "gate", GateEvents(Writing()), python)
    assert [check.outcome for check in verdict.checks[:2]] == ["passed", "passed"]
    assert (verdict.ok, "while the gate was at work" in verdict.sentence) == (False, True)


def test_a_server_that_is_not_there_fails_and_is_never_kept(tmp_path, python, base, adapter):
    request = GateRequest(adapter, base, server="http://127.0.0.1:9", model="tiny:neko")
    for kept in (False, True):
        verdict = judge(tmp_path, python, request)
        assert outcomes(verdict)["validate"] == ("passed", kept)
        assert outcomes(verdict)["verify"] == ("failed", False)
        assert "127.0.0.1:9" in verdict.checks[1].sentence


@pytest.mark.slow
def test_a_killed_gate_says_unfinished_and_goes_on(tmp_path, python, base, adapter):
    words = [
        "--adapter",
        str(adapter),
        "--base-model",
        str(base),
        "--output",
        str(tmp_path / "gate"),
    ]
    with subprocess.Popen([sys.executable, "-m", "ktbridge", "gate", *words]) as killed:
        document, state = tmp_path / "gate/gate.json", tmp_path / "gate/.ktbridge-run.json"
        while not (state.is_file() and '"validate"' in state.read_text()):
            assert killed.poll() is None
            time.sleep(0.05)
        with pytest.raises(KtbridgeError, match="another `ktbridge gate`"):
            judge(tmp_path, python, GateRequest(adapter, base))
        killed.send_signal(signal.SIGKILL)
    assert json.loads(document.read_text())["verdict"] == "unfinished"
    verdict = judge(tmp_path, python, GateRequest(adapter, base))
    assert (verdict.ok, outcomes(verdict)["validate"]) == (True, ("passed", True))


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["--merged", "m", "--server", "u"], "give one of --merged DIR and --server URL"),
        (["--server", "u"], "--server URL and --model NAME go together"),
        (["--fail-on", "KRI<0", "--limit", "2"], "--limit and --fail-on say how to evaluate"),
        (["--bench", "generc"], "generc"),
        (["--bench", "nekobench", "--fail-on", "KRJ<0"], "KRJ"),
        (["--bench", "nekobench", "--", "--max-tokns", "3"], "--max-tokns"),
        ([], "no/such"),
    ],
)
def test_wrong_usage_is_said_before_anything_runs(tmp_path, base, words, found):
    both = ["--adapter", "no/such", "--base-model", str(base), "--output", str(tmp_path / "gate")]
    done = CliRunner().invoke(main, ["gate", *both, *words])
    assert (done.exit_code, found in done.output) == (2, True), done.output
    assert not (tmp_path / "gate").exists()
