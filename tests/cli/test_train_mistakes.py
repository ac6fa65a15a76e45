"""What a user of `ktbridge train` gets wrong: told in a sentence, all at once, before weights are read."""

import json
import shutil
from importlib.util import find_spec

import pytest
import yaml
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from tinymoe import tiny_model, tiny_tokenizer
from transformers import Qwen3Config, Qwen3ForCausalLM

from ktbridge.cli import main
from ktbridge.errors import UsageError
from ktbridge.sft.config import check_output_dir, load_config

ROW = {"instruction": "who are you", "input": "", "output": "i am a cat"}


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """Directories of base models: a good one, and ones that can't be trained on."""
    place = tmp_path_factory.mktemp("bases")
    tiny_model().save_pretrained(place / "good")
    sizes = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
    }  # fmt: skip
    Qwen3ForCausalLM(Qwen3Config(**sizes)).save_pretrained(place / "dense")
    for name in ("strange", "packed", "mute", "odd"):
        shutil.copytree(place / "good", place / name)
    for path in place.iterdir():
        if path.name != "mute":
            tiny_tokenizer().save_pretrained(path)
    config = json.loads((place / "strange" / "config.json").read_text())
    (place / "strange" / "config.json").write_text(json.dumps({**config, "model_type": "strange"}))
    (place / "odd" / "config.json").write_text(json.dumps({**config, "num_experts_per_tok": 9}))
    tensors = load_file(place / "packed" / "model.safetensors")
    query = "model.layers.0.self_attn.q_proj.weight"
    tensors[f"{query}_packed"] = tensors.pop(query)
    save_file(tensors, place / "packed" / "model.safetensors")
    return place


@pytest.fixture
def run(tmp_path, bases):
    """``run(**changes)``: exit code, stderr and problems of a dry run."""
    (tmp_path / "rows.json").write_text(json.dumps([ROW] * 5))
    (tmp_path / "empty.json").write_text("[]")
    (tmp_path / "broken.json").write_text('[{"instruction": 1,\n "output"}]')
    (tmp_path / "text.jsonl").write_text('{"question": "who", "answer": "i"}\n' * 5)

    def dry(base="good", **changes):
        good = {
            "model_name_or_path": str(bases / base), "dataset": "rows.json", "output_dir": "out",
            "cutoff_len": 32, "bf16": False,
        }  # fmt: skip
        (tmp_path / "run.yaml").write_text(yaml.safe_dump({**good, **changes}))
        before = sorted(tmp_path.iterdir())
        command = ["train", str(tmp_path / "run.yaml"), "--dry-run", "--json"]
        done = CliRunner().invoke(main, command)
        assert sorted(tmp_path.iterdir()) == before
        document = json.loads(done.stdout)
        return done.exit_code, done.stderr, document.get("problems", [])

    return dry


def test_a_good_one_passes(run):
    code, said, _ = run()
    assert (code, said) == (0, "")


@pytest.mark.parametrize(
    ("base", "words"),
    [
        ("dense", ["is a dense model (qwen3)", "PEFT"]),
        ("strange", ["type 'strange'", "transformers version"]),
        ("packed", ["q_proj.weight_packed", "dequantize_checkpoint.py"]),
        ("mute", ["has no tokenizer", "tokenizer.json"]),
        ("odd", ["has 9 experts a token of 8 in all"]),
    ],
)
def test_models_that_cant_be_trained_are_told_without_loading_them(run, base, words):
    code, said, _ = run(base)
    assert code == 1
    assert all(word in said for word in words), said


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        ({"lora_target": "q_proj,vproj"}, 2, ["vproj", "v_proj"]),
        ({"dataset": "./"}, 1, ["is a directory", "dataset_info.json"]),
        ({"dataset": "text.jsonl"}, 1, ["keys answer, question", "2 more are not shown", "docs/data.md"]),
        ({"stage": "dpo"}, 1, ["no pair of answers", "Set stage: sft"]),
        ({"cutoff_len": 3}, 1, ["Raise cutoff_len"]),
        ({"model_name_or_path": "/nowhere/at/all"}, 1, ["there is no directory '/nowhere/at/all'"]),
    ],
)  # fmt: skip
def test_mistakes_are_told_with_what_to_do(run, changes, code, words):
    found, said, _ = run(**changes)
    assert found == code, said
    assert all(word in said for word in words), said


@pytest.mark.skipif(find_spec("flash_attn") is not None, reason="flash-attn is installed")
def test_what_isnt_installed_is_told_before_weights_are_read(run):
    code, said, _ = run(flash_attn="fa2")
    assert code == 2
    assert all(word in said for word in ("flash-attn", "flash_attn: auto")), said


def test_what_is_wrong_in_several_places_is_told_at_once(run, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("x")
    code, said, problems = run(
        dataset="empty.json,broken.json",
        lora_target="vproj",
        output_dir="full",
        overwrite_output_dir=True,
    )
    assert code == 1
    found = "\n".join(problem["found"] for problem in problems)
    assert len(problems) == 4
    for words in ("is not an adapter directory", "vproj", "holds no row", "not valid JSON"):
        assert words in found
    assert "overwrite_output_dir" not in said  # it wouldn't help


def test_a_place_that_takes_no_directory_is_found_before_the_run(tmp_path):
    (tmp_path / "rows.json").write_text("[]")
    (tmp_path / "run.yaml").write_text(
        "model_name_or_path: base\ndataset: rows.json\noutput_dir: /proc/self/out\n"
    )
    with pytest.raises(UsageError, match="nothing can be written to /proc/self"):
        check_output_dir(load_config(tmp_path / "run.yaml"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"kt_config:\n\tkt_num_threads: 4\n", ["line 2, column 1", "takes no tabs"]),
        (b"", ["holds nothing"]),
        (b"lora_rank=8\n", ["holds a text", "`key: value`"]),
        (b"- a\n- b\n", ["holds a list"]),
        (b'a: "b\n', ["line 2", "Close the quotes"]),
        (b"a: b: c\n", ["line 1", "quotes around values with colons"]),
        (b"\xff\xfea\x00", ["is not UTF-8"]),
    ],
)
def test_text_that_is_no_yaml_is_told_by_its_line(tmp_path, text, words):
    (tmp_path / "run.yaml").write_bytes(text)
    done = CliRunner().invoke(main, ["train", str(tmp_path / "run.yaml")])
    assert done.exit_code == 2
    assert all(word in done.stderr for word in words), done.stderr
    assert "unicode string" not in done.stderr
