"""LLaMA-Factory's inference YAML for `ktbridge chat` and `serve`."""

import json
import subprocess

import pytest
import yaml
from click.testing import CliRunner
from manyranks import free_port

from ktbridge.adapter import convert_adapter
from ktbridge.cli import main
from ktbridge.errors import ProblemsError
from ktbridge.predict.inference import load_inference


@pytest.fixture
def inference(tmp_path, base, adapter):
    """inference(KEY=VALUE …): a file as LLaMA-Factory's examples for KTransformers have it."""

    def make(**changes):
        values = {
            "model_name_or_path": str(base), "adapter_name_or_path": str(adapter), "template": "qwen3",
            "infer_backend": "huggingface", "trust_remote_code": True, "use_kt": True,
            "kt_optimize_rule": "examples/kt_optimize_rules/Qwen3Moe-sft-amx.yaml", "cpu_infer": 1,
            "chunk_size": 8192, **changes,
        }  # fmt: skip
        (tmp_path / "inference.yaml").write_text(yaml.safe_dump(values))
        return str(tmp_path / "inference.yaml")

    return make


def serve(*arguments, **environment):
    done = CliRunner(env=environment).invoke(main, ["serve", "--dry-run", "--json", *arguments])
    return done, json.loads(done.stdout) if done.stdout else {}


def test_serve_takes_it_and_options_win(inference, base, adapter, tmp_path):
    port, other_port = free_port(), free_port()
    done, plan = serve(inference(temperature=0.5), API_PORT=str(port), API_KEY="secret")
    assert done.exit_code == 0, done.stderr
    found = [plan[key] for key in ("model", "port", "threads", "api_key", "nonexpert_adapters")]
    assert found == [str(base), port, 1, True, {"adapter": str(adapter)}]
    for key in ("template", "kt_optimize_rule", "chunk_size", "infer_backend", "temperature"):
        assert f"    {key} " in done.stderr
    assert "use_kt" not in done.stderr
    _, plan = serve(inference(), "--port", str(other_port), "--threads", "2", API_PORT=str(port))
    assert (plan["port"], plan["threads"]) == (other_port, 2)
    done, _ = serve(inference(), API_PORT="http")
    assert (done.exit_code, "API_PORT in the environment is 'http'" in done.stderr) == (2, True)
    other = tmp_path / "half"
    convert_adapter(adapter, nonexpert_output_dir=other, base_model=str(base))
    _, plan = serve(inference(), "--nonexpert-adapter", f"mine={other}")
    assert list(plan["nonexpert_adapters"]) == ["mine"]
    file, flags = inference(infer_backend="ktransformers"), ["--mem-fraction-static", "0.5"]
    done, plan = serve(file, "--engine-version", "0.7.2", "--", *flags)
    (launch,) = plan["launches"]
    assert "--trust-remote-code" in launch["argv"]
    assert launch["argv"][-2:] == flags


@pytest.mark.slow
def test_chat_takes_it_with_a_gguf_adapter(inference, gguf, cli_command, cli_environment, tmp_path):
    file = inference(adapter_name_or_path=str(gguf), do_sample=False, top_p=0.9, max_new_tokens=8)
    done = subprocess.run(
        cli_command("chat", file, "--max-tokens", "12"),
        input="hi\n/base\n/clear\nhi\n",
        capture_output=True,
        text=True,
        timeout=90,
        env=cli_environment | {"XDG_CACHE_HOME": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
    adapted, plain = done.stdout.splitlines()
    assert adapted != plain
    assert "    top_p" not in done.stderr


def test_every_mistake_is_named_at_once(inference):
    file = inference(
        model_name_or_pth="x", infer_backnd="y", zork=1, adapter_name_or_path="no", cpu_infer="x"
    )
    done, said = serve(file)
    found = {each["where"].rpartition(": ")[2]: each["next_step"] for each in said["problems"]}
    assert (done.exit_code, found.keys()) == (
        1, {"model_name_or_pth", "infer_backnd", "zork", "adapter_name_or_path", "cpu_infer"},
    )  # fmt: skip
    assert found["model_name_or_pth"] == "Did you mean model_name_or_path?"
    assert found["infer_backnd"] == "Did you mean infer_backend?"


def test_vllm_is_refused_with_the_commands(inference, adapter):
    with pytest.raises(ProblemsError) as error:
        load_inference(inference(infer_backend="vllm"))
    (problem,) = error.value.problems
    assert f"`ktbridge convert {adapter} --to vllm --output DIR`" in problem.next_step
